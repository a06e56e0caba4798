"""What generators yield: examples of text, and batches of token ids."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

IGNORED = -100
"""The target of a position where nothing is asked; transformers' losses leave it out."""


@dataclass(frozen=True)
class Example:
    """A question about a text, and what answers it."""

    task: str
    """Name in the registry, by which `score` finds the metric."""
    prompt: str
    """All that a model is shown. Ends without a space."""
    completion: str
    """What a model should go on with, from the space on; `prompt + completion` is the text to train on."""
    answers: tuple[str, ...]
    """What a score looks for."""
    length: int
    """Tokens of `prompt + completion`, without special tokens."""
    meta: dict[str, Any]
    """What was drawn: `index`, `completion_tokens`, and the task's own, such as `depths`. Fit for JSON."""


class Passage(NamedTuple):
    """An example of some amount of hay, before anybody has counted its tokens."""

    prompt: str
    completion: str
    answers: tuple[str, ...]
    meta: dict[str, Any]


Draft = Callable[[int], Passage]
"""An example whose random draws are made, as a function of its units of hay (words, sentences, needles)."""

Metric = Callable[[str, tuple[str, ...]], float]
"""From a prediction and an example's answers to a score in [0, 1]."""


class TextTask(Protocol):
    """A task's options, checked when it is made."""

    metrics: ClassVar[dict[str, Metric]]
    """By name; the first one is the task's score."""

    def draft(self, rng: np.random.Generator) -> Draft:
        """Draw an example."""
        ...


@dataclass(frozen=True)
class TokenBatch:
    """Examples of token ids."""

    input_ids: np.ndarray
    """`[examples, length]`, int32."""
    targets: np.ndarray
    """`[examples, length]`, int32: what the output *at* each position should be, or IGNORED. Not shifted."""

    @property
    def labels(self) -> np.ndarray:
        """`[examples, length]`: the targets as transformers' `labels`, which the model shifts by one itself."""
        labels = np.full_like(self.targets, IGNORED)
        labels[:, 1:] = self.targets[:, :-1]
        return labels
