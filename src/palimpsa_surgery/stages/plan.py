"""What a training run will do, worked out from configuration alone: no weights are loaded."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.lora import add_adapters
from palimpsa_surgery.stages.memory import (
    CHECKPOINT_BYTES,
    FINAL_BYTES,
    FULL,
    HALF,
    TRAINED_BYTES,
    Activations,
    activations,
)
from palimpsa_surgery.stages.optimisation import ADAPTERS, Treatment, parameters_by_treatment
from palimpsa_surgery.stages.recipe import ExpectedModel, Recipe, Stage
from palimpsa_surgery.stages.recipe_data import name_of, origin_of, shared_sets, sources_of
from palimpsa_surgery.stages.recipe_training import Lora
from palimpsa_surgery.surgery.records import read_surgery

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from palimpsa_surgery.surgery.checkpoints import Source

TEXT_BYTES_PER_TOKEN = 4
"""About what a token is long in prose; in code it is shorter."""


@dataclass(frozen=True)
class SourcePlan:
    """One source of a stage's data."""

    name: str
    share: float
    tokens: int
    """What the stage takes of it, held-out tokens and those that fill up sequences included; a single source may turn
    out to have fewer."""
    origin: str
    """The Hub set and its revision, the files, or the task."""
    hub: bool
    filtered: bool


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
    sources: tuple[SourcePlan, ...]
    data_bytes: int
    """Of its tokens on disk, at most."""
    optimizer_bytes: int
    """Of weights, gradients and Adam's averages in memory."""
    activations: Activations

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
        from rich.text import Text

        config = self.source.config
        trained = sum(count for treatment, (_, count) in self.groups.items() if treatment.rate)
        gradients = _gib(trained * FULL)
        gpu = (
            "Per GPU. FSDP divides weights and optimizer by the number of GPUs, but not the gradients of a batch that "
            f"is accumulated ({gradients}); DDP takes a second copy of them."
        )
        copies = f"bfloat16 copies of the weights take {_gib(self.parameters * HALF)} more. {_LEFT_OUT}"
        lines = [
            f"Checkpoint {self.source.name}",
            f"{self.parameters:,} parameters, {len(config.palimpsa_layers)} of {config.num_hidden_layers} layers "
            "are Palimpsa layers.",
            f"Memory: {gpu} On a GPU, {copies}",
            f"Disk: a checkpoint to go on from takes {_gib(trained * CHECKPOINT_BYTES)}, a finished stage "
            f"{_gib(self.parameters * FINAL_BYTES)}; one of either more while it is written.",
            *([self._downloads()] if any(source.hub for stage in self.stages for source in stage.sources) else []),
            *self.notes,
        ]
        tables = (self._stage_table(), self._source_table(), self._group_table(), self._memory_table())
        return Group(*tables, Text("\n".join(lines)))

    def _stage_table(self) -> "Table":
        table = _table("Stages", "stage", ("steps", "tokens", "length", "batch", "rate", "importance"), ("status",))
        for plan in self.stages:
            stage = plan.stage
            sizes = (plan.steps, plan.tokens, stage.sequence_length, stage.batch_tokens)
            rates = (stage.learning_rate, stage.importance_learning_rate)
            table.add_row(stage.name, *map(_count, sizes), *(f"{rate:g}" for rate in rates), plan.status)
        return table

    def _source_table(self) -> "Table":
        table = _table(
            "Sources (tokens include those held out)", "stage", (), ("source",), ("share", "tokens"), ("from",)
        )
        for plan in self.stages:
            for number, source in enumerate(plan.sources):
                name = plan.stage.name if number == 0 else ""
                table.add_row(name, source.name, f"{source.share:.1%}", _count(source.tokens), source.origin)
        return table

    def _group_table(self) -> "Table":
        table = _table("Parameter groups", "parameters", ("tensors", "count"), ("learning rate", "decay"))
        for treatment, (tensors, count) in self.groups.items():
            rate = {None: "not trained", "learning_rate": "rate"}.get(treatment.rate, "importance")
            table.add_row(treatment.group, f"{tensors:,}", f"{count:,}", rate, "yes" if treatment.decays else "no")
        return table

    def _memory_table(self) -> "Table":
        columns = ("micro-batch", "weights, optimizer", "activations", "if checkpointed", "data on disk")
        table = _table("Memory and disk (estimates)", "stage", columns)
        for plan in self.stages:
            stage = plan.stage
            kept, checkpointed = plan.activations.kept, plan.activations.checkpointed
            marks = ("", " *") if stage.gradient_checkpointing else (" *", "")
            table.add_row(
                stage.name,
                _count(stage.micro_batch_sequences * stage.sequence_length),
                _gib(plan.optimizer_bytes),
                *(_gib(size) + mark for size, mark in zip((kept, checkpointed), marks, strict=True)),
                _gib(plan.data_bytes),
            )
        table.caption = "* what the recipe asks for"
        return table

    def _downloads(self) -> str:
        read = [source for stage in self.stages for source in stage.sources if source.hub]
        size = sum(source.tokens for source in read) * TEXT_BYTES_PER_TOKEN
        more = ", and more where a filter or part drops rows" if any(source.filtered for source in read) else ""
        sets = ", ".join(dict.fromkeys(source.origin for source in read))
        return f"Download: about {_gib(size)} of text (uncompressed){more}, streamed from {sets}."


_LEFT_OUT = "Carried states, communication buffers and fragmentation are not counted: leave a tenth of the memory free."


def _table(title: str, first: str, *columns: tuple[str, ...]) -> "Table":
    """A table whose columns are right-aligned and left-aligned by turns, beginning with the right."""
    from rich import box
    from rich.table import Table

    table = Table(first, title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
    for number, names in enumerate(columns):
        for name in names:
            table.add_column(name, justify="left" if number % 2 else "right", overflow="fold")
    return table


def _count(number: int) -> str:
    if number >= 10**9:
        return f"{number / 1e9:.3f}B"
    return f"{number / 1e6:.1f}M" if number >= 10**8 else f"{number:,}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.{0 if size >= 100 << 30 else 1 if size >= 10 << 30 else 2}f} GiB"


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
    groups = _count_parameters(source)
    stages = tuple(
        _plan_stage(source, recipe, number, max_steps, statuses[number - 1] if statuses else "pending", groups)
        for number in range(1, len(recipe.stages) + 1)
    )
    notes = (*source.notes, *notes, *(_lora_note(source, stage) for stage in recipe.stages if stage.lora))
    notes += tuple(_overlap_notes(stages, recipe.evaluation.tokens))
    return Plan(recipe, source, output, stages, groups, notes)


def _plan_stage(
    source: "Source", recipe: Recipe, number: int, max_steps: int | None, status: str, groups: dict
) -> StagePlan:
    from palimpsa_surgery.stages.data import data_bytes, wanted_sequences

    stage = recipe.stages[number - 1]
    steps = min(stage.steps, max_steps or stage.steps)
    tokens, scored = steps * stage.batch_tokens, recipe.evaluation.tokens
    _, sequences = wanted_sequences(stage, tokens, scored)
    sources = []
    for _, fields in sources_of(stage.data):
        share = getattr(fields, "share", 1.0)
        needed = round(share * sequences * stage.sequence_length)
        hub, limit = getattr(fields, "hub", None) is not None, getattr(fields, "max_tokens", None)
        needed = min(needed, limit) if limit else needed
        filtered = bool(getattr(fields, "deciding", None))
        sources.append(SourcePlan(name_of(fields), share, needed, origin_of(fields), hub, filtered))
    if stage.lora:
        groups = _count_parameters(source, stage.lora)
    trained = sum(count for treatment, (_, count) in groups.items() if treatment.rate)
    frozen = sum(count for treatment, (_, count) in groups.items() if not treatment.rate)
    return StagePlan(
        folder=f"{number:02d}-{stage.name}",
        stage=stage,
        steps=steps,
        status=status,
        sources=tuple(sources),
        data_bytes=data_bytes(stage, tokens, scored, source.config.vocab_size),
        optimizer_bytes=trained * TRAINED_BYTES + frozen * FULL,
        activations=activations(source.config, stage),
    )


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


def _lora_note(source: "Source", stage: Stage) -> str:
    count = _count_parameters(source, stage.lora)
    trained = sum(parameters for treatment, (_, parameters) in count.items() if treatment.rate)
    adapters = count[ADAPTERS][1]
    return (
        f"Stage {stage.name} trains {trained:,} parameters: {adapters:,} in LoRA adapters of rank {stage.lora.rank} on "
        "the kept layers, and the Palimpsa layers; all others are frozen."
    )


def _overlap_notes(stages: tuple[StagePlan, ...], scored: int) -> Iterator[str]:
    """Say which stages may train on what they or others hold out: documents, unless both read them alike."""
    from palimpsa_surgery.stages.data.preparation import held_out_tokens

    sources = {plan.folder: [source for _, source in sources_of(plan.stage.data)] for plan in stages}
    for plan in stages:
        if sets := shared_sets(combinations(sources[plan.folder], 2)):
            yield (
                f"Stage {plan.stage.name} reads {sets} through several sources: what one holds out, another may train "
                "on, unless each has a part of its own."
            )
    for one, other in combinations(stages, 2):
        alike = {
            (plan.stage.data.model_dump_json(), held_out_tokens(plan.stage, plan.tokens, scored))
            # Sequences of another length are dealt out to the sources of a mixture in another way.
            + ((plan.stage.sequence_length,) if plan.stage.data.kind == "mixture" else ())
            for plan in (one, other)
        }
        if len(alike) > 1 and (sets := shared_sets(product(sources[one.folder], sources[other.folder]))):
            yield (
                f"Stages {one.stage.name} and {other.stage.name} read {sets} in different ways, and each holds out "
                "what it reads first: either may train on text that the other holds out, unless each has a part of "
                "its own."
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
