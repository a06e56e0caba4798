"""The verb `train`."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    checkpoint: Annotated[str, typer.Argument(help="Folder or Hub id: what `replace` wrote, or a Mamba2.")],
    recipe: Annotated[str, typer.Option(help="Name of a shipped recipe, or a YAML file.")],
    output: Annotated[Path, typer.Option(help="Folder of the run: new, or that of the same run to resume.")],
    stage: Annotated[str | None, typer.Option(help="Run only this stage; the one before must be done.")] = None,
    max_steps: Annotated[int | None, typer.Option(help="Run at most this many steps of each stage.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed to use instead of the recipe's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; load and write nothing.")] = False,
) -> None:
    """Train a checkpoint through the stages of a recipe; run again, it goes on where it stopped.

    \b
    Examples:
      palimpsa-surgery train hybrid --recipe demo --output runs/demo --dry-run
      palimpsa-surgery train hybrid --recipe demo --output runs/demo
    """
    from palimpsa_surgery.cli.console import console, print_path
    from palimpsa_surgery.stages import pipeline

    plan = pipeline.train(checkpoint, recipe, output, stage=stage, max_steps=max_steps, seed=seed, dry_run=True).plan
    console.print(plan)
    if dry_run:
        return
    run = pipeline.train(checkpoint, recipe, output, stage=stage, max_steps=max_steps, seed=seed)
    console.print(run)
    if run.already_finished:
        console.print("This run is already finished.")
    print_path("Wrote", run.final or output)
