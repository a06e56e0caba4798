"""Variable tracing: which variables have a value, directly or through others? (RULER, Hsieh et al. 2024, `vt`)."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from palimpsa_surgery.stages.synthetic.checks import check_integer
from palimpsa_surgery.stages.synthetic.example import Draft, Metric, Passage
from palimpsa_surgery.stages.synthetic.haystack import Hay, HaySource, bury
from palimpsa_surgery.stages.synthetic.scoring import string_match_all, string_match_part
from palimpsa_surgery.stages.synthetic.words import draw_distinct, draw_number

_PROMPT = """\
Memorize and track the chain(s) of variable assignment hidden in the following text.

{context}
Question: Find all variables that are assigned the value {value} in the text above. \
Answer: According to the chain(s) of variable assignment in the text above, \
{count} {variables} assigned the value {value}, {pronoun}:"""
_LETTERS = np.array(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"))
_NAME_LENGTH, _VALUE_DIGITS = 5, 5


@dataclass(frozen=True)
class Variables:
    """Options of the task. Each chain is `VAR A = 12345`, then `VAR B = VAR A`, and so on, in this order.

    The answers are the first chain's variables; the other chains, of other values, are there to distract.

    Raises:
        UserError: an option is out of its bounds.
    """

    hops: int = 4
    """Assignments of a variable to another in each chain, 0 to 100."""
    chains: int = 1
    """Chains, the one asked for included, 1 to 100."""
    haystack: str = "noise"
    """`noise` or `essay`."""
    files: Sequence[str | os.PathLike] = ()
    """Text files that `essay` reads; none: the shipped prose."""

    metrics: ClassVar[dict[str, Metric]] = {
        "string_match_all": string_match_all,
        "string_match_part": string_match_part,
    }

    def __post_init__(self) -> None:
        """Check the options."""
        check_integer("hops", self.hops, 0, 100)
        check_integer("chains", self.chains, 1, 100)
        object.__setattr__(self, "_source", HaySource(self.haystack, self.files, ("noise", "essay")))

    def draft(self, rng: np.random.Generator) -> Draft:
        """Draw names, values, where the assignments go, and the hay."""
        size = self.hops + 1
        names = draw_distinct(lambda: "".join(_LETTERS[rng.integers(26, size=_NAME_LENGTH)]), self.chains * size, set())
        values = draw_distinct(lambda: draw_number(rng, _VALUE_DIGITS), self.chains, set())
        needles = []
        for number, value in enumerate(values):
            chain = names[number * size : (number + 1) * size]
            sources = [value, *(f"VAR {name}" for name in chain)]
            depths = np.sort(rng.random(size)).tolist()
            needles += [
                (depth, f"VAR {name} = {source}") for depth, name, source in zip(depths, chain, sources, strict=False)
            ]
        return partial(_passage, values[0], tuple(names[:size]), needles, self._source.draw(rng))


def _passage(value: str, names: tuple[str, ...], needles: list[tuple[float, str]], hay: Hay, units: int) -> Passage:
    context, depths = bury(hay, units, needles)
    one = len(names) == 1
    prompt = _PROMPT.format(
        context=context,
        value=value,
        count=len(names),
        variables="variable is" if one else "variables are",
        pronoun="it is" if one else "they are",
    )
    return Passage(prompt, " " + " ".join(names), names, {"value": value, "depths": depths[: len(names)]})
