"""The verb `compare`."""

from pathlib import Path
from typing import Annotated

import typer


def compare(
    items: Annotated[
        list[str],
        typer.Argument(metavar="ITEM...", help="Models, or folders that `eval` or `diagnose` wrote; two at least."),
    ],
    output: Annotated[Path, typer.Option(help="Folder to write comparison.json, .md and .png to.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Text to measure models on; give it again for more files."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, tokenizer.json or Hub id, if a model brings no tokenizer.")
    ] = None,
    max_length: Annotated[int, typer.Option(help="Tokens per sequence of text, and of the prompt timed.")] = 2048,
    sequences: Annotated[int, typer.Option(help="Sequences of text, at most.")] = 8,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:1. Default: a GPU if there is one.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="float32, bfloat16 (with the fastest kernels) or float16. "
            "Default: one that holds the checkpoints' on a GPU, float32 elsewhere.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is not empty.")] = False,
) -> None:
    """Bring models side by side: scores, perplexity by position, speed, state.

    Results of eval and diagnose are used as they are, models are measured here.

    \b
    Examples:
      palimpsa-surgery compare mamba2 hybrid --data text.txt --output comparison
      palimpsa-surgery compare scores-a scores-b --output comparison
    """
    from palimpsa_surgery.cli.console import console, print_path
    from palimpsa_surgery.surgery import comparison as library
    from palimpsa_surgery.surgery.comparison_plots import comparison_report

    done = library.compare(
        items,
        output,
        data=data,
        tokenizer=tokenizer,
        max_length=max_length,
        sequences=sequences,
        device=device,
        dtype=dtype,
        overwrite=overwrite,
    )
    console.print(comparison_report(done))
    print_path("Wrote", output)
