"""Output folders that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from palimpsa_surgery.errors import UserError


def check_output_directory(
    path: str | os.PathLike, *, overwrite: bool = False, inputs: Iterable[str | os.PathLike | None] = ()
) -> Path:
    """Return `path` as a Path if a new folder may be written there.

    Meant to be called before any expensive work.

    Args:
        path: the folder to come.
        overwrite: whether a folder that is not empty may be replaced.
        inputs: what will be read; ids of a Hub and None are passed over.

    Raises:
        UserError: `path` is a file, or a folder that is not empty and `overwrite` is False, or its
            parent cannot be written to, or replacing it would delete an input or the current folder.
    """
    path = Path(path)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError(f"output {path} exists and is not a folder")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise UserError(f"output folder {path} is not empty (use --overwrite to replace it)")
    if path.exists():
        for place in (Path(item).resolve() for item in inputs if item is not None and Path(item).exists()):
            if place.is_relative_to(path.resolve()):
                raise UserError(f"output {path} is or holds the input {place.name}: choose another --output")
        if Path.cwd().is_relative_to(path.resolve()):
            raise UserError(f"output {path} is or holds the current folder, which cannot be replaced")
    ancestor = path.absolute().parent  # where the folder is built and then renamed
    while not ancestor.exists():
        ancestor = ancestor.parent
    if not ancestor.is_dir() or not os.access(ancestor, os.W_OK | os.X_OK):
        raise UserError(f"output folder {path} cannot be created: {ancestor} is not a writable folder")
    return path


@contextmanager
def fresh_directory(path: str | os.PathLike, *, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling of `path` that becomes `path` when the block ends without an exception.

    A failure, an interrupt included, leaves nothing behind and an existing folder as it was.

    Raises:
        UserError: as `check_output_directory` does.
    """
    path = check_output_directory(path, overwrite=overwrite)
    path.absolute().parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.absolute().parent))
    try:
        work.chmod(0o755)  # mkdtemp makes folders private, which is wrong for a result to share
        yield work
        if path.exists():
            old = work.with_suffix(".old")
            path.rename(old)
            try:
                work.rename(path)
            except BaseException:
                old.rename(path)
                raise
            shutil.rmtree(old)
        else:
            work.rename(path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
