"""The files that ship inside the package: a tiny native checkpoint and a public-domain text."""

from importlib.resources import files
from pathlib import Path

from palimpsa_surgery.errors import UserError


def asset_path(name: str) -> Path:
    """Path of a shipped file or folder: `tiny-mamba2` (a native checkpoint) or `kjv.txt` (prose).

    Raises:
        UserError: there is no such asset, for example because the package was installed without its data.
    """
    path = Path(str(files("palimpsa_surgery") / "assets" / name))
    if not path.exists():
        raise UserError(f"{name!r} is not among the files shipped with palimpsa-surgery ({path} is missing)")
    return path
