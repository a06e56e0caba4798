"""What a run tells while it trains: its log, the progress bar, other people's dashboards, and the replaced layers.

Nothing here draws a random number or changes the model, so a run with reports ends with the same bits as one without.
"""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path

from transformers import Trainer, TrainerCallback

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.data import Sequences, collate
from palimpsa_surgery.stages.guard import SKIPPED
from palimpsa_surgery.stages.held_out import autocast
from palimpsa_surgery.surgery.layer_probe import LayerProbe, probe_layers
from palimpsa_surgery.surgery.outputs import replacing, writing
from palimpsa_surgery.surgery.records import Count, Record, checked

LOG_FILE, LAYERS_FILE = "log.jsonl", "layers.jsonl"


class StepLog(TrainerCallback):
    """Writes one line of `log.jsonl` per step, and moves the progress bar.

    Args:
        folder: the stage's.
        batch_tokens: tokens of a step.
        advance: called with the steps made and the speed in words.
    """

    def __init__(self, folder: Path, batch_tokens: int, advance: Callable[[int, str], None]) -> None:
        self.path, self.batch_tokens, self.advance = folder / LOG_FILE, batch_tokens, advance
        self.since = 0.0

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Drop lines later than the checkpoint that training goes on from: those steps will run again."""
        keep_until(self.path, state.global_step)
        self.advance(state.global_step, "")
        self.since = time.perf_counter()

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        """Write the step's numbers; the Trainer's closing summary has no loss and is left out."""
        if not logs or "loss" not in logs:
            return
        now = time.perf_counter()
        speed = self.batch_tokens / (now - self.since)
        line = {
            "step": state.global_step,
            "tokens": state.global_step * self.batch_tokens,
            **{key: _finite(logs[key]) for key in ("loss", "grad_norm", "learning_rate")},
            "tokens_per_second": round(speed, 1),
        }
        if SKIPPED in logs:
            line[SKIPPED] = True
        self.since = now
        append(self.path, line)
        self.advance(1, f"{speed:,.0f} tokens/s")


class LayerReport(TrainerCallback):
    """Looks into the replaced layers on a held-out sequence: before the first step, every so many, and after the last.

    Their windows and ratios (see `LayerProbe`) go into `layers.jsonl` and to the dashboards. All ranks look, since
    parameters may be divided over them.

    Args:
        trainer: whose model is looked into, and whose `log` the numbers go to.
        sequences: the first one held out is the one.
        folder: the stage's; None: this rank writes nothing.
        every: steps.
    """

    def __init__(self, trainer: Trainer, sequences: Sequences, folder: Path | None, every: int) -> None:
        self.trainer, self.every = trainer, every
        self.model = trainer.model
        self.inputs = collate([sequences[sequences.held_out[0]]])
        self.path = None if folder is None else folder / LAYERS_FILE

    def on_train_begin(self, args, state, control, **kwargs) -> None:
        """Drop later lines, as of the log; look, if this is the start."""
        if self.path is not None:
            keep_until(self.path, state.global_step if state.global_step else -1)
        if state.global_step == 0:
            self._look(0)

    def on_step_end(self, args, state, control, **kwargs) -> None:
        """Look, if it is time."""
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            should_log = control.should_log
            self._look(state.global_step)
            control.should_log = should_log  # `Trainer.log` takes it back, and the step itself would go unlogged

    def _look(self, step: int) -> None:
        inputs = {key: value.to(self.model.device) for key, value in self.inputs.items()}
        with autocast(self.model.device):
            probes = probe_layers(
                self.model,
                inputs["input_ids"],
                seq_idx=inputs.get("seq_idx"),
                layers=self.model.config.palimpsa_layers,
            )
        layers = {probe.layer: _numbers(probe) for probe in probes}
        if self.path is not None:
            append(self.path, {"step": step, "layers": [{"layer": layer} | layers[layer] for layer in layers]})
        self.trainer.log(
            {
                f"layer_{layer}/{name}": value
                for layer, numbers in layers.items()
                for name, value in numbers.items()
                if value is not None
            }
        )


def _numbers(probe: LayerProbe) -> dict[str, float | None]:
    names = ("median_window", "importance_ratio", "metaplasticity_ratio")
    return {name: _finite(getattr(probe, name)) for name in names}


class LogLine(Record):
    """A line of `log.jsonl`."""

    step: Count
    loss: float | None
    grad_norm: float | None = None
    learning_rate: float


class LayerNumbers(Record):
    """What a line of `layers.jsonl` says about one layer."""

    layer: Count
    median_window: float | None
    importance_ratio: float | None
    metaplasticity_ratio: float | None


class LayersLine(Record):
    """A line of `layers.jsonl`."""

    step: Count
    layers: list[LayerNumbers]


def read_lines(path: Path) -> list[dict]:
    """The whole lines of a log in a stage's folder; a last one that a kill cut short is left out.

    Raises:
        UserError: a line is not as it was written.
    """
    schema = {LOG_FILE: LogLine, LAYERS_FILE: LayersLine}[path.name]
    found = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if path.is_file() else []
    for number, line in enumerate(lines, start=1):
        if line.endswith("\n"):
            complaint = f"{path}, line {number}: not a line of this log"
            try:
                content = json.loads(line)
            except ValueError:
                raise UserError(complaint) from None
            found.append(checked(content, schema, complaint))
    return found


def keep_until(path: Path, step: int) -> None:
    """Drop the lines of a log that belong to steps later than `step`, or that a kill cut short."""
    if path.exists():
        kept = [line for line in read_lines(path) if line["step"] <= step]
        with writing(path), replacing(path) as draft:
            draft.write_text("".join(json.dumps(line) + "\n" for line in kept))


def append(path: Path, line: dict) -> None:
    """Add a line to a log."""
    with writing(path), path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _finite(value: float) -> float | None:
    """The number, or null where JSON has none."""
    return value if math.isfinite(value) else None
