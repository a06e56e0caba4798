"""The verb `replace`."""

from pathlib import Path
from typing import Annotated

import typer


def replace(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or Hub id of a Mamba2, native or Hugging Face, or a hybrid.")
    ],
    output: Annotated[Path | None, typer.Option(help="Folder to write; needed unless --dry-run.")] = None,
    analysis: Annotated[Path | None, typer.Option(help="Folder that `analyze` wrote for this model.")] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Replace so many layers, the longest windows first; 0 only converts.")
    ] = None,
    layers: Annotated[str | None, typer.Option(metavar="I,J,...", help="Replace these layers.")] = None,
    min_window: Annotated[
        float | None, typer.Option(metavar="TOKENS", help="Replace every layer whose window is at least this.")
    ] = None,
    init: Annotated[
        str,
        typer.Option(
            metavar="calibrated|paper",
            help="Importance to start from: a small share of the prior, or the paper's range.",
        ),
    ] = "calibrated",
    importance_target: Annotated[
        float, typer.Option(metavar="RATIO", help="That share: calibrated importance stays below it.")
    ] = 0.1,
    max_drift: Annotated[
        float | None, typer.Option(metavar="RATIO", help="Refuse to write if the logits change by more, relatively.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE...", help="Text to calibrate and measure on, instead of the analysis's sample."),
    ] = None,
    more_data: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="More files for --data, as in --data *.txt.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, tokenizer.json or Hub id, if MODEL brings no tokenizer.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the new parameters.")] = 0,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:1. Default: a GPU if there is one.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do and print everything, but write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is not empty.")] = False,
) -> None:
    """Replace layers of a Mamba2 by Palimpsa layers that start out computing the same.

    Choose the layers by one of --top-k (default: 8), --layers and --min-window.

    \b
    Examples:
      palimpsa-surgery replace mamba2 --analysis windows --top-k 8 --output hybrid
      palimpsa-surgery replace mamba2 --top-k 0 --output control
    """
    from palimpsa_surgery.cli.console import console, print_path
    from palimpsa_surgery.surgery import replacement as library
    from palimpsa_surgery.surgery.plots import replacement_report
    from palimpsa_surgery.surgery.selection import parse_layers

    files = [*(data or []), *(more_data or [])]
    done = library.replace(
        model,
        output,
        analysis=analysis,
        top_k=top_k,
        layers=None if layers is None else parse_layers(layers),
        min_window=min_window,
        init=init,
        importance_target=importance_target,
        max_drift=max_drift,
        data=files or None,
        tokenizer=tokenizer,
        seed=seed,
        device=device,
        dry_run=dry_run,
        overwrite=overwrite,
    )
    console.print(replacement_report(done))
    if done.output is None:
        console.print("Dry run: nothing was written.")
    else:
        print_path("Wrote", done.output)
