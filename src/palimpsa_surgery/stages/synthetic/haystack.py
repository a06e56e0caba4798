"""Hay: text that means nothing to the question, in which needles are buried.

RULER's three kinds (Hsieh et al. 2024, section 3): `noise`, five sentences over and over; `essay`, running text;
`needle`, needles that nobody asks for. Hay is made of units, so that any amount of it can be asked for.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.synthetic.checks import check_choice
from palimpsa_surgery.surgery.assets import asset_path
from palimpsa_surgery.surgery.text import check_text_files, iter_documents

NOISE = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")

_ESSAY_CHARACTERS = 1 << 25  # of the files together, some 8 million tokens; kept in memory
_CLOSING = "\"')]\u201d\u2019"


class Hay(Protocol):
    """Hay of one example."""

    separator: str
    """What stands between hay and a needle."""

    def boundary(self, units: int, depth: float) -> int:
        """Where a needle may be put, in units from the start, that is nearest to a depth in [0, 1]."""
        ...

    def text(self, start: int, stop: int) -> str:
        """Units from `start` to `stop`, both boundaries or an end."""
        ...


def bury(hay: Hay, units: int, needles: Sequence[tuple[float, str]]) -> tuple[str, list[float]]:
    """Put needles into `units` units of hay.

    Args:
        needles: depth, from 0 (before all hay) to 1 (after it), and text of each. Needles that meet at one
            place keep the order of their depths.

    Returns:
        The whole text, and the depth that each needle got.
    """
    places = [hay.boundary(units, depth) for depth, _ in needles]
    pieces, start = [], 0
    for index in sorted(range(len(needles)), key=lambda index: needles[index][0]):
        pieces += [hay.text(start, places[index]), needles[index][1]]
        start = places[index]
    pieces.append(hay.text(start, units))
    return hay.separator.join(filter(None, pieces)), [round(place / units, 4) for place in places]


class NoiseHay:
    """RULER's five sentences, a line of them at a time; a unit is a sentence, a boundary the start of a line."""

    separator = "\n"

    def boundary(self, units: int, depth: float) -> int:  # noqa: D102
        lines = -(-units // len(NOISE))
        return min(round(depth * lines) * len(NOISE), units)

    def text(self, start: int, stop: int) -> str:  # noqa: D102
        lines = (range(line, min(line + len(NOISE), stop)) for line in range(start, stop, len(NOISE)))
        return "\n".join(" ".join(NOISE[index % len(NOISE)] for index in line) for line in lines)


class NeedleHay:
    """Needles that nobody asks for, drawn as they are needed; a unit is one of them, on a line of its own."""

    separator = "\n"

    def __init__(self, draw: Callable[[], str]) -> None:
        self._draw = draw
        self._lines: list[str] = []

    def boundary(self, units: int, depth: float) -> int:  # noqa: D102
        return round(depth * units)

    def text(self, start: int, stop: int) -> str:  # noqa: D102
        while len(self._lines) < stop:
            self._lines.append(self._draw())
        return "\n".join(self._lines[start:stop])


class EssayHay:
    """Running text from some sentence on, and from its beginning again after its end.

    A unit is a word, a boundary the end of a sentence.
    """

    separator = " "

    def __init__(self, essay: "Essay", first: int) -> None:
        self.essay = essay
        self.first = first

    def boundary(self, units: int, depth: float) -> int:  # noqa: D102
        wanted = self.first + depth * units
        place = self.essay.sentence_end(wanted) - self.first
        near = min((0, place, units), key=lambda end: abs(end - depth * units))
        return min(max(near, 0), units)

    def text(self, start: int, stop: int) -> str:  # noqa: D102
        return self.essay.words(self.first + start, self.first + stop)


class Essay:
    """The words of text files, single blanks between them, and where their sentences end."""

    def __init__(self, files: Sequence[Path]) -> None:
        words: list[str] = []
        room = _ESSAY_CHARACTERS
        for document in iter_documents(files):
            words += document[:room].split()
            room -= len(document)
            if room <= 0:
                break
        self._text = " ".join(words)
        self._starts = np.zeros(len(words) + 1, dtype=np.int64)
        np.cumsum(np.fromiter((len(word) + 1 for word in words), np.int64, len(words)), out=self._starts[1:])
        ends = [n for n, word in enumerate(words, start=1) if word.rstrip(_CLOSING).endswith((".", "!", "?"))]
        self.ends = np.array(ends or range(1, len(words) + 1), dtype=np.int64)

    def __len__(self) -> int:
        """Words."""
        return len(self._starts) - 1

    def words(self, start: int, stop: int) -> str:
        """Words from `start` to `stop` of the text repeated without end."""
        pieces = []
        while start < stop:
            lap, offset = divmod(start, len(self))
            last = min(stop - lap * len(self), len(self))
            pieces.append(self._text[self._starts[offset] : self._starts[last] - 1])
            start = lap * len(self) + last
        return " ".join(pieces)

    def sentence_end(self, place: float) -> int:
        """The end of a sentence that is nearest to a place, in words of the text repeated without end."""
        lap, offset = divmod(place, len(self))
        index = int(np.searchsorted(self.ends, offset))
        before = self.ends[index - 1] if index else self.ends[-1] - len(self)
        after = self.ends[index] if index < len(self.ends) else self.ends[0] + len(self)
        return int(lap) * len(self) + int(before if offset - before <= after - offset else after)


@lru_cache(maxsize=2)
def _read_essay(files: tuple[tuple[Path, int, int], ...]) -> Essay:
    return Essay([path for path, _, _ in files])


class HaySource:
    """One of the kinds of hay, to draw examples' hay from.

    Args:
        kind: `noise` or `essay`, or a kind that the task makes itself.
        files: what `essay` reads, `.txt`, `.jsonl` or `.parquet`; none: the shipped prose.
        kinds: the kinds that the task knows.

    Raises:
        UserError: an unknown kind, files that cannot be read, or files that the kind does not read.
    """

    def __init__(self, kind: str, files: Sequence[str | os.PathLike], kinds: Sequence[str]) -> None:
        check_choice("haystack", kind, kinds)
        if isinstance(files, str | os.PathLike):
            raise UserError(f"files must be a list of paths, got {str(files)!r}")
        if files and kind != "essay":
            raise UserError(f"files are read by the haystack essay only, got {len(files)} with {kind!r}")
        self.essay = None
        if kind == "essay":
            paths = check_text_files(files or [asset_path("kjv.txt")])
            stats = [path.stat() for path in paths]
            self.essay = _read_essay(
                tuple((path, stat.st_mtime_ns, stat.st_size) for path, stat in zip(paths, stats, strict=True))
            )

    def draw(self, rng: np.random.Generator) -> Hay:
        """Hay of one example: an essay's starts behind a sentence drawn at random."""
        if self.essay is None:
            return NoiseHay()
        return EssayHay(self.essay, int(self.essay.ends[rng.integers(len(self.essay.ends))]))
