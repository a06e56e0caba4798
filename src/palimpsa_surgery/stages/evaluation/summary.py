"""From lm-eval's results, and what we counted, to ours."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.evaluation.harness import Suite
from palimpsa_surgery.stages.evaluation.presets import file_summary
from palimpsa_surgery.surgery.results import Metric, Score, TaskResult

if TYPE_CHECKING:
    from palimpsa_surgery.stages.evaluation.language_model import Lengths


def scores_of(suite: Suite, found: Mapping[str, Any], lengths: Sequence[int], notes: Sequence[str]) -> list[Score]:
    """The summary: the preset's, or all numbers of a file's tasks.

    Raises:
        UserError: there is none; the message has the notes.
    """
    if suite.preset is None:
        scores = file_summary(found["results"], found["higher_is_better"])
    else:
        scores = suite.preset.summary(found["results"], found.get("samples", {}), lengths)
    if not scores:
        raise UserError(f"{suite.name} gave no number" + (f" ({'; '.join(notes)})" if notes else ""))
    return scores


def task_result(name: str, found: Mapping[str, Any], counted: "Mapping[str, Lengths]") -> TaskResult:
    """One task or group of lm-eval's results, with what we counted."""
    numbers, config = found["results"][name], found["configs"].get(name, {})
    members = [task for task in _members(name, found) if task in counted]
    metrics, better = {}, found["higher_is_better"].get(name) or {}
    for key, value in numbers.items():
        metric, comma, kept = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = numbers.get(f"{metric}_stderr,{kept}")
        metrics[metric if kept == "none" else key] = Metric(
            value=_finite(value), stderr=_finite(stderr), higher_is_better=better.get(metric)
        )
    sizes = [found["n-samples"][task] for task in _members(name, found) if task in found["n-samples"]]
    return TaskResult(
        version=str(found["versions"].get(name)),
        num_fewshot=_whole(found["n-shot"].get(name)),
        dataset=config.get("dataset_path") or None,
        documents=sum(size["effective"] for size in sizes),
        available=sum(size["original"] for size in sizes),
        truncated=sum(len(counted[task].truncated) for task in members),
        split=sum(len(counted[task].split) for task in members),
        longest=max((counted[task].longest for task in members), default=0),
        metrics=metrics,
    )


def _members(name: str, found: Mapping[str, Any]) -> list[str]:
    """The tasks of a group, or the task itself."""
    children = found["group_subtasks"].get(name)
    return [task for child in children for task in _members(child, found)] if children else [name]


def _finite(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
