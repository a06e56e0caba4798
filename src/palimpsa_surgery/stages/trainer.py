"""One stage's training, through transformers' Trainer."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedModel, PrinterCallback, TrainingArguments, set_seed
from transformers.utils import logging as transformers_logging

from palimpsa_surgery import ranks
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.data import collate
from palimpsa_surgery.stages.guard import SKIPPED, NonFiniteGuard, skipped_steps
from palimpsa_surgery.stages.held_out import has_bfloat16
from palimpsa_surgery.stages.launch import share
from palimpsa_surgery.stages.optimisation import build_optimizer
from palimpsa_surgery.stages.parallel import ParallelTrainer
from palimpsa_surgery.stages.recipe import Stage
from palimpsa_surgery.stages.reporting import StepLog
from palimpsa_surgery.stages.snapshots import Snapshots
from palimpsa_surgery.stages.states import make_initial_states


class StageTrainer(ParallelTrainer):
    """The Trainer with a stage's parameter groups, data order, log, loss in blocks and guard against NaN.

    Weights, gradients and the optimizer are float32; on a GPU that has bfloat16 the forward pass is autocast to
    it. Never to float16, whose range long recurrences exceed.

    Each of several processes takes its share of every batch: of the sequences of one forward pass, taken over all
    ranks in the data's order, rank r has the r-th part.

    Args:
        model: float32; it is moved to the GPU if there is one, and divided over the ranks under FSDP.
        order: what to train on, one position after the other: `TrainingOrder`, or `ContinuedOrder` for tbtt.
        snapshots: where checkpoints go; `log.jsonl` lies in the same folder.
        steps: optimizer steps to run; the learning rate's schedule spans them.
        advance: called after each step with 1 and the speed in words, and at the start with the steps behind.
        report_to, run_name: dashboards of transformers' that get the log too, and what they call this stage.

    Raises:
        UserError: the ranks cannot share a batch evenly, or accelerate made something else than was asked for.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stage: Stage,
        order: Dataset,
        snapshots: Snapshots,
        *,
        steps: int,
        seed: int,
        checkpoint_steps: int,
        advance: Callable[[int, str], None],
        report_to: Sequence[str] = (),
        run_name: str | None = None,
    ) -> None:
        self.stage = stage
        self.guard = NonFiniteGuard(stage.name, stage.non_finite.max_consecutive)
        batch = share(stage, ranks.world_size())
        cosine = stage.schedule.kind == "cosine"
        arguments = TrainingArguments(
            output_dir=str(snapshots.folder),
            use_cpu=not torch.cuda.is_available(),
            bf16=has_bfloat16(),
            seed=seed,
            max_steps=steps,
            per_device_train_batch_size=batch.micro_batch,
            gradient_accumulation_steps=batch.accumulation,
            average_tokens_across_devices=True,
            ddp_find_unused_parameters=False,
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            activation_checkpointing=stage.gradient_checkpointing,
            learning_rate=stage.learning_rate,
            warmup_steps=stage.warmup_steps,
            lr_scheduler_type="cosine_with_min_lr" if cosine else "constant_with_warmup",
            lr_scheduler_kwargs={"min_lr_rate": stage.schedule.min_ratio} if cosine else {},
            max_grad_norm=stage.clip,
            save_steps=checkpoint_steps,
            save_total_limit=None,  # Snapshots keeps as many as wanted
            logging_steps=1,
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            log_level="error",
            report_to=list(report_to),
            run_name=run_name,
        )
        # Both would otherwise come from outside: a precision from the environment (float16 among them), and
        # data parallelism over all GPUs that this one process sees.
        arguments.mixed_precision = "bf16" if has_bfloat16() else "no"
        arguments._n_gpu = min(arguments.n_gpu, 1)
        log = [StepLog(snapshots.folder, stage.batch_tokens, advance)] if ranks.is_first() else []
        super().__init__(model, arguments, collate, order, snapshots=snapshots, callbacks=log)
        self.remove_callback(PrinterCallback)
        rank, size = arguments.process_index, arguments.world_size
        self.initial_states = make_initial_states(
            stage.state, model.config, device=arguments.device, seed=seed, rank=rank, ranks=size
        )
        # The Trainer seeds all ranks alike, which would drop the same of every rank's sequences.
        set_seed(int(np.random.SeedSequence((seed, rank)).generate_state(1)[0]))

    def train(self, *args: object, **kwargs: object) -> object:
        """Train; see `Trainer.train`.

        Raises:
            UserError: as the class does, or the GPU's memory does not suffice.
        """
        try:
            return super().train(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"stage {self.stage.name}: out of GPU memory: use a smaller micro_batch_tokens, "
                f"gradient_checkpointing, or more GPUs with FSDP ({str(error).split('. ')[0]})"
            ) from error

    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return AdamW over the groups of `stages.optimisation`."""
        return build_optimizer(model, self.stage)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict,
        return_outputs: bool = False,
        num_items_in_batch: object = None,
    ) -> torch.Tensor | tuple[torch.Tensor, object]:
        """Run the forward pass from the stage's initial states, without holding the logits."""
        inputs, states = dict(inputs), self.initial_states
        started = states.before(inputs["input_ids"].shape[0], inputs.pop("continues", None))
        inputs |= {
            "initial_states": started,
            "return_final_states": states.wants_final,
            "return_logits": False,
        }
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        if states.wants_final:
            states.after(outputs["final_states"])
        return (loss, outputs) if return_outputs else loss

    def training_step(self, model: torch.nn.Module, inputs: dict, num_items_in_batch: object = None) -> torch.Tensor:
        """Run one forward and backward pass, and let the guard see the loss."""
        return self.guard.see(super().training_step(model, inputs, num_items_in_batch))

    def _clip_grad_norm(self, model: torch.nn.Module) -> torch.Tensor:
        norm = super()._clip_grad_norm(model)
        if not self.guard.allows_step(norm, self.accelerator, self.state):
            # AdamW leaves alone what has no gradient: weight, moments and its count of steps.
            model.zero_grad(set_to_none=True)
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Mark a skipped step, whose loss is not a number, in what is logged and kept in `log_history`."""
        if "loss" in logs and self.guard.skipping:
            logs = logs | {"loss": math.nan, SKIPPED: 1}
        super().log(logs, start_time)

    def _save_rng_state(self, output_dir: str) -> None:
        super()._save_rng_state(output_dir)
        saved = {"ranks": self.args.world_size, "states": self.initial_states.state_dict()}
        torch.save(saved, self._states_file(output_dir))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        self.initial_states.position = self.state.global_step * self.stage.batch_sequences
        if checkpoint is None or self.initial_states.resumes_alone:
            return
        path, size = self._states_file(checkpoint), self.args.world_size
        saved = torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else {"ranks": 0}
        if saved["ranks"] != size:
            raise UserError(
                f"stage {self.stage.name}: {checkpoint} was not written by {size} processes, and state "
                f"{self.stage.state.kind} belongs to each of them: resume with as many as it was started with"
            )
        self.initial_states.load_state_dict(saved["states"])

    def _states_file(self, folder: str) -> Path:
        return Path(folder, STATES_FILE.format(rank=self.args.process_index))

    @property
    def skipped_steps(self) -> int:
        """Steps of this stage that the guard has skipped, in earlier processes too."""
        return skipped_steps(self.state)


STATES_FILE = "states-rank{rank}.pt"
"""What each rank carries from one micro-batch to the next."""


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars, and undo, at the end, the log level that a Trainer sets for the process."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
