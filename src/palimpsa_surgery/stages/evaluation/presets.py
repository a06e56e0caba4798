"""What the presets run, and how their summaries follow from lm-eval's numbers (paper Tables 2, 3 and 6)."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from palimpsa_surgery.surgery.results import Score

Results = Mapping[str, Mapping[str, Any]]
"""lm-eval's numbers by task and by `metric,filter`."""

SHORTEST = {"ruler_vt": 1024, "ruler_cwe": 1024}
"""Lengths below which the generators of lm-eval 0.4.13 may search for ever."""

RULER_LENGTHS = (4096, 8192, 16384, 32768)
RULER_MARGIN = 512
"""Tokens by which RULER's prompts may exceed their nominal length: the answer's beginning, which lm-eval adds, and in
cwe and fwe the example and the tokens to be generated, which it does not count."""


@dataclass(frozen=True)
class Preset:
    """Tasks of lm-eval and what is made of their numbers.

    Attributes:
        tasks: by name, the folder of lm-eval's own tasks that holds it.
        summary: makes the scores from lm-eval's numbers, the samples of the tasks (if kept) and the lengths.
        lengths: lengths of the documents in tokens, where the task makes them to measure.
        needs: packages besides lm-eval.
        samples: whether `summary` needs the samples.
    """

    tasks: Mapping[str, str]
    summary: Callable[[Results, Mapping[str, Sequence[Mapping[str, Any]]], Sequence[int]], list[Score]]
    lengths: tuple[int, ...] = ()
    needs: tuple[str, ...] = ()
    samples: bool = False


@dataclass(frozen=True)
class _Column:
    """A column of the paper's Table 2."""

    name: str
    task: str
    metric: str
    averaged: bool = field(default=False, kw_only=True)


COMMONSENSE = (
    _Column("WikiText word perplexity", "wikitext", "word_perplexity"),
    _Column("LAMBADA perplexity", "lambada_openai", "perplexity"),
    _Column("LAMBADA acc", "lambada_openai", "acc", averaged=True),
    _Column("PIQA acc_norm", "piqa", "acc_norm", averaged=True),
    _Column("HellaSwag acc_norm", "hellaswag", "acc_norm", averaged=True),
    _Column("WinoGrande acc", "winogrande", "acc", averaged=True),
    _Column("ARC-easy acc", "arc_easy", "acc", averaged=True),
    _Column("ARC-challenge acc_norm", "arc_challenge", "acc_norm", averaged=True),
    _Column("SIQA acc", "social_iqa", "acc", averaged=True),
)
"""The columns of Table 2 in its order; those averaged are its seven accuracies."""


def commonsense_summary(results: Results, _samples: object, _lengths: object) -> list[Score]:
    """Two perplexities, seven accuracies and, if all seven are there, their average (paper Table 2)."""
    scores = []
    for column in COMMONSENSE:
        if column.task not in results:
            continue
        value = results[column.task][f"{column.metric},none"]
        if not _finite(value):
            continue
        percent = column.averaged
        scores.append(
            Score(
                name=column.name,
                value=100 * value if percent else value,
                unit="%" if percent else "perplexity",
                higher_is_better=percent,
                task=column.task,
            )
        )
    accuracies = [score.value for score in scores if score.unit == "%"]
    if len(accuracies) == sum(column.averaged for column in COMMONSENSE):
        mean = sum(accuracies) / len(accuracies)
        scores.append(Score(name="average of 7 accuracies", value=mean, unit="%", higher_is_better=True))
    return scores


RULER = {
    "retrieval": {
        "N-1": ("niah_single_1",),
        "N-2": ("niah_single_2",),
        "N-3": ("niah_single_3",),
        "N-MK": ("niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
        "N-MQ": ("niah_multiquery",),
        "N-MV": ("niah_multivalue",),
    },
    "tracing": {"VT": ("ruler_vt",)},
    "aggregation": {"CWE": ("ruler_cwe",), "FWE": ("ruler_fwe",)},
    "question answering": {"HotPot": ("ruler_qa_hotpot",), "SQA": ("ruler_qa_squad",)},
}
"""The categories of Table 6, their columns, and the tasks of each (N-MK: RULER's three sets of distractors)."""


def ruler_summary(results: Results, _samples: object, lengths: Sequence[int]) -> list[Score]:
    """Each column and each category of Table 6 at each length; a category counts every task once.

    Of a column whose tasks were not all run, those that were stand under their own names.
    """

    def score(name: str, tasks: Sequence[str], length: int) -> list[Score]:
        values = [results[task].get(f"{length},none", -1) for task in tasks if task in results]
        if len(values) < len(tasks) or min(values) < 0:  # -1: no document of that length
            return []
        mean = 100 * sum(values) / len(values)
        only = tasks[0] if len(tasks) == 1 else None
        return [Score(name=name, column=f"{length:,}", value=mean, unit="%", higher_is_better=True, task=only)]

    scores: list[Score] = []
    for category, columns in RULER.items():
        rows = [
            row
            for name, tasks in columns.items()
            for row in ([(name, tasks)] if results.keys() >= set(tasks) else [(task, (task,)) for task in tasks])
        ]
        if len(columns) > 1:
            rows.append((category, tuple(task for tasks in columns.values() for task in tasks)))
        scores += [found for name, tasks in rows for length in lengths for found in score(name, tasks, length)]
    everything = [task for columns in RULER.values() for tasks in columns.values() for task in tasks]
    for length in lengths:
        scores += score("average of 13 tasks", everything, length)
    return scores


LONGBENCH2 = (
    *("longbench2_govt_single", "longbench2_legal_single", "longbench2_lit_single", "longbench2_fin_single"),
    *("longbench2_academic_single", "longbench2_detective", "longbench2_event_order", "longbench2_govt_multi"),
    *("longbench2_academic_multi", "longbench2_fin_multi", "longbench2_legal_multi", "longbench2_news_multi"),
    *("longbench2_user_guide", "longbench2_translate", "longbench2_many_shot", "longbench2_agent_history"),
    *("longbench2_dialogue_history", "longbench2_code", "longbench2_graph", "longbench2_table"),
)
LONGBENCH2_GROUPS = {"difficulty": ("easy", "hard"), "length": ("short", "medium", "long")}
"""Fields of a document that Table 3 groups by, and their values in its order."""


def longbench2_summary(
    results: Results, samples: Mapping[str, Sequence[Mapping[str, Any]]], _lengths: object
) -> list[Score]:
    """Accuracy over all questions, and over those of each difficulty and length (paper Table 3)."""
    documents = [sample for name in results for sample in samples[name]]

    def score(name: str, chosen: Sequence[Mapping[str, Any]]) -> list[Score]:
        if not chosen:
            return []
        mean = 100 * sum(sample["acc"] for sample in chosen) / len(chosen)
        return [Score(name=name, value=mean, unit="%", higher_is_better=True)]

    scores = score("overall", documents)
    for key, values in LONGBENCH2_GROUPS.items():
        for value in values:
            scores += score(value, [s for s in documents if str(s["doc"].get(key)).lower() == value])
    return scores


PRESETS = {
    "commonsense": Preset(
        tasks={
            "wikitext": "wikitext",
            "lambada_openai": "lambada",
            "piqa": "piqa",
            "hellaswag": "hellaswag",
            "winogrande": "winogrande",
            "arc_easy": "arc",
            "arc_challenge": "arc",
            "social_iqa": "siqa",
        },
        summary=commonsense_summary,
    ),
    "ruler": Preset(
        tasks=dict.fromkeys(  # in lm-eval's order, since all draw their data from one stream of random numbers
            sorted((t for c in RULER.values() for tasks in c.values() for t in tasks), key="ruler_qa_hotpot".__eq__),
            "ruler",
        ),
        summary=ruler_summary,
        lengths=RULER_LENGTHS,
        needs=("wonderwords", "nltk", "scipy"),
    ),
    "longbench2": Preset(
        tasks=dict.fromkeys(LONGBENCH2, "longbench2"),
        summary=longbench2_summary,
        samples=True,
    ),
}


_PERPLEXITIES = ("perplexity", "word_perplexity", "byte_perplexity")
"""lm-eval's metrics that have this unit."""


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def file_summary(results: Results, higher_is_better: Mapping[str, Mapping[str, bool | None]]) -> list[Score]:
    """Every metric of every task of a file or folder, as lm-eval computed it."""
    scores = []
    for task, numbers in results.items():
        filters = {key.partition(",")[2] for key in numbers if "," in key}
        for key, value in numbers.items():
            metric, comma, kept = key.partition(",")
            if not comma or metric.endswith("_stderr") or not _finite(value):
                continue
            name = f"{task} {metric}" + (f" ({kept})" if len(filters) > 1 else "")
            better = higher_is_better.get(task, {}).get(metric)
            unit = "perplexity" if metric in _PERPLEXITIES else ""
            scores.append(Score(name=name, value=value, unit=unit, higher_is_better=better, task=task))
    return scores
