"""A run: a checkpoint, a recipe, and a folder that says how far they have got.

    run/
      recipe.yaml          the recipe with all defaults, which a resumed run must match
      run.json             what the run started from, and each stage's state and results
      01-pretrain/
        log.jsonl          loss, learning rate and speed of every step; loss.png
        layers.jsonl       windows and importance of the replaced layers by step; layers.png
        positions.png      held-out perplexity by position, before and after (the numbers are in run.json)
        samples.json       how the model goes on with held-out text, before and after, if the recipe asks
        final/             the finished stage as a checkpoint folder
        data/, checkpoint-N/   while the stage is not finished

Each stage starts from what the one before it wrote, so a resumed run and one that was never interrupted do the
same work on the same bits.
"""

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palimpsa_surgery import ranks
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.dashboards import check_dashboards, end_of_stage, one_line
from palimpsa_surgery.stages.launch import check_request, fsdp_requested, share
from palimpsa_surgery.stages.plan import Plan, make_plan
from palimpsa_surgery.stages.recipe import Recipe, load_recipe
from palimpsa_surgery.stages.run_folder import (
    check_unchanged,
    check_weights,
    discard_work,
    existing_run,
    holding,
    prepare_data,
    start_run,
    write_run,
)
from palimpsa_surgery.stages.snapshots import Snapshots
from palimpsa_surgery.surgery.outputs import fresh_directory, writing
from palimpsa_surgery.surgery.progress import progress_bar

if TYPE_CHECKING:
    from rich.table import Table
    from transformers import PreTrainedTokenizerBase

SAMPLES_FILE = "samples.json"
LEFT_OUT = {"too_long": "examples too long for a sequence", "unanswered": "rows without a prompt or an answer"}
"""What a stage's record calls them, and what they are."""
SURGERY_FILES = ("surgery.json", "analysis.json", "windows.png")
"""What `replace` put beside the weights, carried along to every stage's checkpoint."""


@dataclass(frozen=True)
class Run:
    """What `train` did. `print` it through Rich."""

    plan: Plan
    record: dict[str, Any]
    """The content of `run.json`; empty after a dry run."""
    did: tuple[str, ...]
    """Names of the stages that this call finished."""

    @property
    def final(self) -> Path | None:
        """Folder of the last stage's checkpoint, once all stages are done."""
        return self.plan.output / self.record["final"] if self.record.get("final") else None

    @property
    def prepared(self) -> dict[Path, int]:
        """Folders of data that are ready to train on, and the tokens in each."""
        ready = [entry for entry in self.record.get("stages", ()) if entry["data"] and entry["status"] != "done"]
        return {self.plan.output / entry["folder"] / "data": entry["data"]["tokens"] for entry in ready}

    @property
    def already_finished(self) -> bool:
        """Whether there was nothing left to do."""
        return self.final is not None and not self.did

    def __rich__(self) -> "Table":
        """Draw the held-out results of all finished stages in 80 columns."""
        from rich.table import Table

        left_out = []
        table = Table("stage", title="Held-out loss (nats per token) and perplexity", title_justify="left")
        table.caption_justify = "left"
        for column in ("steps", "loss before", "after", "perplexity before", "after", "seconds"):
            table.add_column(column, justify="right")
        for stage in self.record.get("stages", ()):
            if stage["status"] == "done":
                before, after = stage["before"], stage["after"]
                table.add_row(
                    stage["name"],
                    f"{stage['steps']:,}",
                    f"{before['loss']:.4f}",
                    f"{after['loss']:.4f}",
                    f"{before['perplexity']:.2f}",
                    f"{after['perplexity']:.2f}",
                    f"{stage['seconds']:.0f}",
                )
                left_out += [
                    f"stage {stage['name']}: {source[what]:,} {words} of {source['name']} were left out"
                    for source in stage["data"]["sources"]
                    for what, words in LEFT_OUT.items()
                    if what in source
                ]
        table.caption = "\n".join(left_out) or None
        return table


def train(
    checkpoint: str | os.PathLike,
    recipe: str | Path | Recipe,
    output: str | os.PathLike,
    *,
    stage: str | None = None,
    max_steps: int | None = None,
    seed: int | None = None,
    tokenizer: str | Path | None = None,
    dry_run: bool = False,
    prepare_only: bool = False,
) -> Run:
    """Train a checkpoint through a recipe's stages; called again, go on where it stopped.

    Every stage trains all weights, or with `lora` adapters of the kept layers beside the new ones', in float32
    (autocast to bfloat16 on CUDA) with AdamW, and scores the same held-out sequences before and after. On the CPU a
    resumed run ends with the same bits as one that was never interrupted.

    Called by every process of a launch by torchrun or `accelerate launch`, it divides each batch over them; rank 0
    prepares the data and writes, and `output` must be a folder that all of them see.

    Args:
        checkpoint: a folder or Hub id: what `replace` wrote, or any Mamba2 that the package reads.
        recipe: the name of a shipped recipe, a YAML file, or a Recipe.
        output: the run's folder: new, empty, or that of the same run.
        stage: run only the stage of this name; the one before it must be done.
        max_steps: run at most this many steps of each stage; learning rates follow the shortened stage.
        seed: use this seed instead of the recipe's.
        tokenizer: folder, `tokenizer.json` or Hub id, where the checkpoint does not bring its own.
        dry_run: only work out the plan; load no weights and write nothing.
        prepare_only: only put the data on disk, on a machine that needs neither a GPU nor the weights.

    Raises:
        UserError: the recipe or its data are wrong, the checkpoint does not suit it, `output` holds something
            else or a run that differs from this one, the loss stops being finite, or the launcher asked for what
            cannot be done. Every rank raises it, or is ended by its launcher.
    """
    check_request()
    if max_steps is not None and max_steps < 1:
        raise UserError(f"--max-steps must be at least 1, got {max_steps}")
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    if seed is not None:
        recipe = _with_seed(recipe, seed)
    names = [entry.name for entry in recipe.stages]
    if stage is not None and stage not in names:
        raise UserError(f"recipe {recipe.name} has no stage {stage!r}; its stages are {', '.join(names)}")
    for entry in recipe.stages:
        share(entry, ranks.world_size())
        if entry.lora and fsdp_requested():
            raise UserError(f"stage {entry.name}: lora and FSDP do not go together: use DDP")
    check_dashboards(recipe.report_to)
    output = Path(output)
    options = {"max_steps": max_steps, "tokenizer": None if tokenizer is None else str(tokenizer)}
    record = ranks.agreed(lambda: existing_run(output, recipe, options))

    from palimpsa_surgery.stages.data import check_data
    from palimpsa_surgery.surgery.checkpoints import load_tokenizer, open_config, open_source

    source = (open_config if dry_run or prepare_only else open_source)(checkpoint)
    statuses = [entry["status"] for entry in record["stages"]] if record else None
    plan = make_plan(source, recipe, output, max_steps=max_steps, statuses=statuses)
    wanted = [index for index, name in enumerate(names) if stage in (None, name)]
    if wanted[0] > 0 and (statuses or ["pending"] * len(names))[wanted[0] - 1] != "done":
        raise UserError(f"stage {names[wanted[0]]} needs stage {names[wanted[0] - 1]}, which is not done")
    text_tokenizer = None if dry_run else load_tokenizer(source, tokenizer)
    if record is None:
        ranks.first(lambda: check_data(recipe, text_tokenizer))
    if dry_run:
        return Run(plan, {}, ())

    record = record or ranks.agreed(lambda: start_run(plan, options))
    did = []
    with holding(output):
        ranks.first(lambda: check_unchanged(output, record))
        record = ranks.agreed(lambda: prepare_data(plan, record, wanted, text_tokenizer))
        if prepare_only:
            return Run(plan, record, ())
        record = ranks.agreed(lambda: check_weights(plan, record))
        for index in wanted:
            if record["stages"][index]["status"] != "done":
                run_stage(plan, record, index, text_tokenizer)
                did.append(names[index])
            folder = output / plan.stages[index].folder
            ranks.first(lambda folder=folder: discard_work(folder))
    return Run(plan, record, tuple(did))


def run_stage(plan: Plan, record: dict, index: int, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Train one stage from its last checkpoint or its start, and write its final checkpoint."""
    import torch

    from palimpsa_surgery.stages.data import Sequences, training_order
    from palimpsa_surgery.stages.held_out import continuations, evaluate
    from palimpsa_surgery.stages.lora import add_adapters, merge_adapters
    from palimpsa_surgery.stages.reporting import LayerReport
    from palimpsa_surgery.stages.run_plots import plot_stage
    from palimpsa_surgery.stages.sharding import whole_parameters
    from palimpsa_surgery.stages.trainer import StageTrainer, quiet_transformers
    from palimpsa_surgery.surgery.checkpoints import load_model, save_checkpoint

    part, entry = plan.stages[index], record["stages"][index]
    stage, folder = part.stage, plan.output / part.folder
    start = plan.output / record["stages"][index - 1]["final"] if index else plan.source
    if not (folder / "data").is_dir():
        raise UserError(f"run {plan.output} is damaged: {folder / 'data'} is missing (choose another --output)")
    snapshots = Snapshots(folder, plan.recipe.keep_checkpoints)
    began = time.perf_counter()
    model = load_model(start)
    use_cache = model.config.use_cache  # the Trainer turns it off
    adapters = add_adapters(model, stage.lora, seed=plan.recipe.seed) if stage.lora else None
    sequences, batch = Sequences(folder / "data", stage), share(stage, ranks.world_size())
    order = training_order(
        sequences,
        stage,
        steps=part.steps,
        seed=plan.recipe.seed,
        stage_index=index,
        rows=batch.processes * batch.micro_batch,
    )
    wanted = plan.recipe.evaluation
    scoring = {"max_tokens": wanted.tokens, "batch_size": stage.micro_batch_sequences}

    def sample(when: str) -> None:
        if wanted.samples is not None:
            texts = continuations(model, tokenizer, sequences, wanted.samples)
            ranks.first(lambda: _add_samples(folder / SAMPLES_FILE, when, texts))

    with quiet_transformers(), progress_bar(f"stage {stage.name}", part.steps) as advance:
        trainer = StageTrainer(
            model,
            stage,
            order,
            snapshots,
            steps=part.steps,
            seed=(plan.recipe.seed + index) % 2**32,  # no stage repeats the noise of another
            checkpoint_steps=plan.recipe.checkpoint_steps,
            advance=advance,
            report_to=plan.recipe.report_to,
            run_name=f"{plan.output.name}-{part.folder}",
        )
        if wanted.layers_every and model.config.palimpsa_layers:
            shown = folder if ranks.is_first() else None
            trainer.add_callback(LayerReport(trainer, sequences, shown, wanted.layers_every))
        if entry["status"] == "pending":
            sample("before")
            entry |= {"status": "running", "before": evaluate(model, sequences, **scoring)}
            write_run(plan.output, record)
        else:
            ranks.first(lambda: plot_stage(folder, entry))  # how far the interrupted run had got
        with one_line(plan.recipe.report_to):
            trainer.train(resume_from_checkpoint=ranks.agreed(lambda: _resume_point(snapshots)))
        if adapters is not None:
            merge_adapters(adapters)
        after = evaluate(model, sequences, **scoring)
        sample("after")
        model.config.use_cache = use_cache
        parameters = whole_parameters(model)

        def save() -> None:
            with fresh_directory(folder / "final", overwrite=True) as work:
                # In float32, whatever the checkpoint's type: the next stage goes on from these very bits.
                save_checkpoint(model, work, tokenizer=tokenizer, dtype=torch.float32, parameters=parameters)
                for name in SURGERY_FILES:
                    if (plan.source.path / name).is_file():
                        shutil.copyfile(plan.source.path / name, work / name)

        ranks.first(save)
    entry |= {"status": "done", "after": after, "skipped_steps": trainer.skipped_steps}
    entry |= {"seconds": round(time.perf_counter() - began, 1), "final": f"{part.folder}/final"}
    record["final"] = record["stages"][-1]["final"]
    write_run(plan.output, record)
    ranks.first(lambda: plot_stage(folder, entry))
    end_of_stage(plan.recipe.report_to)


def _add_samples(path: Path, when: str, texts: list[dict]) -> None:
    """Put the samples of one time into the file, beside those of the other."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() and when == "after" else {}
    with writing(path):
        path.write_text(json.dumps(content | {when: texts}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _resume_point(snapshots: Snapshots) -> str | None:
    """The checkpoint to go on from.

    Raises:
        UserError: it was written in the other layout.
    """
    if (last := snapshots.newest()) is None:
        return None
    path, manifest = last
    if manifest.sharded != fsdp_requested():
        layouts = {True: "under FSDP", False: "without FSDP"}
        raise UserError(
            f"{path} was written {layouts[manifest.sharded]} and cannot be read {layouts[not manifest.sharded]}: "
            "launch the run as before"
        )
    return str(path)


def _with_seed(recipe: Recipe, seed: int) -> Recipe:
    if not 0 <= seed < 2**32:
        raise UserError(f"--seed must lie within 0 and 4294967295, got {seed}")
    return recipe.model_copy(update={"seed": seed})
