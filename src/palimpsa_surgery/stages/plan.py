"""What a training run will do, worked out from configuration alone: no weights are loaded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.lora import add_adapters
from palimpsa_surgery.stages.optimisation import ADAPTERS, Treatment, parameters_by_treatment
from palimpsa_surgery.stages.recipe import ExpectedModel, Lora, Recipe, Stage

if TYPE_CHECKING:
    from rich.console import Group

    from palimpsa_surgery.surgery.checkpoints import Source

BYTES_PER_PARAMETER = 16  # float32 weight, gradient and Adam's two averages


@dataclass(frozen=True)
class StagePlan:
    """One stage and how much of it will run."""

    folder: str
    """Its folder in the run: `02-extend`."""
    stage: Stage
    steps: int
    """Optimizer steps, at most `--max-steps`."""
    status: str
    """`pending`, `running` (started, not finished) or `done`."""

    @property
    def tokens(self) -> int:
        """Tokens those steps train on."""
        return self.steps * self.stage.batch_tokens


@dataclass(frozen=True)
class Plan:
    """A run before it starts. `print` it through Rich."""

    recipe: Recipe
    source: "Source"
    output: Path
    stages: tuple[StagePlan, ...]
    groups: dict[Treatment, tuple[int, int]]
    """Number of tensors and of parameters that are trained alike."""
    notes: tuple[str, ...]
    """What could not be checked, and what the user may want to know."""

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return sum(count for _, count in self.groups.values())

    def __rich__(self) -> "Group":
        """Draw the plan in 80 columns."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        stages = Table("stage", title="Stages", title_justify="left")
        for column in ("steps", "tokens", "length", "batch", "rate", "importance"):
            stages.add_column(column, justify="right")
        stages.add_column("status")
        for plan in self.stages:
            stage = plan.stage
            stages.add_row(
                stage.name,
                f"{plan.steps:,}",
                f"{plan.tokens:,}",
                f"{stage.sequence_length:,}",
                f"{stage.batch_tokens:,}",
                f"{stage.learning_rate:g}",
                f"{stage.importance_learning_rate:g}",
                plan.status,
            )
        groups = Table("parameters", title="Parameter groups", title_justify="left")
        for column in ("tensors", "count"):
            groups.add_column(column, justify="right")
        groups.add_column("learning rate")
        groups.add_column("decay")
        for treatment, (tensors, count) in self.groups.items():
            rate = {None: "not trained", "learning_rate": "rate"}.get(treatment.rate, "importance")
            groups.add_row(treatment.group, f"{tensors:,}", f"{count:,}", rate, "yes" if treatment.decays else "no")
        config = self.source.config
        memory = self.parameters * BYTES_PER_PARAMETER / 2**30
        lines = [
            f"Checkpoint {self.source.name}",
            f"{self.parameters:,} parameters, {len(config.palimpsa_layers)} of {config.num_hidden_layers} layers "
            "are Palimpsa layers.",
            f"Weights, gradients and optimizer take {memory:.2f} GiB; activations come on top.",
            *self.notes,
        ]
        return Group(stages, groups, Text("\n".join(lines)))


def make_plan(
    source: "Source", recipe: Recipe, output: Path, *, max_steps: int | None, statuses: list[str] | None
) -> Plan:
    """Work out the plan of a run.

    Args:
        max_steps: a cap on every stage's steps.
        statuses: each stage's status in a run that exists already; None: there is none yet.

    Raises:
        UserError: the checkpoint is not what the recipe expects.
    """
    notes = check_model(recipe.model, source)
    stages = tuple(
        StagePlan(
            folder=f"{number:02d}-{stage.name}",
            stage=stage,
            steps=min(stage.steps, max_steps or stage.steps),
            status=statuses[number - 1] if statuses else "pending",
        )
        for number, stage in enumerate(recipe.stages, start=1)
    )
    notes = (*source.notes, *notes, *(_lora_note(source, stage) for stage in recipe.stages if stage.lora))
    return Plan(recipe, source, output, stages, _count_parameters(source), notes)


def check_model(expected: ExpectedModel, source: "Source") -> tuple[str, ...]:
    """Compare a checkpoint with what a recipe expects of it.

    Returns:
        Notes on what could not be checked, because no surgery by this package made the checkpoint.

    Raises:
        UserError: they differ; the line names every difference.
    """
    surgery = read_surgery(source.path)
    layers = len(source.config.palimpsa_layers)
    wrong = []
    if expected.palimpsa_layers is not None and expected.palimpsa_layers != layers:
        wrong.append(f"palimpsa_layers is {layers} where the recipe expects {expected.palimpsa_layers}")
    unchecked = []
    base, init = surgery.get("base_model"), surgery.get("init", {}).get("kind")
    for field, wanted, found in (
        ("base", expected.base, base and Path(base).name),
        ("init", expected.init, init),
    ):
        if wanted is None:
            continue
        if found is None:
            unchecked.append(field)
        elif found != (Path(wanted).name if field == "base" else wanted):
            wrong.append(f"{field} is {found} where the recipe expects {wanted}")
    if wrong:
        raise UserError(f"checkpoint {source.name} does not suit the recipe: {'; '.join(wrong)}")
    return (f"The checkpoint does not say its {' and '.join(unchecked)}: not checked.",) if unchecked else ()


def read_surgery(folder: Path) -> dict:
    """Read what `replace` recorded about a checkpoint; empty for a checkpoint it did not make.

    Raises:
        UserError: the record is not JSON.
    """
    path = folder / "surgery.json"
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON: {error}") from None


def _lora_note(source: "Source", stage: Stage) -> str:
    count = _count_parameters(source, stage.lora)
    trained = sum(parameters for treatment, (_, parameters) in count.items() if treatment.rate)
    adapters = count[ADAPTERS][1]
    return (
        f"Stage {stage.name} trains {trained:,} parameters: {adapters:,} in LoRA adapters of rank {stage.lora.rank} on "
        "the kept layers, and the Palimpsa layers; all others are frozen."
    )


def _count_parameters(source: "Source", lora: Lora | None = None) -> dict[Treatment, tuple[int, int]]:
    import torch

    from palimpsa_surgery.hf_models import PalimpsaMamba2ForCausalLM

    with torch.device("meta"):
        model = PalimpsaMamba2ForCausalLM(source.config)
        if lora is not None:
            add_adapters(model, lora)
    return {
        treatment: (len(parameters), sum(parameter.numel() for parameter in parameters))
        for treatment, parameters in parameters_by_treatment(model).items()
    }
