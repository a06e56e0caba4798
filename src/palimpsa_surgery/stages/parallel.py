"""The Trainer on one process or many: what was asked for is what runs, and checkpoints are whole."""

import contextlib

import torch
from torch import nn
from transformers import Trainer

from palimpsa_surgery.stages.launch import check_honoured
from palimpsa_surgery.stages.optimisation import freeze_untrained
from palimpsa_surgery.stages.sharding import shard
from palimpsa_surgery.stages.snapshots import Snapshots


class ParallelTrainer(Trainer):
    """A Trainer that stops where accelerate silently does something else, shards for FSDP, and writes `Snapshots`.

    Args:
        model: divided over the ranks, in place, under FSDP.
        snapshots: where checkpoints go.
        arguments, options: the Trainer's own.

    Raises:
        UserError: accelerate made something else than the launcher asked for.
    """

    def __init__(self, model: nn.Module, *arguments: object, snapshots: Snapshots, **options: object) -> None:
        self.snapshots = snapshots
        super().__init__(model, *arguments, **options)
        check_honoured(self.accelerator)
        if self.is_fsdp_enabled:
            freeze_untrained(model)  # first, since what is gathered for a forward pass keeps the flag it has now
            shard(model, self.accelerator.state.fsdp_plugin)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the optimizer of a model as it is trained; for subclasses."""
        raise NotImplementedError

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the optimizer, made on the first call."""
        if self.optimizer is None:
            self.optimizer = self.make_optimizer(self.model if model is None else model)
            self._parameters = [list(group["params"]) for group in self.optimizer.param_groups]
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Make the schedule, after putting right what accelerate did to the optimizer just before.

        For FSDP it looks up the optimizer's parameters by address, and those of which this rank holds no row have
        one address in common.
        """
        for group, parameters in zip(self.optimizer.param_groups, self._parameters, strict=True):
            group["params"] = parameters
        return super().create_scheduler(num_training_steps, optimizer)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> contextlib.AbstractContextManager:
        """Autocast under FSDP, where accelerate leaves it to a policy that would round parameters (see `sharding`)."""
        if self.is_fsdp_enabled and self.args.bf16:
            return torch.autocast(self.args.device.type, torch.bfloat16, cache_enabled=cache_enabled)
        return super().autocast_smart_context_manager(cache_enabled)

    def _save_checkpoint(self, model: nn.Module, trial: None) -> None:
        with self.snapshots.writing(self.state.global_step, sharded=self.is_fsdp_enabled):
            super()._save_checkpoint(model, trial)

    def _get_output_dir(self, trial: None) -> str:
        return str(self.snapshots.staging)
