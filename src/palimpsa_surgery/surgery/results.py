"""Results of evaluations: what a `results.json` holds, and its strict reader (DESIGN section 10).

`eval` writes it, `compare` reads it, and `export` puts it into the model card.
"""

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.records import Count, check_version, saved_file
from palimpsa_surgery.surgery.weights import read_json

VERSION = 1
RESULTS_FILE = "results.json"
RESULTS_TABLE = "results.md"


class _Strict(BaseModel):
    """Frozen; no unknown fields, no silent conversions, no NaN and no infinities."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


class Metric(_Strict):
    """One number of a task, as lm-eval computed it."""

    value: float | None
    """None where it is not a finite number."""
    stderr: float | None = None
    higher_is_better: bool | None = None


class TaskResult(_Strict):
    """One task of lm-eval, or one of its groups."""

    version: str
    """The task's version in lm-eval."""
    num_fewshot: int
    dataset: str | None = None
    """Hub id or builder of its data; None where the task makes them."""
    documents: Count
    """Documents that were scored."""
    available: Count
    """Documents that the task has."""
    truncated: Count = 0
    """Scored documents whose beginning was cut, since they exceed the length."""
    split: Count = 0
    """Scored documents that were read in several windows, each from an empty memory (rolling perplexities)."""
    longest: Count = 0
    """Tokens that the longest request needed, those to be generated included."""
    metrics: dict[str, Metric]
    """By lm-eval's name; `name,filter` where the task has several filters."""


class Score(_Strict):
    """A number of the summary, which is what papers print."""

    name: str
    column: str = ""
    """Where a preset has columns, such as RULER's lengths."""
    value: float
    unit: Literal["%", "perplexity", ""] = ""
    """A percentage holds the percentage: 59.2, not 0.592."""
    higher_is_better: bool | None = None
    task: str | None = None
    """The task that it comes from; None for an average."""


class Evaluation(_Strict):
    """What `eval` measured; the content of a `results.json`."""

    version: Literal[1] = VERSION
    kind: Literal["evaluation"] = "evaluation"
    model: str
    """As the user named it."""
    model_fingerprint: str
    """Hash of its weights, see `checkpoints.fingerprint`."""
    parameters: Count
    palimpsa_layers: tuple[Count, ...]
    preset: str
    """A preset's name, or that of the task file or folder."""
    lm_eval: str
    """Version of lm-eval."""
    palimpsa_surgery: str
    date: str
    device: str
    dtype: str
    batch_size: str
    processes: int = Field(ge=1)
    seconds: float
    limit: Annotated[int, Field(ge=1)] | None
    """Documents of each task (in RULER of each length) that were scored at most; None: all."""
    lengths: tuple[int, ...] | None = None
    """Lengths of RULER's documents, in tokens."""
    max_length: int
    """Tokens beyond which a request was cut from the left."""
    stated_length: int
    """Tokens that the model's config states, or that its kind was trained on."""
    scores: tuple[Score, ...] = Field(min_length=1)
    tasks: dict[str, TaskResult] = Field(min_length=1)
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        for (name, column), times in Counter((score.name, score.column) for score in self.scores).items():
            if times > 1:
                raise ValueError(f"score {' at '.join(filter(None, (name, column)))} is there {times} times")
        for score in self.scores:
            if score.task is not None and score.task not in self.tasks:
                raise ValueError(f"score {score.name} is of task {score.task}, which is not among the tasks")
        return self

    @property
    def truncated(self) -> int:
        """Documents of all tasks that were cut."""
        return sum(task.truncated for task in self.tasks.values())

    def save(self, directory: str | os.PathLike) -> Path:
        """Write `results.json` and `results.md` into an existing folder; return the path of the former."""
        path = Path(directory) / RESULTS_FILE
        path.write_text(json.dumps(self.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (Path(directory) / RESULTS_TABLE).write_text(results_markdown(self), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | os.PathLike) -> Self:
        """Read an evaluation from its folder or from the file itself.

        Raises:
            UserError: there is none, or the file is damaged, of another version or something else.
        """
        file = saved_file(path, RESULTS_FILE, "there are no results")
        content = read_json(file)
        if content.get("kind") != "evaluation":
            raise UserError(f"{file} is not the result of an evaluation by `eval`")
        check_version(content, VERSION, str(file))
        try:
            return cls.model_validate_json(json.dumps(content))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            what = first["msg"].removeprefix("Value error, ")
            what = f"{what[0].lower()}{what[1:]}"
            raise UserError(f"{file} is damaged: {f'{where}: {what}' if where else what}") from None


def grid(scores: Sequence[Score]) -> tuple[list[str], list[str], dict[tuple[str, str], Score]]:
    """Names and columns of the scores in their order, and the scores by both."""
    names = list(dict.fromkeys(score.name for score in scores))
    columns = list(dict.fromkeys(score.column for score in scores))
    return names, columns, {(score.name, score.column): score for score in scores}


def format_score(score: Score | None) -> str:
    """A number of the summary: percentages with one digit more than papers print, others with two to four."""
    if score is None:
        return ""
    if score.unit == "%":
        return f"{score.value:.2f}"
    return f"{score.value:,.2f}" if score.unit == "perplexity" else f"{score.value:.4g}"


def label(score: Score) -> str:
    """A score's name with its unit and an arrow towards the better."""
    arrow = {True: " ↑", False: " ↓", None: ""}[score.higher_is_better]
    unit = f" ({score.unit})" if score.unit == "%" else ""
    return f"{score.name}{unit}{arrow}"


def score_table(evaluation: Evaluation) -> list[list[str]]:
    """Head and rows of the summary, as text."""
    names, columns, by_place = grid(evaluation.scores)
    first = {score.name: score for score in reversed(evaluation.scores)}
    head = ["", *(column or evaluation.preset for column in columns)]
    return [head, *([label(first[n]), *(format_score(by_place.get((n, c))) for c in columns)] for n in names)]


def conditions(evaluation: Evaluation) -> str:
    """How the numbers came about, in a sentence or two."""
    cut = evaluation.truncated
    limit = f", at most {evaluation.limit:,} documents of each" if evaluation.limit else ""
    return (
        f"lm-eval {evaluation.lm_eval}, {evaluation.preset}{limit}; up to {evaluation.max_length:,} tokens, "
        f"{f'{cut:,} documents cut from the left' if cut else 'nothing cut'}; "
        f"{evaluation.dtype} on {evaluation.device}, {evaluation.date}."
    )


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table whose first row is its head; numbers stand at the right."""
    head, *body = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return [f"| {' | '.join(head)} |", f"|---{'|---:' * (len(head) - 1)}|", *(f"| {' | '.join(r)} |" for r in body)]


def task_rows(evaluation: Evaluation) -> list[list[str]]:
    """Head and rows of the tasks: version, documents, and what was cut."""
    head = ["task", "version", "shots", "documents", "longest", "cut", "split"]
    return [
        head,
        *(
            [
                name,
                task.version,
                str(task.num_fewshot),
                f"{task.documents:,}" + (f" of {task.available:,}" if task.available > task.documents else ""),
                f"{task.longest:,}",
                f"{task.truncated:,}",
                f"{task.split:,}",
            ]
            for name, task in evaluation.tasks.items()
        ),
    ]


def results_markdown(evaluation: Evaluation) -> str:
    """The content of `results.md`."""
    lines = [f"# Evaluation of {evaluation.model}\n", conditions(evaluation) + "\n"]
    lines += [*markdown_table(score_table(evaluation)), ""]
    lines += [f"Note: {note}\n" for note in evaluation.notes]
    lines += ["Tokens that the longest request needed, and documents whose beginning was cut or that were split:\n"]
    lines += [*markdown_table(task_rows(evaluation)), ""]
    return "\n".join(lines)
