"""Scores in [0, 1] of what a model wrote."""

import re
from collections.abc import Sequence

import numpy as np

from palimpsa_surgery.stages.synthetic.example import IGNORED


def _found(prediction: str, answers: Sequence[str]) -> list[bool]:
    """Whether each answer stands in the prediction, in any case, and not as a part of a longer word or number."""
    return [
        re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", prediction, flags=re.IGNORECASE) is not None
        for answer in answers
    ]


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Fraction of the answers that the prediction holds (RULER's `string_match_all`).

    RULER also finds an answer inside a longer word or number, 12345 in 123456; here that is a wrong answer.
    """
    return sum(_found(prediction, answers)) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction holds any of the answers, else 0 (RULER's `string_match_part`)."""
    return float(any(_found(prediction, answers)))


def character_accuracy(prediction: str, answers: Sequence[str]) -> float:
    """Fraction of the answer's characters that stand at their place, blanks left out (2507.02782, Table 1)."""
    (answer,) = ("".join(answer.split()) for answer in answers)
    written = "".join(prediction.split())
    return sum(a == b for a, b in zip(written, answer, strict=False)) / len(answer)


def token_accuracy(predictions: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Fraction of each example's targets that are predicted.

    Args:
        predictions: `[examples, length]`, the most likely token at each position's output.
        targets: `[examples, length]`, as in `TokenBatch`.

    Returns:
        `[examples]`, float64; NaN for an example without targets.
    """
    asked = targets != IGNORED
    right = ((predictions == targets) & asked).sum(axis=1)
    total = asked.sum(axis=1)
    return np.divide(right, total, out=np.full(len(targets), np.nan), where=total > 0)
