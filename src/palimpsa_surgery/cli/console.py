"""Where verbs print.

Import this module inside a verb's function, not at the top of its file: Rich takes a tenth of a second to
import, which `--help` should not wait for.
"""

import os
from pathlib import Path

from rich.console import Console

from palimpsa_surgery import ranks

console = Console(highlight=False, quiet=not ranks.is_first())
"""Standard output: as wide as the terminal, 80 columns elsewhere; of several processes only the first prints."""


def print_path(label: str, path: str | os.PathLike) -> None:
    """Print `label` and `path` on one line that is never wrapped, so that the path can be copied."""
    console.print(f"{label} {os.fspath(Path(path))}", soft_wrap=True, markup=False)
