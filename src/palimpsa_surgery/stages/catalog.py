"""The recipes that ship with the package."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.recipe import hint, shipped_recipes
from palimpsa_surgery.stages.recipe_yaml import read_yaml

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Catalog:
    """Shipped recipes by name. `print` it through Rich."""

    files: dict[str, Path]

    def text(self, name: str | None) -> str:
        """The YAML of a recipe, comments included.

        Raises:
            UserError: there is none of that name.
        """
        if name not in self.files:
            wanted = "name one of" if name is None else f"no recipe {name!r} ships; there are"
            raise UserError(f"{wanted}: {', '.join(self.files)}{hint(name or '')}")
        return self.files[name].read_text(encoding="utf-8")

    def __rich__(self) -> "Table":
        """Draw names and descriptions in 80 columns."""
        from rich.table import Table

        table = Table("recipe", "what it does", title="Recipes", title_justify="left", show_lines=True)
        for name, path in self.files.items():
            table.add_row(name, read_yaml(path)["description"])
        return table


def recipes() -> Catalog:
    """Return the recipes that ship with the package, to list or to read."""
    return Catalog(shipped_recipes())
