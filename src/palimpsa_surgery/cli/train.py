"""The verb `train`."""

from pathlib import Path
from typing import Annotated

import typer


def train(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Folder or Hub id: what `replace` wrote, or a Mamba2.")
    ],
    recipe: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="A recipe that ships, such as demo, or a YAML file.")
    ],
    output: Annotated[Path, typer.Option(help="Folder of the run: new, or that of the same run to go on with.")],
    stage: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run only this stage; the one before it must be done.")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help="Run at most this many steps of each stage.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed to use instead of the recipe's.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, tokenizer.json or Hub id, if CHECKPOINT brings no tokenizer.")
    ] = None,
    prepare_only: Annotated[bool, typer.Option("--prepare-only", help="Put the data on disk, and stop there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; load no weights, write nothing.")] = False,
) -> None:
    """Train a checkpoint through the stages of a recipe; run again, it goes on where it stopped.

    \b
    Examples:
      palimpsa-surgery train hybrid --recipe demo --output runs/demo --dry-run
      palimpsa-surgery train hybrid --recipe demo --output runs/demo
    """
    from palimpsa_surgery.cli.console import console, print_path
    from palimpsa_surgery.stages import pipeline

    options = {"stage": stage, "max_steps": max_steps, "seed": seed, "tokenizer": tokenizer}
    console.print(pipeline.train(checkpoint, recipe, output, **options, dry_run=True).plan)
    if dry_run:
        console.print("Dry run: nothing was written.")
        return
    run = pipeline.train(checkpoint, recipe, output, **options, prepare_only=prepare_only)
    if prepare_only and not run.already_finished:
        for folder, tokens in run.prepared.items():
            print_path(f"Data are ready: {tokens:,} tokens in", folder)
        return
    console.print(run)
    if run.already_finished:
        console.print("This run was finished already.")
    print_path("Wrote", run.final or output)
