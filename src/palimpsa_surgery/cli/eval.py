"""The verb `eval`."""

from pathlib import Path
from typing import Annotated

import typer


def eval(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or Hub id of a Mamba2, native or Hugging Face, or a hybrid.")
    ],
    preset: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE", help="commonsense, ruler, longbench2, or a YAML file or folder of lm-eval tasks."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder to write results.json and results.md to.")],
    tasks: Annotated[str | None, typer.Option(metavar="NAME,...", help="Run only these of the preset's tasks.")] = None,
    limit: Annotated[
        int | None, typer.Option(help="Score so many documents of each task at most (ruler: of each length).")
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(metavar="TOKENS,...", help="Lengths of ruler's documents. Default: 4096,8192,16384,32768."),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Cut what is longer, from the left. Default: what the model states or the tasks need.",
        ),
    ] = None,
    allow_longer: Annotated[
        bool, typer.Option("--allow-longer", help="Let lengths exceed what the model states.")
    ] = False,
    batch_size: Annotated[
        str, typer.Option(metavar="N|auto", help="Requests computed at once; auto: as many as fit a GPU.")
    ] = "auto",
    tokenizer: Annotated[
        str | None, typer.Option(help="Folder, tokenizer.json or Hub id, if MODEL brings no tokenizer.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:1. Default: a GPU if there is one.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="float32, bfloat16 (with the fastest kernels) or float16. "
            "Default: the checkpoint's on a GPU, float32 elsewhere.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder if it is not empty.")] = False,
) -> None:
    """Score a model on tasks of lm-eval: the paper's, or your own.

    Needs pip install 'palimpsa-surgery[eval]'. On several GPUs: accelerate launch
    -m palimpsa_surgery eval ...

    \b
    Examples:
      palimpsa-surgery eval hybrid --preset commonsense --output scores
      palimpsa-surgery eval hybrid --preset ruler --lengths 4096,8192 --output r
    """
    from palimpsa_surgery.cli.console import console, print_path
    from palimpsa_surgery.stages import evaluation as library
    from palimpsa_surgery.surgery.results_table import results_report

    done = library.evaluate(
        model,
        preset,
        output,
        tokenizer=tokenizer,
        tasks=None if tasks is None else [name.strip() for name in tasks.split(",") if name.strip()],
        limit=limit,
        lengths=None if lengths is None else library.parse_lengths(lengths),
        max_length=max_length,
        allow_longer=allow_longer,
        batch_size=library.parse_batch_size(batch_size),
        device=device,
        dtype=dtype,
        overwrite=overwrite,
    )
    if done is None:  # the first of several processes reports
        return
    console.print(results_report(done))
    print_path("Wrote", output)
