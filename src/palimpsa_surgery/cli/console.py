"""Where verbs print.

Import this module inside a verb's function, not at the top of its file: Rich takes a tenth of a second to
import, which `--help` should not wait for.
"""

import os
from pathlib import Path

from rich.console import Console

console = Console(highlight=False)
"""Standard output: as wide as the terminal, 80 columns elsewhere."""


def print_path(label: str, path: str | os.PathLike) -> None:
    """Print `label` and `path` on one line that is never wrapped, so that the path can be copied."""
    console.print(f"{label} {os.fspath(Path(path))}", soft_wrap=True, markup=False)
