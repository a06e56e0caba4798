"""Synthetic copying: a random string, a separator, the string again (Jelassi et al. 2024; 2507.02782 section 5.3)."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from palimpsa_surgery.stages.synthetic.checks import check_integer, random_stream
from palimpsa_surgery.stages.synthetic.example import IGNORED, Draft, Metric, Passage, TokenBatch
from palimpsa_surgery.stages.synthetic.scoring import character_accuracy

PADDING, SEPARATOR, FIRST_SYMBOL = 0, 1, 2
"""Token ids: what fills an example up, what stands between the string and its copy, the lowest of the string's."""

_LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))


@dataclass(frozen=True)
class Copying:
    """Copying as text: letters with blanks between them, so that a letter is a token; the length says how many."""

    metrics: ClassVar[dict[str, Metric]] = {"character_accuracy": character_accuracy}

    def draft(self, rng: np.random.Generator) -> Draft:
        """Draw a string that has no end."""
        (stream,) = rng.spawn(1)
        letters: list[str] = []

        def passage(units: int) -> Passage:
            while len(letters) < units:
                letters.extend(_LETTERS[stream.integers(26, size=256)].tolist())
            string = " ".join(letters[:units])
            return Passage(f"Copy: {string}\nCopy:", f" {string}", (string,), {"letters": units})

        return passage


def copying(
    *, count: int, length: int, seed: int, string_length: tuple[int, int] | int | None = None, vocab_size: int = 28
) -> TokenBatch:
    """Copying as token ids: string, SEPARATOR, string, then PADDING.

    The outputs from the separator on are asked for: what stands at the next position.

    Args:
        count: examples.
        length: tokens of each, at least 3.
        seed: of the random numbers, at least 0.
        string_length: the shortest and longest string, drawn uniformly, or its only length (2507.02782: 50 to 100,
            tested at 300); None: as long as `length` holds, (length - 1) // 2.
        vocab_size: number of token ids; the default leaves 26 letters.

    Raises:
        UserError: an argument is out of its bounds. The message names it.
    """
    check_integer("count", count, 1)
    check_integer("length", length, 3)
    check_integer("seed", seed, 0)
    check_integer("vocab_size", vocab_size, FIRST_SYMBOL + 2, 1 << 31)
    longest = (length - 1) // 2
    shortest, longest = (longest, longest) if string_length is None else _bounds(string_length, longest)

    rng = random_stream(seed, "copying", 0)
    lengths = rng.integers(shortest, longest + 1, size=(count, 1), dtype=np.int64)
    string = rng.integers(FIRST_SYMBOL, vocab_size, size=(count, longest), dtype=np.int32)
    column = np.arange(length)
    # Beyond the separator, a position holds what the one `lengths + 1` before it does.
    source = np.where(column < lengths, column, np.clip(column - lengths - 1, 0, longest - 1))
    ids = np.take_along_axis(string, source, axis=1)
    ids[column == lengths] = SEPARATOR
    ids[column > 2 * lengths] = PADDING
    targets = np.full_like(ids, IGNORED)
    targets[:, :-1] = ids[:, 1:]
    targets[(column < lengths) | (column >= 2 * lengths)] = IGNORED
    return TokenBatch(ids, targets)


def _bounds(string_length: tuple[int, int] | int, longest: int) -> tuple[int, int]:
    if not isinstance(string_length, tuple | list) or len(string_length) != 2:
        check_integer("string_length", string_length, 1, longest)
        return string_length, string_length
    shortest, longest_wanted = string_length
    check_integer("string_length[0]", shortest, 1, longest)
    check_integer("string_length[1]", longest_wanted, shortest, longest)
    return shortest, longest_wanted
