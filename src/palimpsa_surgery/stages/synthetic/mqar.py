"""Multi-query associative recall (Arora et al. 2023, "Zoology"; Palimpsa paper, A.8).

    keys and values          queries
    k1 v1 k2 v2 ... kN vN    k2 r  r r  k1 r ...      r: random filler
                             v2         v1            targets

A query may stand at every other position after the pairs; its distance from them follows a power law, as that of
repeated bigrams in text does. With a pair for every four tokens, all those positions hold queries.
"""

import numpy as np

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.synthetic.checks import check_integer, check_number, random_stream
from palimpsa_surgery.stages.synthetic.example import IGNORED, TokenBatch

CURRICULUM = ((128, 32), (256, 64), (512, 128), (1024, 256))
"""Length and number of pairs of the paper's four stages (A.8)."""

_BLOCK = 4096  # examples made at once, so that temporary arrays stay small


def mqar(
    *,
    count: int,
    length: int,
    seed: int,
    pairs: int | None = None,
    vocab_size: int = 8192,
    power: float = 0.01,
    random_filler: bool = True,
) -> TokenBatch:
    """Make examples of multi-query associative recall, of Zoology's distribution.

    Args:
        count: examples. The first ones are the same whatever their number.
        length: tokens of each, even, at least 4.
        seed: of the random numbers, at least 0.
        pairs: key-value pairs of each, at most and by default a quarter of `length`. Every key is asked for once.
        vocab_size: number of token ids. Keys are drawn from the lower half without 0, values from the upper half,
            neither twice within an example.
        power: a in `gap ** (a - 1)`, which the probability of a query's place is proportional to; 1 is uniform.
        random_filler: fill what is neither pair nor query with random ids (of the whole vocabulary, as Zoology
            does) rather than 0.

    Raises:
        UserError: an argument is out of its bounds. The message names it.
    """
    check_integer("count", count, 1)
    check_integer("length", length, 4)
    check_integer("seed", seed, 0)
    if length % 2:
        raise UserError(f"length must be even, got {length}")
    pairs = length // 4 if pairs is None else pairs
    check_integer("pairs", pairs, 1, length // 4)
    check_integer("vocab_size", vocab_size, 2 * pairs + 2, 1 << 31)
    check_number("power", power, 0, 10)

    ids = np.empty((count, length), dtype=np.int32)
    targets = np.full((count, length), IGNORED, dtype=np.int32)
    half = vocab_size // 2
    places = (length - 2 * pairs) // 2
    weights = np.arange(1, places + 1, dtype=np.float64) ** (power - 1)
    for block, start in enumerate(range(0, count, _BLOCK)):
        # A block is always made whole: the first examples do not depend on how many follow.
        rng = random_stream(seed, "mqar", block)
        keys = 1 + _distinct(rng, half - 1, (_BLOCK, pairs))
        values = half + _distinct(rng, vocab_size - half, (_BLOCK, pairs))
        # An exponential race: arrival order is that of drawing without replacement by weight.
        arrivals = rng.standard_exponential((_BLOCK, places)) / weights
        queries = 2 * pairs + 2 * np.argsort(arrivals, axis=1)[:, :pairs]
        filler = rng.integers(vocab_size, size=(_BLOCK, length - 2 * pairs), dtype=np.int32)

        rows = min(_BLOCK, count - start)
        out = ids[start : start + rows]
        out[:, 0 : 2 * pairs : 2] = keys[:rows]
        out[:, 1 : 2 * pairs : 2] = values[:rows]
        out[:, 2 * pairs :] = filler[:rows] if random_filler else 0
        np.put_along_axis(out, queries[:rows], keys[:rows], axis=1)
        np.put_along_axis(targets[start : start + rows], queries[:rows], values[:rows], axis=1)
    return TokenBatch(ids, targets)


def _distinct(rng: np.random.Generator, bound: int, shape: tuple[int, int]) -> np.ndarray:
    """Integers in [0, bound), `[rows, columns]` int32, uniform among those without repetition in a row.

    What repeats an earlier column is drawn again until nothing does. No value is preferred by this, so that all
    rows without repetition stay equally likely.
    """
    rows, columns = shape
    if bound < 4 * columns:  # repetitions would not come to an end
        return rng.permuted(np.tile(np.arange(bound, dtype=np.int32), (rows, 1)), axis=1)[:, :columns]
    drawn = rng.integers(bound, size=shape, dtype=np.int32)
    todo = np.arange(rows)
    while len(todo):
        # Sorted by value, then by column: whatever has its left neighbour's value is a repetition.
        ranked = np.sort(drawn[todo].astype(np.int64) * columns + np.arange(columns), axis=1)
        row, rank = np.nonzero(ranked[:, 1:] // columns == ranked[:, :-1] // columns)
        drawn[todo[row], ranked[row, rank + 1] % columns] = rng.integers(bound, size=len(row), dtype=np.int32)
        todo = todo[np.unique(row)]
    return drawn
