"""A stage's data on disk: written once, then read by position.

    data/
      tokens.bin   uint16 where the vocabulary allows it, else uint32: `[sequences, sequence_length]`
      learn.bin    one bit per token, each sequence in whole bytes: is it a target? Absent if all are
      source.bin   uint8, the number of each sequence's source; of mixtures only
      data.json    what is in them

The first sequences are held out, the others are trained on. While data are written the folder is called
`data.unfinished`, and from time to time the state of every source is put beside them: what is killed goes on from
there, and is never taken for whole.
"""

import hashlib
import json
import math
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from palimpsa_surgery.errors import Unavailable, UserError
from palimpsa_surgery.stages.data.mixture import next_source
from palimpsa_surgery.stages.data.order import split
from palimpsa_surgery.stages.data.packing import SequenceStream
from palimpsa_surgery.stages.data.sources import open_source
from palimpsa_surgery.stages.recipe import Evaluation, Recipe, Stage
from palimpsa_surgery.stages.recipe_data import name_of, sources_of
from palimpsa_surgery.surgery.outputs import replacing, sync_all, writing
from palimpsa_surgery.surgery.progress import progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAVE_TOKENS = 1 << 26
"""Tokens between two states from which an interrupted preparation goes on."""

_UNFINISHED = ".unfinished"
_STATE = "state.npz"


def token_type(vocabulary: int) -> np.dtype:
    """The smallest of the types that tokens are stored in, for a vocabulary of so many entries."""
    return np.dtype(np.uint16 if vocabulary <= 1 << 16 else np.uint32)


def vocabulary_hash(tokenizer: "PreTrainedTokenizerBase") -> str:
    """A hash of a tokenizer's entries and their ids."""
    return hashlib.sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()).hexdigest()


def held_out_tokens(stage: Stage, tokens: int, scored: int) -> int:
    """How many tokens are held out of data that are enough for the stage.

    Stages that read the same source hold out the same text of it if their `tokens` and `held_out` are the same and
    their sequences no longer than that.
    """
    fraction = stage.data.held_out
    return max(stage.sequence_length, min(math.ceil(tokens * fraction / (1 - fraction)), scored))


def wanted_sequences(stage: Stage, tokens: int, scored: int) -> tuple[int, int]:
    """Sequences that are held out, and that are written in all, if the data are enough."""
    held_out = math.ceil(held_out_tokens(stage, tokens, scored) / stage.sequence_length)
    return held_out, held_out + tokens // stage.sequence_length


def data_bytes(stage: Stage, tokens: int, scored: int, vocabulary: int) -> int:
    """Bytes on disk of a stage's data, at most."""
    _, sequences = wanted_sequences(stage, tokens, scored)
    masked = any(source.kind != "text" for _, source in sources_of(stage.data))
    per_sequence = stage.sequence_length * token_type(vocabulary).itemsize
    per_sequence += masked * math.ceil(stage.sequence_length / 8) + (stage.data.kind == "mixture")
    return sequences * per_sequence


def check_data(recipe: Recipe, tokenizer: "PreTrainedTokenizerBase | None") -> None:
    """Open every source of a recipe and look at its first row, before anything costly is done.

    Args:
        tokenizer: None: nothing is downloaded, so only local files are looked at.

    Raises:
        UserError, Unavailable: as `open_source` does; the message begins with the place in the recipe.
    """
    for index, stage in enumerate(recipe.stages):
        for place, source in sources_of(stage.data):
            if tokenizer is not None or getattr(source, "files", None) is not None:
                with _named(f"stages[{index}].data{place}"):
                    open_source(source, tokenizer, seed=recipe.seed)


def prepare(
    stage: Stage,
    tokenizer: "PreTrainedTokenizerBase",
    directory: Path,
    *,
    tokens: int | None = None,
    scored: int = Evaluation().tokens,
    seed: int = 0,
    place: str = "",
) -> dict[str, Any]:
    """Tokenise a stage's sources into `directory`, which appears whole or not at all.

    What was done up to the last state is kept beside it whatever goes wrong, as `directory` + `.unfinished`.

    As many tokens are read as will be trained on, and those held out before them; of a source that is no part of a
    mixture and has fewer, all. What an interrupted call has done is gone on from.

    Args:
        tokens: to train on; None: the stage's.
        scored: how many tokens will be evaluated, which is all that is held out where data are enough.
        seed: the recipe's, for the order of files.
        place: of the stage in the recipe, such as `stages[1].`, for messages.

    Returns:
        `sequences`, `tokens` (those of a last, shorter sequence included), `held_out` (tokens), and under `sources`,
        for each: `name`, `sequences`, `tokens` in them (those that fill them up left out), and what was read and left
        out of it (see `SequenceStream.counts`); for a set of the Hub also `revision`, its commit; for a mixture also
        `share` and `met`, the share that it has of all sources' `tokens`.

    Raises:
        UserError: a source cannot be read or has run out, or there are not enough data to train and evaluate.
        Unavailable: the Hub fails, or a disk does.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-text token (eos_token), which must end every document")
    work = directory.with_name(directory.name + _UNFINISHED)
    key = _fingerprint(stage, tokenizer, tokens, scored, seed)
    state = _read_state(work, key)
    if state is None:
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
    writer = _Writer(stage, tokenizer, work, tokens=tokens or stage.tokens, scored=scored, seed=seed, place=place)
    try:
        with writing(work), _all_cores():
            counts = writer.write(key, state)
            (work / _STATE).unlink(missing_ok=True)
            sync_all(work)
    except Unavailable:
        raise
    except UserError:
        if not (work / _STATE).exists():
            shutil.rmtree(work)
        raise
    work.rename(directory)
    return counts


class _Writer:
    """Writes the sequences of a stage's sources, interleaved."""

    def __init__(
        self,
        stage: Stage,
        tokenizer: "PreTrainedTokenizerBase",
        work: Path,
        *,
        tokens: int,
        scored: int,
        seed: int,
        place: str,
    ) -> None:
        self.stage, self.tokenizer, self.work, self.seed = stage, tokenizer, work, seed
        self.tokens, self.scored, self.place = tokens, scored, place
        self.length = stage.sequence_length
        self.held_out, self.wanted = wanted_sequences(stage, tokens, scored)
        self.border = held_out_tokens(stage, tokens, scored)
        places, self.fields = zip(*sources_of(stage.data), strict=True)
        self.places = [f"{place}data{inner}" for inner in places]
        self.shares = [getattr(source, "share", 1.0) for source in self.fields]
        self.mixed = stage.data.kind == "mixture"
        self.type = token_type(len(tokenizer))

    def write(self, key: str, state: dict[str, Any] | None) -> dict[str, Any]:
        """Write everything from a state on, and return the counts."""
        streams = self._open(state)
        masked = any(stream.source.masked for stream in streams)
        done = sum(stream.sequences for stream in streams)
        saved = done
        self._check_room(done)
        with (
            _opened(self.work / "tokens.bin", done * self.length * self.type.itemsize) as tokens_out,
            _opened(self.work / "learn.bin", masked * done * math.ceil(self.length / 8)) as learn_out,
            _opened(self.work / "source.bin", done) as source_out,
            progress_bar(f"tokenising {self.stage.name}", self.wanted * self.length) as advance,
        ):
            advance(done * self.length)
            while done < self.wanted:
                number = next_source(self.shares, [stream.tokens for stream in streams], self.length)
                sequence = self._take(streams[number], number)
                if sequence is None:
                    break
                tokens_out.write(sequence.ids.astype(self.type).tobytes())
                source_out.write(bytes([number]))
                if masked:
                    learn_out.write(np.packbits(sequence.learn).tobytes())
                done += 1
                advance(self.length)
                if done == self.held_out:
                    for stream in streams:
                        stream.begin_laps_here()
                if done >= self.held_out and (done - saved) * self.length >= SAVE_TOKENS:
                    for file in (tokens_out, learn_out, source_out):
                        file.flush()
                        os.fsync(file.fileno())
                    _write_state(self.work, key, streams)
                    saved = done
        if not masked:
            (self.work / "learn.bin").unlink()
        if not self.mixed:
            (self.work / "source.bin").unlink()
        return self._finish(streams, done)

    def _check_room(self, done: int) -> None:
        """See that the disk has room for a mixture, which is written in full; other data may turn out to be fewer."""
        needed = data_bytes(self.stage, self.tokens, self.scored, len(self.tokenizer)) * (1 - done / self.wanted)
        free = shutil.disk_usage(self.work).free
        if self.mixed and needed > free:
            raise Unavailable(
                f"{self.work} needs {needed / 2**30:.2f} GiB of disk, {free / 2**30:.2f} are free; make room and run "
                "the same command again to go on"
            )

    def _open(self, state: dict[str, Any] | None) -> list[SequenceStream]:
        streams = []
        for number, fields in enumerate(self.fields):
            with _named(self.places[number]):
                given = None if state is None else state[number]
                how = {"length": self.length, "seed": self.seed, "state": given}
                streams.append(SequenceStream(fields, self.tokenizer, **how))
        return streams

    def _take(self, stream: SequenceStream, number: int) -> Any:
        with _named(self.places[number]):
            sequence = stream.take()
            if sequence is None and self.mixed:
                needed = math.ceil(self.wanted * self.shares[number]) * self.length
                again = "" if self.fields[number].repeat else " (repeat: true would begin it again)"
                raise UserError(
                    f"{name_of(self.fields[number])} ran out after {stream.tokens + stream.rest:,} of about "
                    f"{needed:,} tokens that its share of the stage needs{again}{_left_out(stream)}"
                )
        return sequence

    def _finish(self, streams: list[SequenceStream], sequences: int) -> dict[str, Any]:
        whole = sequences == self.wanted
        tokens = sequences * self.length + (0 if whole else streams[0].rest)
        fraction = self.stage.data.held_out
        border = self.border if whole else min(self.border, max(self.length, round(tokens * fraction)))
        held_out, training = split(sequences, self.length, border)
        if not len(training) or not len(held_out):
            raise UserError(
                f"{self.place}data: {tokens} tokens, held_out {fraction:g} of them, make {len(training)} sequences of "
                f"{self.length} to train on and {len(held_out)} to evaluate; each needs one"
                f"{''.join(map(_left_out, streams))}"
            )
        read = sum(stream.tokens for stream in streams)
        sources = [
            {"name": name_of(fields), "sequences": stream.sequences, "tokens": stream.tokens}
            | dict(sorted(stream.counts.items()))
            | ({"revision": stream.revision} if stream.revision else {})
            | ({"share": fields.share, "met": stream.tokens / read} if self.mixed else {})
            for fields, stream in zip(self.fields, streams, strict=True)
        ]
        counts = {"sequences": sequences, "tokens": tokens, "held_out": border, "sources": sources}
        about = counts | {"eos_token_id": self.tokenizer.eos_token_id, "type": self.type.name}
        (self.work / "data.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        return counts


def _left_out(stream: SequenceStream) -> str:
    left = {name: stream.counts[name] for name in ("too_long", "unanswered") if stream.counts[name]}
    if left:
        return "; left out: " + ", ".join(f"{count} {name}" for name, count in left.items())
    chosen = not stream.counts[stream.source.noun] and getattr(stream.fields, "deciding", None)
    return f"; the filter or part of {name_of(stream.fields)} kept no row" if chosen else ""


@contextmanager
def _named(place: str) -> Iterator[None]:
    """Put a place in the recipe before the message of an error, of one in reading a file too."""
    try:
        yield
    except (UserError, OSError) as error:
        raise (type(error) if isinstance(error, UserError) else Unavailable)(f"{place}: {error}") from error


@contextmanager
def _opened(path: Path, size: int) -> Iterator[Any]:
    """Open a file to go on writing at `size` bytes, what comes after them being of no use."""
    with path.open("ab") as file:
        if file.tell() < size:
            (path.parent / _STATE).unlink()  # of no use without it
            raise UserError(f"{path} is damaged: it has lost what was written before an interruption; start again")
        file.truncate(size)
        yield file


@contextmanager
def _all_cores() -> Iterator[None]:
    """Let the tokenizer work on as many texts at once as there are cores; their order stays."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    try:
        yield
    finally:
        del os.environ["TOKENIZERS_PARALLELISM"]
        if before is not None:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _fingerprint(stage: Stage, tokenizer: "PreTrainedTokenizerBase", tokens: int | None, scored: int, seed: int) -> str:
    """What the data depend on: a state of other data is of no use."""
    files = [file for _, source in sources_of(stage.data) for file in getattr(source, "files", None) or ()]
    sizes = [os.stat(file).st_size for file in files if os.path.exists(file)]
    parts = [stage.model_dump_json(), tokens, scored, seed, sizes, vocabulary_hash(tokenizer)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _write_state(work: Path, key: str, streams: list[SequenceStream]) -> None:
    states = [stream.state() for stream in streams]
    arrays = {f"{name}{number}": state.pop(name) for number, state in enumerate(states) for name in ("ids", "learn")}
    with replacing(work / _STATE) as draft, draft.open("wb") as file:
        np.savez(file, about=json.dumps({"key": key, "states": states}), **arrays)


def _read_state(work: Path, key: str) -> list[dict[str, Any]] | None:
    """The state of each source; None if there is none that can be gone on from."""
    try:
        with np.load(work / _STATE) as file:
            about = json.loads(str(file["about"]))
            if about["key"] != key:
                return None
            return [
                state | {name: file[f"{name}{number}"] for name in ("ids", "learn")}
                for number, state in enumerate(about["states"])
            ]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile):  # none, or damaged
        return None
