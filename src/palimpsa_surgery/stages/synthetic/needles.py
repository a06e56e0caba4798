"""Needles in a haystack, in RULER's forms: single, multi-key, multi-value, multi-query (Hsieh et al. 2024, `niah`)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.synthetic.checks import check_choice, check_integer, check_number
from palimpsa_surgery.stages.synthetic.example import Draft, Metric, Passage
from palimpsa_surgery.stages.synthetic.haystack import Hay, HaySource, NeedleHay, bury
from palimpsa_surgery.stages.synthetic.scoring import string_match_all, string_match_part
from palimpsa_surgery.stages.synthetic.words import KINDS, WORDS, draw_distinct

_ONE = """\
A special magic {what} is hidden within the following text. Make sure to memorize it. I will quiz you about the \
{what} afterwards.
{context}
What is the special magic {what} for {query} mentioned in the provided text? \
The special magic {what} for {query} mentioned in the provided text is"""
_MANY = """\
Some special magic {what} are hidden within the following text. Make sure to memorize it. I will quiz you about the \
{what} afterwards.
{context}
What are all the special magic {what} for {query} mentioned in the provided text? \
The special magic {what} for {query} mentioned in the provided text are"""
_NEEDLE = "One of the special magic {what} for {key} is: {value}."

PRESETS: dict[str, dict[str, Any]] = {
    "niah_single_1": {},
    "niah_single_2": {"haystack": "essay"},
    "niah_single_3": {"haystack": "essay", "value_kind": "uuids"},
    "niah_multikey_1": {"haystack": "essay", "keys": 4},
    "niah_multikey_2": {"haystack": "needle"},
    "niah_multikey_3": {"haystack": "needle", "key_kind": "uuids", "value_kind": "uuids"},
    "niah_multivalue": {"haystack": "essay", "values": 4},
    "niah_multiquery": {"haystack": "essay", "keys": 4, "queries": 4},
}
"""RULER's eight retrieval tasks, by the names they have there."""


@dataclass(frozen=True)
class Needles:
    """Options of the task: `keys` keys of `values` values each in the text, and `queries` of the keys asked for.

    Needles that are not asked for never have a key or a value of those that are.

    Raises:
        UserError: an option is out of its bounds, or more keys are asked for than there are.
    """

    keys: int = 1
    """Keys in the text, 1 to 1,000."""
    values: int = 1
    """Values of each key, 1 to 1,000, each in a needle of its own."""
    queries: int = 1
    """Keys that are asked for."""
    haystack: str = "noise"
    """`noise`, `essay`, or `needle`: needles of other keys."""
    key_kind: str = "words"
    """`words`, `numbers` or `uuids`."""
    value_kind: str = "numbers"
    """`words`, `numbers` or `uuids`."""
    depth: float | None = None
    """Where a lone needle is, from 0 (before the hay) to 1 (after it); None: uniformly at random, as all others."""
    files: Sequence[str | os.PathLike] = ()
    """Text files that `essay` reads; none: the shipped prose."""

    metrics: ClassVar[dict[str, Metric]] = {
        "string_match_all": string_match_all,
        "string_match_part": string_match_part,
    }

    def __post_init__(self) -> None:
        """Check the options."""
        check_integer("keys", self.keys, 1, 1000)
        check_integer("values", self.values, 1, 1000)
        check_integer("queries", self.queries, 1, 1000)
        if self.queries > self.keys:
            raise UserError(f"queries must not be more than keys, got {self.queries} and {self.keys}")
        check_choice("key_kind", self.key_kind, KINDS)
        check_choice("value_kind", self.value_kind, KINDS)
        words = self.keys * ((self.key_kind == "words") + self.values * (self.value_kind == "words"))
        if words > WORDS // 2:  # the other half is left to distractors
            raise UserError(f"keys and values must not need more than {WORDS // 2} words, got {words}")
        if self.depth is not None:
            check_number("depth", self.depth, 0, 1)
            if self.keys * self.values > 1:
                raise UserError(f"depth is for one needle, got {self.keys * self.values} (keys x values)")
        object.__setattr__(self, "_source", HaySource(self.haystack, self.files, ("noise", "essay", "needle")))

    def draft(self, rng: np.random.Generator) -> Draft:
        """Draw keys, values, where the needles go, which keys are asked for, and the hay."""
        taken: set[str] = set()
        draw_key, draw_value = partial(KINDS[self.key_kind], rng), partial(KINDS[self.value_kind], rng)
        keys = draw_distinct(draw_key, self.keys, taken)
        values = {key: draw_distinct(draw_value, self.values, taken) for key in keys}
        needles = [(key, value) for key in keys for value in values[key]]
        depths = rng.random(len(needles)).tolist() if self.depth is None else [self.depth]
        asked = [keys[index] for index in rng.permutation(self.keys)[: self.queries]]
        if self.haystack == "needle":
            # A stream of its own, as how much hay is drawn depends on the tokenizer.
            (hay_rng,) = rng.spawn(1)
            hay = NeedleHay(partial(self._distractor, hay_rng, frozenset(taken)))
        else:
            hay = self._source.draw(rng)
        buried = [(depth, self._needle(*needle)) for depth, needle in zip(depths, needles, strict=True)]
        return partial(self._passage, asked, values, buried, hay)

    def _needle(self, key: str, value: str) -> str:
        return _NEEDLE.format(what=self.value_kind, key=key, value=value)

    def _distractor(self, rng: np.random.Generator, taken: frozenset[str]) -> str:
        (key,) = draw_distinct(partial(KINDS[self.key_kind], rng), 1, set(taken))
        (value,) = draw_distinct(partial(KINDS[self.value_kind], rng), 1, set(taken))
        return self._needle(key, value)

    def _passage(
        self, asked: list[str], values: dict[str, list[str]], needles: list[tuple[float, str]], hay: Hay, units: int
    ) -> Passage:
        context, depths = bury(hay, units, needles)
        answers = tuple(value for key in asked for value in values[key])
        depth_of = dict(zip((value for row in values.values() for value in row), depths, strict=True))
        meta = {"keys": asked, "depths": [depth_of[value] for value in answers]}
        template, what = (_ONE, self.value_kind[:-1]) if len(answers) == 1 else (_MANY, self.value_kind)
        prompt = template.format(what=what, context=context, query=_listed(asked))
        return Passage(prompt, f" {_listed(list(answers))}.", answers, meta)


def _listed(items: list[str]) -> str:
    """`a`, or `a, b, and c`, as RULER writes lists."""
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])}, and {items[-1]}"
