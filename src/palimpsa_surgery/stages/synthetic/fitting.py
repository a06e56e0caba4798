"""How much hay fits a number of tokens."""

from collections.abc import Callable

SLACK = 8
"""Tokens that may be left over though another unit of hay would fit; finding that out takes most of the time."""

_INTERPOLATIONS = 8  # near-linear counts need about four; bisection ends whatever is not


def fit(tokens: Callable[[int], int], length: int) -> int | None:
    """Find how many units of hay fit: `n` of 1 or more so that one more is too much, or at most SLACK is left over.

    Args:
        tokens: number of tokens with so many units, growing about linearly. Called as few times as possible,
            as each call tokenises a whole example.
        length: tokens that are not to be exceeded.

    Returns:
        The number of units, or None if not even one fits.
    """
    low, at_low = 1, tokens(1)
    if at_low > length:
        return None
    first = at_low
    probe, high, at_high = 33, None, 0
    calls = 0
    while length - at_low > SLACK and (high is None or high - low > 1):
        count = tokens(probe)
        calls += 1
        if count <= length:
            low, at_low = probe, count
        else:
            high, at_high = probe, count
        if high is None:
            per_unit = max((at_low - first) / (low - 1), 0.01)
            probe = low + max(1, int((length - at_low) / per_unit))
        elif calls < _INTERPOLATIONS:
            step = (high - low) * (length - at_low) // (at_high - at_low)
            probe = min(max(low + step, low + 1), high - 1)
        else:
            probe = (low + high) // 2
    return low
