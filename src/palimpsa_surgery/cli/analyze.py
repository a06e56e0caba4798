"""The verb `analyze`."""

from pathlib import Path
from typing import Annotated

import typer


def analyze(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or Hub id of a Mamba2, native or Hugging Face, or a hybrid.")
    ],
    data: Annotated[
        list[Path],
        typer.Option(metavar="FILE...", help="Text: .txt, .jsonl (field text) or .parquet (column text) files."),
    ],
    output: Annotated[Path, typer.Option(help="Folder to write analysis.json and windows.png to.")],
    more_data: Annotated[
        list[Path] | None, typer.Argument(metavar="FILE", help="More files for --data, as in --data *.txt.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, tokenizer.json or Hub id, if MODEL brings no tokenizer.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Stop after so many tokens of text.")] = 65536,
    sequence_length: Annotated[int, typer.Option(help="Tokens per sequence.")] = 2048,
    batch_size: Annotated[int, typer.Option(help="Sequences computed at once.")] = 1,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:1. Default: a GPU if there is one.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is not empty.")] = False,
) -> None:
    """Measure how long each layer of a Mamba2 remembers.

    \b
    Examples:
      palimpsa-surgery analyze mamba2 --data text.txt --output windows
      palimpsa-surgery analyze hybrid --data a.jsonl b.parquet --output windows
    """
    from palimpsa_surgery.cli.console import console, print_path
    from palimpsa_surgery.surgery import analysis as library
    from palimpsa_surgery.surgery.plots import selection_note, window_table
    from palimpsa_surgery.surgery.selection import DEFAULT_TOP_K

    done = library.analyze(
        model,
        [*data, *(more_data or [])],  # `--data *.jsonl` reaches us as one option and further arguments
        output,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        sequence_length=sequence_length,
        batch_size=batch_size,
        device=device,
        overwrite=overwrite,
    )
    console.print(window_table(done, done.top_layers(DEFAULT_TOP_K)))
    console.print(selection_note(done, DEFAULT_TOP_K))
    print_path("Wrote", output)
