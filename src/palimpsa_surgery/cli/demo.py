"""The verb `demo`."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer


def demo(
    output: Annotated[Path, typer.Option(help="Folder for the results.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the results of an earlier demo in that folder.")
    ] = False,
) -> None:
    """Run all verbs on the tiny checkpoint and text that ship with the package, offline, in minutes.

    \b
    Examples:
      palimpsa-surgery demo --output demo-output
      palimpsa-surgery demo --output demo-output --overwrite
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import time

    from rich.markup import escape
    from rich.panel import Panel
    from transformers.utils import logging

    from palimpsa_surgery.cli.console import console, print_path
    from palimpsa_surgery.stages import demo as library
    from palimpsa_surgery.surgery.plots import replacement_report, selection_note, window_table

    logging.disable_progress_bar()  # the demo's own bars are enough
    start = time.perf_counter()
    number = 0

    def begin(title: str, command: str | None) -> None:
        nonlocal number
        number += 1
        console.print(f"\n[bold cyan]{number}. {escape(title)}[/]")
        if command:
            console.print(f"[dim]{escape(command)}[/]", soft_wrap=True)

    def end(result: Any) -> None:
        match result:
            case library.Analysis():
                console.print(window_table(result, result.top_layers(library.TOP_K)))
                console.print(selection_note(result, library.TOP_K))
            case library.Replacement():
                console.print(replacement_report(result))
            case library.Export():
                console.print(f"Stated length: {result.max_length:,} tokens, {result.max_length_reason}.")
            case library.Reloaded():
                console.print(f"Largest difference of its logits from those before the export: {result.difference:g}")
                console.print(Panel(escape(result.text), title="prompt and sample"))
            case _:
                console.print(result)

    library.demo(output, overwrite=overwrite, begin=begin, end=end)
    console.print(f"\nDone in {time.perf_counter() - start:.0f} seconds. What was made:")
    for what, name in (
        ("figure of the windows   ", "analysis/windows.png"),
        ("hybrid before training  ", "hybrid"),
        ("recipe, logs, stages    ", "run"),
        ("model for transformers  ", "exported"),
        ("its model card          ", "exported/README.md"),
    ):
        print_path(f"  {what}", output / name)
