"""Steps whose loss or gradient is not finite are skipped and counted; too many in a row end the run.

Nothing is stored for it: a skipped step is marked in the Trainer's `log_history`, which checkpoints carry, and
every count is read from there. So a resumed run counts on where it stopped.
"""

import math
from typing import TYPE_CHECKING

import torch

from palimpsa_surgery.errors import UserError

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import TrainerState

SKIPPED = "skipped"
"""Key that marks a skipped step in `log_history` and `log.jsonl`."""


def skipped_steps(state: "TrainerState") -> int:
    """How many steps were skipped so far."""
    return sum(SKIPPED in entry for entry in state.log_history)


class NonFiniteGuard:
    """Decides, the same on every rank, whether a step's gradients may reach the optimizer.

    Args:
        stage: its name, for the message.
        max_consecutive: so many steps may be skipped in a row; one more raises.
    """

    def __init__(self, stage: str, max_consecutive: int) -> None:
        self.stage, self.max_consecutive = stage, max_consecutive
        self.skipping = False
        """Whether the last step was skipped."""
        self._bad_loss: torch.Tensor | None = None

    def see(self, loss: torch.Tensor) -> torch.Tensor:
        """Remember whether a micro-batch's loss is finite; return it, or zero, so that later sums stay finite."""
        bad = ~torch.isfinite(loss)
        self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad
        return loss.masked_fill(bad, 0)

    def allows_step(self, norm: torch.Tensor, accelerator: "Accelerator", state: "TrainerState") -> bool:
        """Whether all losses since the last call and the gradient's norm are finite, on all ranks.

        Raises:
            UserError: they are not, for more than `max_consecutive` steps in a row.
        """
        # One number carries both, and one sum over ranks makes all ranks decide alike.
        bad_loss = accelerator.reduce(self._bad_loss.float(), reduction="sum").item() > 0
        self._bad_loss = None
        self.skipping = bad_loss or not math.isfinite(norm)
        if not self.skipping:
            return True
        row = 1
        for entry in reversed([entry for entry in state.log_history if "loss" in entry]):
            if SKIPPED not in entry:
                break
            row += 1
        if row > self.max_consecutive:
            what = "loss is" if bad_loss else "gradient norm is"
            raise UserError(
                f"stage {self.stage}: the {what} not finite at step {state.global_step + 1}"
                f"{f' ({row} steps in a row)' if row > 1 else ''}; lower the learning rates, or lengthen the warm-up"
            )
        return False
