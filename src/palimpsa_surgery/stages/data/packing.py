"""Sequences of one source: its units in tokens, end to end, cut up or packed whole."""

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from palimpsa_surgery.errors import Unavailable
from palimpsa_surgery.stages.data.rows import Position
from palimpsa_surgery.stages.data.sources import Encoded, Source, open_source
from palimpsa_surgery.stages.recipe_data import Source as SourceFields
from palimpsa_surgery.stages.synthetic import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_UNITS, BATCH_CHARACTERS = 256, 1 << 20
"""How much is tokenised at once."""


class SequenceStream:
    """A source as sequences of one length, one after the other.

    Text is cut where a sequence is full. Examples stay whole: the rest of a sequence that the next one does not
    fit in is filled with end-of-text tokens that are no targets.

    Args:
        fields: the source, as the recipe has it.
        length: tokens of a sequence.
        seed: decides the order of the source's files.
        state: what `state()` returned, to go on from there.

    Raises:
        UserError, Unavailable: as `open_source` does, and while reading; the latter too if `state` is of another list
            of files.
    """

    def __init__(
        self,
        fields: SourceFields,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        length: int,
        seed: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        state = state or {}
        if pinned := state.get("revision"):  # the newest may be another by now
            fields = fields.model_copy(update={"hub": fields.hub.model_copy(update={"revision": pinned})})
        self.fields = fields
        self.source: Source = open_source(fields, tokenizer, seed=seed)
        self.revision: str | None = getattr(getattr(self.source, "files", None), "revision", None)
        """The commit of a set of the Hub."""
        self.length, self.eos = length, tokenizer.eos_token_id
        self.limit: int | None = getattr(fields, "max_tokens", None)
        self.repeats = getattr(fields, "repeat", False)
        self._laps_allowed = bool(state)  # not before it is known what is held out
        self.sequences: int = state.get("sequences", 0)
        """How many have been taken."""
        self.tokens: int = state.get("tokens", 0)
        """Tokens in them, those that fill them up left out."""
        self.counts = Counter(state.get("counts", {}))
        """What has been read: `documents` or `examples`, those left out (`unanswered`, `too_long`), and `laps`, how
        often the source has been begun again."""
        self._position = Position(*state.get("position", ()))
        self._lap_tokens: int = state.get("lap_tokens", 0)
        self._restart = Position(*state.get("restart", ())), state.get("restart_tokens", 0)
        self._order = list(getattr(self.source, "order", ()))
        if state.get("order", self._order) != self._order:
            raise Unavailable(
                f"the set has changed since its preparation was interrupted: {len(self._order)} files where there were "
                f"{len(state['order'])} (choose another --output, and pin a revision)"
            )
        self._ids = np.array(state.get("ids", ()), dtype=np.int64)
        self._learn = np.array(state.get("learn", ()), dtype=np.bool_)
        self._ends: list[tuple[int, Position]] = []  # where units end, in tokens from the next one to be taken
        self._units: Iterator | None = None

    def state(self) -> dict[str, Any]:
        """Everything needed to go on once laps have begun: plain values, and the arrays `ids` and `learn`."""
        return {
            "revision": self.revision,
            "order": self._order,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "counts": dict(self.counts),
            "position": list(self._position),
            "lap_tokens": self._lap_tokens,
            "restart": list(self._restart[0]),
            "restart_tokens": self._restart[1],
            "ids": self._ids,
            "learn": self._learn,
        }

    def begin_laps_here(self) -> None:
        """Let a source that is begun again begin behind what has been taken so far, which is held out.

        Until this is called no source is begun again.
        """
        self._laps_allowed = True
        end, position = self._ends[0] if self._ends else (len(self._ids), self._position)
        self._restart = position, self._lap_tokens - len(self._ids) + end

    @property
    def rest(self) -> int:
        """Tokens that wait for a sequence to be full; once the source has run out, those that are left over."""
        return len(self._ids)

    def take(self) -> Encoded | None:
        """Return the next sequence, or None when the source has run out."""
        while len(self._ids) < self.length:
            if not self._read():
                if not self.source.whole or not len(self._ids):
                    return None
                self._append(self._filling(self.length - len(self._ids)))
        taken = Encoded(self._ids[: self.length], self._learn[: self.length])
        self._ids, self._learn = self._ids[self.length :], self._learn[self.length :]
        self._ends = [(end - self.length, position) for end, position in self._ends if end >= self.length]
        self.sequences += 1
        self.tokens += int(taken.learn.nonzero()[0][-1]) + 1  # an example ends in a target, and filling holds none
        return taken

    def _read(self) -> bool:
        """Tokenise the next batch of units, or begin again; False when there is nothing left to do."""
        if self._units is None:
            self._units = self.source.units(self._position)
        batch, characters = [], 0
        while len(batch) < BATCH_UNITS and characters < BATCH_CHARACTERS and self._lap_tokens != self.limit:
            item = next(self._units, None)
            if item is None:
                break
            batch.append(item)
            characters += _characters(item[0])
        if batch:
            encoded = self.source.encode([unit for unit, _ in batch])
            self._take_in([(unit, position) for unit, (_, position) in zip(encoded, batch, strict=True)])
            return True
        position, tokens = self._restart
        if not (self.repeats and self._laps_allowed) or self._lap_tokens == tokens:
            return False
        self._position, self._lap_tokens, self._units = position, tokens, None
        self.counts["laps"] += 1
        return True

    def _take_in(self, units: list[tuple[Encoded | None, Position]]) -> None:
        """Put units behind what waits, and remember where each ends."""
        parts, waiting = [], len(self._ids)
        for unit, position in units:
            if unit is None:
                self.counts["unanswered"] += 1
            elif self.source.whole and len(unit.ids) > self.length:
                self.counts["too_long"] += 1
            else:
                if self.source.whole and waiting % self.length + len(unit.ids) > self.length:
                    parts.append(self._filling(self.length - waiting % self.length))
                    waiting += len(parts[-1].ids)
                if self.limit is not None and self._lap_tokens + len(unit.ids) > self.limit:
                    room = self.limit - self._lap_tokens
                    # The next lap begins behind it, which must not read on from here.
                    unit = Encoded(np.append(unit.ids[: room - 1], self.eos), unit.learn[:room])
                parts.append(unit)
                waiting += len(unit.ids)
                self._lap_tokens += len(unit.ids)
                self.counts[self.source.noun] += unit.ends
            self._ends.append((waiting, position))
            self._position = position
            if self._lap_tokens == self.limit:
                break
        self._append(*parts)

    def _append(self, *parts: Encoded) -> None:
        self._ids = np.concatenate([self._ids, *(part.ids for part in parts)])
        self._learn = np.concatenate([self._learn, *(part.learn for part in parts)])

    def _filling(self, tokens: int) -> Encoded:
        return Encoded(np.full(tokens, self.eos), np.zeros(tokens, dtype=np.bool_))


def _characters(unit: object) -> int:
    """About how long a unit is."""
    if unit is None:
        return 0
    if isinstance(unit, Example):
        return len(unit.prompt)
    return sum(len(part) for part in unit if isinstance(part, str))
