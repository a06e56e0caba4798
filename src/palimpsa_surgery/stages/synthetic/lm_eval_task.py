"""Examples as tasks of lm-eval: a `.jsonl` and a `.yaml` file each, found by `TaskManager(include_path=...)`.

This module does not need lm-eval; lm-eval finds `process_results` by its full name in the `.yaml` file.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.synthetic.example import Example
from palimpsa_surgery.stages.synthetic.registry import TEXT_TASKS
from palimpsa_surgery.surgery.outputs import check_output_directory, fresh_directory

EXTRA_TOKENS = 16
"""What a model may write beyond the longest answer, such as words before it."""

_TEMPLATE = """\
task: "{name}"
tag: palimpsa_synthetic
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
num_fewshot: 0
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{completion}}}}"
target_delimiter: ""
generation_kwargs:
  do_sample: false
  max_gen_toks: {generated}
  until: ["\\n"]
process_results: !function {results}
metric_list:
{metrics}
metadata:
  version: 1.0
  # A model whose length is set below this gets its prompts cut from the left.
  max_length: {length}
"""
_METRIC = """\
  - metric: {name}
    aggregation: mean
    higher_is_better: true
"""


def write_lm_eval_tasks(
    tasks: Mapping[str, Iterable[Example]], directory: str | os.PathLike, *, overwrite: bool = False
) -> Path:
    """Write a folder of lm-eval tasks, which appears whole or not at all.

    The folder must stay where it is, as lm-eval needs the absolute path of the data. Each task's
    `metadata.max_length` says how many tokens a model must hold so that no prompt is cut.

    Args:
        tasks: examples by the task's name in lm-eval (letters, digits, `_`, `-`, `.`); those of a task are of one
            task of ours.
        directory: the folder.
        overwrite: replace the folder if it is not empty.

    Returns:
        `directory`, for `TaskManager(include_path=..., include_defaults=False)`.

    Raises:
        UserError: the folder may not be written, or a task has no examples, a wrong name or mixed examples.
    """
    directory = check_output_directory(directory, overwrite=overwrite)
    if not tasks:
        raise UserError("tasks must hold at least one task, got none")
    for name in tasks:
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
            raise UserError(f"tasks: a name must be made of letters, digits, '_', '-' and '.', got {name!r}")
    with fresh_directory(directory, overwrite=overwrite) as work:
        for name, examples in tasks.items():
            kind, length, answer = None, 0, 0
            with (work / f"{name}.jsonl").open("w", encoding="utf-8", newline="\n") as out:
                for example in examples:
                    if kind not in (None, example.task):
                        raise UserError(f"tasks: {name} has examples of {kind} and of {example.task}")
                    kind = example.task
                    out.write(json.dumps(asdict(example)) + "\n")
                    length = max(length, example.length - example.meta["completion_tokens"])
                    answer = max(answer, example.meta["completion_tokens"])
            if kind is None:
                raise UserError(f"tasks: {name} has no examples")
            content = _TEMPLATE.format(
                name=name,
                file=json.dumps(str(directory.absolute() / f"{name}.jsonl")),
                generated=answer + EXTRA_TOKENS,
                results=f"{__name__}.{process_results.__name__}",
                metrics="".join(_METRIC.format(name=metric) for metric in TEXT_TASKS[kind][0].metrics).rstrip("\n"),
                length=length + answer + EXTRA_TOKENS,
            )
            (work / f"{name}.yaml").write_text(content, encoding="utf-8")
    return directory


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """Score what a model wrote, by all metrics of the example's task; lm-eval calls this for each example."""
    metrics = TEXT_TASKS[doc["task"]][0].metrics
    return {name: metric(results[0], tuple(doc["answers"])) for name, metric in metrics.items()}
