"""The tasks by name, and the two functions that make examples of them."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.synthetic.checks import check_integer, random_stream
from palimpsa_surgery.stages.synthetic.copying import Copying, copying
from palimpsa_surgery.stages.synthetic.example import Example, TextTask, TokenBatch
from palimpsa_surgery.stages.synthetic.fitting import fit
from palimpsa_surgery.stages.synthetic.mqar import mqar
from palimpsa_surgery.stages.synthetic.needles import PRESETS, Needles
from palimpsa_surgery.stages.synthetic.passkey import Passkey
from palimpsa_surgery.stages.synthetic.variables import Variables

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXT_TASKS: dict[str, tuple[type[TextTask], dict[str, Any]]] = {
    "passkey": (Passkey, {}),
    "variables": (Variables, {}),
    "needles": (Needles, {}),
    "copying": (Copying, {}),
    **{name: (Needles, options) for name, options in PRESETS.items()},
}
"""The class whose fields are a task's options, and options that the name stands for."""

TOKEN_TASKS: dict[str, Callable[..., TokenBatch]] = {"mqar": mqar, "copying": copying}


def generate(
    task: str,
    *,
    tokenizer: "PreTrainedTokenizerBase",
    length: int,
    count: int,
    seed: int,
    start: int = 0,
    min_length: int | None = None,
    **options: Any,
) -> Iterator[Example]:
    """Make examples of a text task, one after the other.

    An example never has more tokens than its length. It has at most SLACK (8) fewer, or less hay by one unit (a
    sentence of noise, a word of an essay, a distractor needle, a letter to copy) than would be too long.

    Args:
        task: one of TEXT_TASKS.
        tokenizer: counts the tokens; no special tokens are added.
        length: tokens of prompt and completion together that no example exceeds.
        count: examples, at least 1.
        seed: of the random numbers, at least 0.
        start: number of the first example. Example 7 is the same whether it is the first one or the eighth.
        min_length: each example's length is drawn uniformly from here to `length`; None: always `length`.
        options: the task's own, as the fields of its class in TEXT_TASKS say.

    Raises:
        UserError: at once, for an unknown task or option, or an argument out of its bounds, named in the message;
            then or while generating, for a length that a question and a single unit of hay do not fit.
    """
    maker = make_task(task, options)
    check_integer("length", length, 1)
    check_integer("count", count, 1)
    check_integer("seed", seed, 0)
    check_integer("start", start, 0)
    if min_length is not None:
        check_integer("min_length", min_length, 1, length)

    def tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def make(index: int) -> Example:
        rng = random_stream(seed, task, index)
        room = length if min_length is None else int(rng.integers(min_length, length + 1))
        draft = maker.draft(rng)

        @cache
        def count_tokens(units: int) -> int:
            passage = draft(units)
            return tokens(passage.prompt + passage.completion)

        units = fit(count_tokens, room)
        if units is None:
            name = "length" if min_length is None else "min_length"
            raise UserError(
                f"{name} is too short for {task}: got {room} tokens, example {index} needs {count_tokens(1)}"
            )
        passage = draft(units)
        meta = {"index": index, "units": units, "completion_tokens": tokens(passage.completion)}
        return Example(
            task=task,
            prompt=passage.prompt,
            completion=passage.completion,
            answers=passage.answers,
            length=count_tokens(units),
            meta=meta | passage.meta,
        )

    first = make(start)  # fails now rather than when the caller has begun to write

    def examples() -> Iterator[Example]:
        yield first
        yield from map(make, range(start + 1, start + count))

    return examples()


def generate_tokens(task: str, *, length: int, count: int, seed: int, **options: Any) -> TokenBatch:
    """Make examples of a token task, all at once.

    Args:
        task: one of TOKEN_TASKS.
        length: tokens of each example.
        count: examples.
        seed: of the random numbers.
        options: the task's own: the other arguments of its function in TOKEN_TASKS.

    Raises:
        UserError: an unknown task or option, or an argument out of its bounds. The message names it.
    """
    if task not in TOKEN_TASKS:
        raise UserError(f"task {task!r} is not one of those made of token ids ({', '.join(TOKEN_TASKS)})")
    known = set(inspect.signature(TOKEN_TASKS[task]).parameters) - {"length", "count", "seed"}
    _check_options(task, options, known)
    return TOKEN_TASKS[task](length=length, count=count, seed=seed, **options)


def score(example: Example, prediction: str) -> float:
    """The task's score of what a model wrote after an example's prompt, in [0, 1]."""
    metric, *_ = TEXT_TASKS[example.task][0].metrics.values()
    return metric(prediction, example.answers)


def make_task(task: str, options: dict[str, Any]) -> TextTask:
    """Check a text task's name and options, and return what drafts its examples.

    Raises:
        UserError: there is no such task or option, or an option is out of its bounds.
    """
    if task not in TEXT_TASKS:
        hint = "; it is made of token ids, see generate_tokens" if task in TOKEN_TASKS else ""
        raise UserError(f"task {task!r} is not one of those made of text ({', '.join(TEXT_TASKS)}){hint}")
    cls, preset = TEXT_TASKS[task]
    _check_options(task, options, {field.name for field in dataclasses.fields(cls)})
    return cls(**(preset | options))


def _check_options(task: str, options: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(options) - known):
        choices = f"it has {', '.join(sorted(known))}" if known else "it has none"
        raise UserError(f"task {task!r} has no option {unknown[0]!r} ({choices})")
