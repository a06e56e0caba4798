"""Results of evaluations: their file, its strict reader, and their tables."""

import io
import json

import pytest
from rich.console import Console

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.results import Evaluation, Metric, Score, TaskResult
from palimpsa_surgery.surgery.results_table import results_report


def make_evaluation(**changes) -> Evaluation:
    fields = {
        "model": "models/hybrid",
        "model_fingerprint": "f00",
        "parameters": 1000,
        "palimpsa_layers": (1,),
        "preset": "ruler",
        "lm_eval": "0.4.13",
        "palimpsa_surgery": "0.1.0",
        "date": "2026-11-30",
        "device": "cpu",
        "dtype": "float32",
        "batch_size": "1",
        "processes": 1,
        "seconds": 2.5,
        "limit": None,
        "lengths": (4096, 8192),
        "max_length": 8704,
        "stated_length": 2048,
        "scores": (
            Score(name="N-1", column="4,096", value=94.44, unit="%", higher_is_better=True, task="niah_single_1"),
            Score(name="N-1", column="8,192", value=80.0, unit="%", higher_is_better=True, task="niah_single_1"),
            Score(name="VT", column="4,096", value=33.5, unit="%", higher_is_better=True, task="ruler_vt"),
        ),
        "tasks": {
            name: TaskResult(
                version="1.0",
                num_fewshot=0,
                documents=500,
                available=1000,
                truncated=cut,
                longest=8200,
                metrics={"4096": Metric(value=0.5, stderr=0.1, higher_is_better=True)},
            )
            for name, cut in (("niah_single_1", 0), ("ruler_vt", 7))
        },
        "notes": ("something is missing",),
    }
    return Evaluation(**fields | changes)


def test_what_is_written_is_read(tmp_path):
    made = make_evaluation()
    assert made.save(tmp_path) == tmp_path / "results.json"
    assert Evaluation.load(tmp_path) == Evaluation.load(tmp_path / "results.json") == made
    content = json.loads((tmp_path / "results.json").read_text())
    assert (content["version"], content["kind"], content["tasks"]["ruler_vt"]["truncated"]) == (1, "evaluation", 7)


def test_the_markdown_has_a_column_for_each_length(tmp_path):
    make_evaluation(limit=3).save(tmp_path)
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert lines[0] == "# Evaluation of models/hybrid"
    assert "at most 3 documents of each" in lines[2]
    assert "7 documents cut from the left" in lines[2]
    table = [line for line in lines if line.startswith("|")]
    assert table[:4] == [
        "|  | 4,096 | 8,192 |",
        "|---|---:|---:|",
        "| N-1 (%) ↑ | 94.44 | 80.00 |",
        "| VT (%) ↑ | 33.50 |  |",
    ]
    assert "| ruler_vt | 1.0 | 0 | 500 of 1,000 | 8,200 | 7 | 0 |" in table


def test_the_report_fits_80_columns_and_names_what_was_cut():
    console = Console(file=io.StringIO(), width=80)
    lengths = [f"{1024 * 2**power:,}" for power in range(8)]
    long = "a_task_with_a_name_that_is_as_long_as_names_of_tasks_can_get_and_then_some"
    scores = tuple(Score(name=long, column=length, value=12.345, unit="%") for length in lengths)
    console.print(results_report(make_evaluation(scores=scores)))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "131,072" in text
    assert "ruler_vt" in text
    assert "niah_single_1" not in text, "nothing of it was cut"
    assert "note: something is missing" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.update(version=2), "is of version 2; this program reads 1"),
        (lambda content: content.update(kind="comparison"), "is not the result of an evaluation by `eval`"),
        (lambda content: content.pop("kind"), "is not the result of an evaluation by `eval`"),
        (lambda content: content.update(max_length="long"), "is damaged: max_length: input should be a valid integer"),
        (lambda content: content.update(extra=1), "is damaged: extra: extra inputs are not permitted"),
        (lambda content: content.pop("scores"), "is damaged: scores: field required"),
        (lambda content: content["scores"][0].update(value=None), "is damaged: scores.0.value: input should be"),
        (lambda content: content["scores"][0].update(unit="apples"), "is damaged: scores.0.unit: input should be"),
        (lambda content: content.update(tasks={}), "is damaged: tasks: dictionary should have at least 1 item"),
        (lambda content: content["scores"][0].update(task="gone"), "of task gone, which is not among the tasks"),
        (lambda content: content["scores"].append(content["scores"][0]), "score N-1 at 4,096 is there 2 times"),
        (lambda content: content.update(limit=0), "is damaged: limit: input should be greater than or equal to 1"),
        (
            lambda content: content["tasks"]["ruler_vt"].update(documents=-1),
            "tasks.ruler_vt.documents: input should be",
        ),
        (lambda content: content.update(notes={"__float__": []}), "is not valid JSON: __float__ is [], no number"),
    ],
    ids=[
        "version",
        "kind",
        "no-kind",
        "type",
        "unknown",
        "missing",
        "null",
        "unit",
        "empty",
        "task",
        "twice",
        "none",
        "negative",
        "float",
    ],
)
def test_a_damaged_file_is_one_line(change, message, tmp_path):
    path = make_evaluation().save(tmp_path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        Evaluation.load(tmp_path)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("text", "message"), [("{", "is not valid JSON"), ("[]", "holds a JSON list, not an object")])
def test_a_file_that_is_no_json(text, message, tmp_path):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(UserError, match=message):
        Evaluation.load(tmp_path)


def test_a_missing_file(tmp_path):
    with pytest.raises(UserError, match="there are no results at"):
        Evaluation.load(tmp_path)
