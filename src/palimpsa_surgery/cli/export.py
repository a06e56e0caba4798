"""The verb `export`."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A finished run of `train`, or a folder that `replace` wrote.")
    ],
    output: Annotated[Path, typer.Option(help="Folder to write.")],
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Longest input to state in the configs, which evaluation harnesses cut to. "
            "Default: the run's longest stage, else what the source states, else 2048.",
        ),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, tokenizer.json or Hub id, if SOURCE brings no tokenizer.")
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Results of `eval` for the model card; give it again for more."),
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="ID", help="Also upload to this Hugging Face repository.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create that repository as a private one.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is not empty.")] = False,
) -> None:
    """Write a folder that AutoModelForCausalLM loads anywhere, with its code and a model card.

    \b
    Examples:
      palimpsa-surgery export runs/demo --output exported
      palimpsa-surgery export hybrid --output exported --push-to-hub me/hybrid
    """
    from palimpsa_surgery.cli.console import console, print_path
    from palimpsa_surgery.surgery import export as library

    done = library.export(
        source,
        output,
        max_length=max_length,
        tokenizer=tokenizer,
        results=results or (),
        push_to_hub=push_to_hub,
        private=private,
        overwrite=overwrite,
    )
    console.print(f"Stated length: {done.max_length:,} tokens, {done.max_length_reason}.")
    print_path("Wrote", done.path)
    if done.url:
        print_path("Uploaded to", done.url)
