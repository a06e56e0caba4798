"""Passkey retrieval: a number somewhere in a text, asked for after it (Mohtashami & Jaggi 2023; 2507.02782 B.4)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from palimpsa_surgery.stages.synthetic.checks import check_integer, check_number
from palimpsa_surgery.stages.synthetic.example import Draft, Metric, Passage
from palimpsa_surgery.stages.synthetic.haystack import Hay, HaySource, bury
from palimpsa_surgery.stages.synthetic.scoring import string_match_all
from palimpsa_surgery.stages.synthetic.words import draw_number

_PROMPT = """\
There is important information hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you \
about it afterwards.
{context}
What is the pass key? The pass key is"""
_NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key."


@dataclass(frozen=True)
class Passkey:
    """Options of the task; the answer is followed by a full stop, as in 2507.02782.

    Raises:
        UserError: an option is out of its bounds.
    """

    digits: int = 5
    """Of the pass key, 1 to 18."""
    depth: float | None = None
    """Where the key is, from 0 (before the hay) to 1 (after it); None: uniformly at random."""
    haystack: str = "noise"
    """`noise` or `essay`."""
    files: Sequence[str | os.PathLike] = ()
    """Text files that `essay` reads; none: the shipped prose."""

    metrics: ClassVar[dict[str, Metric]] = {"string_match_all": string_match_all}

    def __post_init__(self) -> None:
        """Check the options."""
        check_integer("digits", self.digits, 1, 18)
        if self.depth is not None:
            check_number("depth", self.depth, 0, 1)
        object.__setattr__(self, "_source", HaySource(self.haystack, self.files, ("noise", "essay")))

    def draft(self, rng: np.random.Generator) -> Draft:
        """Draw the key, where it goes, and the hay."""
        key = draw_number(rng, self.digits)
        depth = rng.random() if self.depth is None else self.depth
        return partial(_passage, key, depth, self._source.draw(rng))


def _passage(key: str, depth: float, hay: Hay, units: int) -> Passage:
    context, depths = bury(hay, units, [(depth, _NEEDLE.format(key=key))])
    return Passage(_PROMPT.format(context=context), f" {key}.", (key,), {"depths": depths})
