"""Which source of a mixture gives the next sequence."""

from collections.abc import Sequence


def next_source(shares: Sequence[float], taken: Sequence[int]) -> int:
    """Return the number of the source that is furthest behind its share once another sequence is taken.

    All sequences are equally long, so that shares of sequences are shares of tokens. No source is ever more than
    `len(shares)` sequences away from its share of any number of them; ties go to the first one.

    Args:
        shares: of each source; they sum to 1.
        taken: sequences that each has given so far.
    """
    total = sum(taken) + 1
    deficits = [share * total - count for share, count in zip(shares, taken, strict=True)]
    return deficits.index(max(deficits))
