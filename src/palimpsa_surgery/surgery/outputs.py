"""Output folders and files that appear whole or not at all, also where the machine loses power."""

import contextlib
import errno
import fcntl
import glob
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from palimpsa_surgery.errors import Unavailable, UserError


def check_output_directory(
    path: str | os.PathLike, *, overwrite: bool = False, inputs: Iterable[str | os.PathLike | None] = ()
) -> Path:
    """Return `path` as a Path if a new folder may be written there.

    Meant to be called before any expensive work. What a killed process left of a replacement of this folder is
    cleared up first: a folder that it had moved away and not yet replaced comes back.

    Args:
        path: the folder to come.
        overwrite: whether a folder that is not empty may be replaced.
        inputs: what will be read; ids of a Hub and None are passed over.

    Raises:
        UserError: `path` is a file, or a folder that is not empty and `overwrite` is False, or its
            parent cannot be written to, or replacing it would delete an input or the current folder.
    """
    path = Path(path)
    _clear_up(path)
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError(f"output {path} exists and is not a folder")
    if os.path.ismount(path):
        raise UserError(f"output {path} is a mount point, which cannot be replaced: choose a folder inside it")
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
    place = path.absolute().parent
    place.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=place))
    lock = os.open(work, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # file systems without locks cannot tell what was abandoned
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield work
        _share(work)
        sync_all(work)
        if overwrite and path.exists():
            old = work.with_suffix(".old")
            path.rename(old)
            try:
                work.rename(path)
            except BaseException:
                old.rename(path)
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            work.rename(path)  # an empty folder gives way; one that was filled meanwhile does not
        sync(place)
    except BaseException as error:
        shutil.rmtree(work, ignore_errors=True)
        if isinstance(error, Exception) and (reason := write_failure(error)):
            raise UserError(f"{path} could not be written: {reason}") from error
        if isinstance(error, OSError) and error.errno in (errno.ENOTEMPTY, errno.EEXIST) and any(path.iterdir()):
            raise UserError(f"{path} was written by another process meanwhile") from error
        raise
    finally:
        os.close(lock)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a draft beside `file` that takes its place when the block ends without an exception.

    A kill or a loss of power leaves the old file or the new one.
    """
    draft = file.with_name(f".{file.name}.partial")
    yield draft
    sync(draft)
    os.replace(draft, file)


def sync_all(folder: Path) -> None:
    """Wait until a folder and all in it are on the disk rather than on their way there."""
    for path in (*folder.rglob("*"), folder):
        if not path.is_symlink():
            sync(path)


def sync(path: Path) -> None:
    """Wait until a file, or the list of what a folder holds, is on the disk."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError:
        if not path.is_dir():  # of folders, some file systems cannot say
            raise


@contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Name the file or folder of a run that a disk does not take, which the system's own error does not.

    Raises:
        Unavailable: the disk is full, or otherwise refuses.
    """
    try:
        yield
    except OSError as error:
        if (reason := write_failure(error)) is None:
            raise
        raise Unavailable(
            f"{path} cannot be written: {reason}; once it can be, run the same command again to go on"
        ) from error


def write_failure(error: Exception) -> str | None:
    """Say in a few words why a disk took no more data; None if that is not what the error is about.

    Python, safetensors and torch each raise an exception of their own, and torch's gives no reason.
    """
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return os.strerror(error.errno)
    text = str(error)
    if type(error).__name__ == "SafetensorError":
        number = re.search(r"os error (\d+)", text)
        return os.strerror(int(number[1])) if number and int(number[1]) in _REFUSED else None
    if isinstance(error, RuntimeError) and ("PytorchStreamWriter" in text or "inline_container" in text):
        return "the disk took only a part of a file"
    return None


_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def _clear_up(path: Path) -> None:
    place, name = path.absolute().parent, f".{glob.escape(path.name)}.{'?' * 8}"  # as mkdtemp names them
    for left in place.glob(f"{name}.partial"):
        _remove_abandoned(left)
    for old in place.glob(f"{name}.old"):
        if old.with_suffix(".partial").exists():
            continue  # its process lives
        with contextlib.suppress(OSError):
            if os.path.lexists(path):
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(path)


def _remove_abandoned(folder: Path) -> None:
    """Remove what a killed process was writing; a living one holds a lock on its folder."""
    with contextlib.suppress(OSError):
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


def _share(folder: Path) -> None:
    """Give a folder and all in it the permissions that the user's umask grants new ones.

    Temporary folders, and the files that safetensors writes, are private, which is wrong for a result to share.
    """
    umask = os.umask(0)
    os.umask(umask)
    folder.chmod(0o777 & ~umask)
    for path in folder.rglob("*"):
        if not path.is_symlink():
            path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
