"""The order that truncated backpropagation through time needs: every row of a micro-batch reads on in its text."""

import numpy as np
import torch
from torch.utils.data import Dataset

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.data.order import Sequences, TrainingOrder
from palimpsa_surgery.stages.recipe import Stage
from palimpsa_surgery.stages.recipe_training import Tbtt


class ContinuedOrder(Dataset):
    """Sequences in the order of the text, so that row r of the next micro-batch continues row r of this one.

    The training sequences, those of each source together and closed to a ring, are cut into as many lanes of equal
    length as all ranks' micro-batches have rows. When the lanes are used up, the ring is turned by a random offset
    and cut again.

    Args:
        count: sequences in the whole stage.
        lanes: rows of a micro-batch times ranks; the order depends on it.

    Raises:
        UserError: there are fewer training sequences than lanes.
    """

    def __init__(self, sequences: Sequences, *, count: int, seed: int, stage_index: int, lanes: int) -> None:
        self.sequences, self.count, self.lanes = sequences, count, lanes
        self.key = (seed, stage_index)
        self.length = len(sequences.training) // lanes
        if not self.length:
            raise UserError(
                f"state tbtt needs a training sequence for each row of a micro-batch on every rank, {lanes} in all; "
                f"the data hold {len(sequences.training)}"
            )

    def __len__(self) -> int:
        """Sequences in the whole stage, repetitions included."""
        return self.count

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        """Return the inputs at a position, and `continues`: does it go on where its lane's previous one ended?"""
        step, lane = divmod(position, self.lanes)
        lap, step = divmod(step, self.length)
        ring = self.sequences.in_text_order
        turn = np.random.default_rng((*self.key, lap)).integers(len(ring))
        here = int(turn + lane * self.length + step) % len(ring)
        continues = step > 0 and self.sequences.continues(ring[here - 1], ring[here])
        return {**self.sequences[ring[here]], "continues": torch.tensor(continues)}


def training_order(
    sequences: Sequences, stage: Stage, *, steps: int, seed: int, stage_index: int, rows: int
) -> TrainingOrder | ContinuedOrder:
    """Return the order in which a stage reads its sequences.

    Args:
        steps: optimizer steps that the order must last for.
        rows: sequences that are in memory at a time: rows of a micro-batch times ranks.
    """
    place = {"count": steps * stage.batch_sequences, "seed": seed, "stage_index": stage_index}
    if isinstance(stage.state, Tbtt):
        return ContinuedOrder(sequences, lanes=rows, **place)
    return TrainingOrder(sequences, **place)
