"""Which source of a mixture gives the next sequence."""

from collections.abc import Sequence


def next_source(shares: Sequence[float], taken: Sequence[int], length: int) -> int:
    """Return the number of the source that is furthest behind its share once another sequence is taken.

    Sequences of examples are not full, so what counts is tokens, those that fill them up left out. No source is ever
    more than `len(shares)` sequences away from its share of what has been taken; ties go to the first one.

    Args:
        shares: of each source; they sum to 1.
        taken: tokens that each has given so far.
        length: tokens of the next sequence.
    """
    total = sum(taken) + length
    deficits = [share * total - count for share, count in zip(shares, taken, strict=True)]
    return deficits.index(max(deficits))
