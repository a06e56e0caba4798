"""A stage's data: files in, sequences of tokens on disk, batches out in an order that any step can resume.

Files are tokenised once, into `tokens.bin` (int32, `[sequences, sequence_length]`) and, for instructions,
`learn.bin` (one byte per token: is it part of an answer?). Which sequences are held out depends on the data
alone; which sequence comes when depends on the seed and the position alone. So a position is all that a
resumed run has to know, and nothing is read again to get there.

Documents are joined by the end-of-text token, which is therefore where the next one starts.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import Dataset

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.recipe import InstructionData, Stage, TextData, local_path
from palimpsa_surgery.surgery.outputs import fresh_directory
from palimpsa_surgery.surgery.text import iter_token_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100
"""The label that transformers' losses leave out."""


def prepare(stage: Stage, tokenizer: "PreTrainedTokenizerBase", directory: Path) -> dict[str, int]:
    """Tokenise a stage's files into `directory`, which appears whole or not at all.

    Returns:
        Counts: `sequences`, `tokens` (those of a last, shorter sequence included), and for instructions the
        `examples` used, and those dropped for lack of a prompt or answer (`unanswered`) or because one
        sequence could not hold them (`too_long`).

    Raises:
        UserError: the files cannot be read, or do not give a sequence to train on and one to hold out.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no end-of-text token (eos_token), which must end every document")
    write = {"text": _write_text, "instruction": _write_instructions}[stage.data.kind]
    with fresh_directory(directory) as work:
        counts = write(stage.data, stage.sequence_length, tokenizer, work)
        training, held_out = _split(counts["sequences"], stage.sequence_length, counts["tokens"], stage.data.held_out)
        if not len(training) or not len(held_out):
            dropped = f"; {counts['too_long']} examples are longer than that" if counts.get("too_long") else ""
            raise UserError(
                f"stage {stage.name}: {counts['tokens']} tokens of data, held_out {stage.data.held_out:g} of them, "
                f"make {len(training)} sequences of {stage.sequence_length} to train on and {len(held_out)} to "
                f"evaluate; each needs one{dropped}"
            )
        (work / "data.json").write_text(json.dumps(counts | {"eos_token_id": tokenizer.eos_token_id}))
    return counts


class Sequences:
    """The sequences that `prepare` wrote, as model inputs; read from disk when asked for."""

    def __init__(self, directory: Path, stage: Stage) -> None:
        about = json.loads((directory / "data.json").read_text())
        self.eos_token_id: int = about["eos_token_id"]
        self.reset = stage.packing.reset_at_documents
        shape = (-1, stage.sequence_length)
        self.tokens = np.memmap(directory / "tokens.bin", dtype=np.int32, mode="r").reshape(shape)
        learn = directory / "learn.bin"
        self.learn = np.memmap(learn, dtype=np.bool_, mode="r").reshape(shape) if learn.exists() else None
        self.training, self.held_out = _split(*self.tokens.shape, about["tokens"], stage.data.held_out)
        """Indices of the sequences that are trained on, and of those that are only evaluated."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return `input_ids [T]` and `labels [T]` (int64), and `seq_idx [T]` (int32) if documents reset.

        Labels are not shifted: the model does that. With a reset, a document's first token is no target,
        for the model has nothing to tell it from.
        """
        ids = torch.from_numpy(self.tokens[index].astype(np.int64))
        labels = ids.clone()
        if self.learn is not None:
            labels[~torch.from_numpy(np.array(self.learn[index]))] = IGNORED
        if not self.reset:
            return {"input_ids": ids, "labels": labels}
        starts = torch.zeros_like(ids, dtype=torch.bool)
        starts[1:] = ids[:-1] == self.eos_token_id
        labels[starts] = IGNORED
        return {"input_ids": ids, "labels": labels, "seq_idx": starts.cumsum(0, dtype=torch.int32)}

    def batches(self, indices: np.ndarray, size: int) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the sequences at `indices` stacked, `size` at a time: `[B, T]` each."""
        for start in range(0, len(indices), size):
            yield collate([self[index] for index in indices[start : start + size]])


class TrainingOrder(Dataset):
    """Every sequence that a stage will train on, one after the other: its order is part of the data.

    The training sequences are shuffled, used up, shuffled again, as often as the stage's tokens need.
    """

    def __init__(self, sequences: Sequences, *, count: int, seed: int, stage_index: int) -> None:
        self.sequences = sequences
        self.count = count
        self.key = (seed, stage_index)
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0))

    def __len__(self) -> int:
        """Sequences in the whole stage, repetitions included."""
        return self.count

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        """Return the inputs at a position of the stage, as `Sequences` gives them."""
        lap, offset = divmod(position, len(self.sequences.training))
        if self._order[0] != lap:
            self._order = lap, np.random.default_rng((*self.key, lap)).permutation(self.sequences.training)
        return self.sequences[self._order[1][offset]]


def collate(items: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack inputs of one length: `[T]` each → `[B, T]`."""
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}


def _split(sequences: int, length: int, tokens: int, held_out: float) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the sequences that lie before the last `held_out` of the tokens, and within it.

    Two stages that read the same text at different lengths thus hold out the same text; a sequence across
    the border is left out of both.
    """
    border = tokens - round(tokens * held_out)
    starts = np.arange(sequences) * length
    return np.flatnonzero(starts + length <= border), np.flatnonzero(starts >= border)


def _write_text(data: TextData, length: int, tokenizer: "PreTrainedTokenizerBase", directory: Path) -> dict[str, int]:
    files = [local_path(file) for file in data.files]
    counts = {"sequences": 0, "tokens": 0}
    with (directory / "tokens.bin").open("wb") as out:
        for block in iter_token_blocks(
            files, tokenizer, sequence_length=length, max_tokens=data.max_tokens, column=data.column
        ):
            if len(block) == length:  # the last one may be shorter: it is left out
                out.write(np.asarray(block, dtype=np.int32).tobytes())
                counts["sequences"] += 1
            counts["tokens"] += len(block)
    return counts


def _write_instructions(
    data: InstructionData, length: int, tokenizer: "PreTrainedTokenizerBase", directory: Path
) -> dict[str, int]:
    """Pack whole examples, in order, into sequences whose rest is filled with end-of-text tokens."""
    head, tail = data.template.split("{prompt}")
    joint = tail.removesuffix("{answer}")
    counts = {"sequences": 0, "tokens": 0, "examples": 0, "unanswered": 0, "too_long": 0}
    ids: list[int] = []
    learn: list[bool] = []
    with (
        (directory / "tokens.bin").open("wb") as tokens_out,
        (directory / "learn.bin").open("wb") as learn_out,
    ):

        def flush() -> None:
            padding = length - len(ids)
            tokens_out.write(np.asarray(ids + [tokenizer.eos_token_id] * padding, dtype=np.int32).tobytes())
            learn_out.write(np.asarray(learn + [False] * padding, dtype=np.bool_).tobytes())
            counts["sequences"] += 1
            counts["tokens"] += length
            ids.clear()
            learn.clear()

        for prompt, answer in _iter_pairs(data):
            if not prompt or not answer:
                counts["unanswered"] += 1
                continue
            question = f"{head}{prompt}{joint}"
            # Tokenised in one piece and told apart by offset, because a token may span the joint.
            encoded = tokenizer(question + answer, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
            example = [*encoded["input_ids"], tokenizer.eos_token_id]
            if len(example) > length:
                counts["too_long"] += 1
                continue
            if len(ids) + len(example) > length:
                flush()
            ids += example
            learn += [end > len(question) for _, end in encoded["offset_mapping"]] + [True]
            counts["examples"] += 1
        if ids:
            flush()
    return counts


def _iter_pairs(data: InstructionData) -> Iterator[tuple[str | None, str | None]]:
    """Yield each row's prompt and answer; either may be null.

    Raises:
        UserError: a row that is no JSON object, lacks a column, or holds neither text nor null there. The
            message names the file and the row, and for a missing column lists those found.
    """
    columns = (data.prompt_column, data.answer_column)
    for file in data.files:
        path = local_path(file)
        rows = _iter_parquet(path, columns) if path.suffix == ".parquet" else _iter_jsonl(path)
        for number, row in enumerate(rows, start=1):
            for column in columns:
                if column not in row:
                    raise UserError(f"{path}, row {number}: no column {column!r} (columns found: {', '.join(row)})")
                if not isinstance(row[column], str | None):
                    kind = type(row[column]).__name__
                    raise UserError(f"{path}, row {number}: column {column!r} holds {kind}, not text")
            yield row[columns[0]], row[columns[1]]


def _iter_jsonl(path: Path) -> Iterator[dict]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.isspace():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                raise UserError(f"{path}, line {number}: not a JSON object ({error})") from None
            if not isinstance(row, dict):
                raise UserError(f"{path}, line {number}: not a JSON object")
            yield row


def _iter_parquet(path: Path, columns: tuple[str, str]) -> Iterator[dict]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            found = file.schema_arrow.names
            missing = [column for column in columns if column not in found]
            if missing:
                raise UserError(f"{path}: no column {missing[0]!r} (columns found: {', '.join(found)})")
            for batch in file.iter_batches(batch_size=256, columns=list(columns)):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file ({' '.join(str(error).split())})") from None
