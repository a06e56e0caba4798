"""Sequences on disk as model inputs, and the order in which training reads them.

Which sequences are held out depends on the data alone; which sequence comes when depends on the seed and the
position alone. So a position is all that a resumed run has to know, and nothing is read again to get there.

Documents are joined by the end-of-text token, which is therefore where the next one starts.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.recipe import Stage

IGNORED = -100
"""The label that transformers' losses leave out."""


class Sequences:
    """The sequences that `prepare` wrote, as model inputs; read from disk when asked for.

    Raises:
        UserError: they are not as they were written.
    """

    def __init__(self, directory: Path, stage: Stage) -> None:
        try:
            self._open(directory, stage)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{directory} is damaged: {' '.join(str(error).split())}") from error

    def _open(self, directory: Path, stage: Stage) -> None:
        about = json.loads((directory / "data.json").read_text())
        self.eos_token_id: int = about["eos_token_id"]
        self.reset = stage.packing.reset_at_documents
        shape = (-1, stage.sequence_length)
        self.tokens = np.memmap(directory / "tokens.bin", dtype=about["type"], mode="r").reshape(shape)
        learn, row = directory / "learn.bin", -(-stage.sequence_length // 8)
        self.learn = np.memmap(learn, dtype=np.uint8, mode="r").reshape(-1, row) if learn.exists() else None
        self.held_out, self.training = split(*self.tokens.shape, about["held_out"])
        """Indices of the sequences that are only evaluated, and of those that are trained on."""
        mixed = directory / "source.bin"
        self.source = np.fromfile(mixed, np.uint8) if mixed.exists() else np.zeros(len(self.tokens), np.uint8)
        """Number of the source of each sequence."""
        self.in_text_order = self.training[np.argsort(self.source[self.training], kind="stable")]
        """Indices of the training sequences, one source after the other, each in the order of its text."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return `input_ids [T]` and `labels [T]` (int64), and `seq_idx [T]` (int32) if documents reset.

        Labels are not shifted: the model does that. With a reset, a document's first token is no target,
        for the model has nothing to tell it from. What fills up a sequence belongs to its last document, so that the
        state which a row leaves has seen one.
        """
        ids = torch.from_numpy(self.tokens[index].astype(np.int64))
        labels = ids.clone()
        if self.learn is not None:
            learn = np.unpackbits(self.learn[index], count=len(ids)).astype(np.bool_)
            labels[~torch.from_numpy(learn)] = IGNORED
        if not self.reset:
            return {"input_ids": ids, "labels": labels}
        starts = torch.zeros_like(ids, dtype=torch.bool)
        ends = ids == self.eos_token_id
        starts[1:] = ends[:-1] & ~ends[1:]
        labels[starts] = IGNORED
        return {"input_ids": ids, "labels": labels, "seq_idx": starts.cumsum(0, dtype=torch.int32)}

    def continues(self, before: int, index: int) -> bool:
        """Whether the sequence at `index` goes on with the document in which the one at `before` ends."""
        source = self.source[index]
        if not before < index or source != self.source[before] or source in self.source[before + 1 : index]:
            return False
        return not (self.reset and self.tokens[before, -1] == self.eos_token_id)

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


def split(sequences: int, length: int, held_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the sequences that lie within the first `held_out` tokens, and of those behind them.

    Two stages that read the same text at different lengths thus hold out the same text; a sequence across the
    border is left out of both.
    """
    starts = np.arange(sequences) * length
    return np.flatnonzero(starts + length <= held_out), np.flatnonzero(starts >= held_out)
