"""The verb `recipes`."""

from typing import Annotated, Literal

import typer


def recipes(
    action: Annotated[
        Literal["show"] | None, typer.Argument(metavar="show", help="Print one as it ships, to copy and edit.")
    ] = None,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which one.")] = None,
) -> None:
    """List the recipes that ship with the package, or print one.

    \b
    Examples:
      palimpsa-surgery recipes
      palimpsa-surgery recipes show mamba2-2.7b > mine.yaml
    """
    from palimpsa_surgery.cli.console import console
    from palimpsa_surgery.stages import catalog as library

    catalog = library.recipes()
    if action is None:
        console.print(catalog)
    else:
        typer.echo(catalog.text(name), nl=False)
