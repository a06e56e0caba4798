"""The verb `diagnose`."""

from pathlib import Path
from typing import Annotated

import typer


def diagnose(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or Hub id of a Mamba2, native or Hugging Face, or a hybrid.")
    ],
    data: Annotated[
        list[Path],
        typer.Option(metavar="FILE...", help="Text: .txt, .jsonl (field text) or .parquet (column text) files."),
    ],
    output: Annotated[Path, typer.Option(help="Folder to write diagnosis.json and the figures to.")],
    more_data: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="More files for --data, as in --data *.txt.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, tokenizer.json or Hub id, if MODEL brings no tokenizer.")
    ] = None,
    max_length: Annotated[int, typer.Option(help="Tokens per sequence, any number.")] = 8192,
    sequences: Annotated[int, typer.Option(help="Sequences of text, at most.")] = 8,
    piece_length: Annotated[int, typer.Option(help="Tokens computed at once; memory and speed only.")] = 2048,
    remembrance_length: Annotated[
        int | None,
        typer.Option(help="Tokens before the prediction of the remembrance. Default: --max-length, at most 8192."),
    ] = None,
    remembrance_points: Annotated[int, typer.Option(help="Suffixes compared for the remembrance, at most.")] = 24,
    distance: Annotated[
        str, typer.Option(metavar="NAME", help="Between predictions: tv (total variation), js or cosine.")
    ] = "tv",
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:1. Default: a GPU if there is one.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is not empty.")] = False,
) -> None:
    """Measure what a model does with long text: perplexity by position, how far
    back its predictions depend on, and what its states go through.

    \b
    Examples:
      palimpsa-surgery diagnose hybrid --data text.txt --output diagnosis
      palimpsa-surgery diagnose mamba2 --data a.txt --max-length 65536 --output d
    """
    from palimpsa_surgery.cli.console import console, print_path
    from palimpsa_surgery.surgery import diagnosis as library
    from palimpsa_surgery.surgery.diagnosis_plots import diagnosis_report

    done = library.diagnose(
        model,
        [*data, *(more_data or [])],  # `--data *.jsonl` reaches us as one option and further arguments
        output,
        tokenizer=tokenizer,
        max_length=max_length,
        sequences=sequences,
        piece_length=piece_length,
        remembrance_length=remembrance_length,
        remembrance_points=remembrance_points,
        distance=distance,
        device=device,
        overwrite=overwrite,
    )
    console.print(diagnosis_report(done))
    print_path("Wrote", output)
