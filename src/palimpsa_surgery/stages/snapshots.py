"""Checkpoints of a stage that is under way: each is there whole, or not at all.

    01-pretrain/
      .checkpoint.partial/   where the Trainer writes; a kill or a full disk leaves it behind
      checkpoint-500/        moved here once all ranks have written, with
        files.json           the step, the layout, and size and hash of every other file

A checkpoint that lost a file, or whose files were cut short or changed where they are looked at, is passed over for
the one before it. All is on the disk before it is moved to its place, so that a machine that loses power does not
leave right names with nothing behind them.
"""

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from palimpsa_surgery import ranks
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.outputs import sync, sync_all, write_failure

MANIFEST = "files.json"
HASHED_BYTES = 1 << 20  # at each end of a file, beside its size: reading all of 30 GB would take a minute


class StoredFile(BaseModel):
    """What `files.json` says about one file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    bytes: Annotated[int, Field(ge=0)]
    sha256: str
    """Of its first and its last HASHED_BYTES."""


class Manifest(BaseModel):
    """The content of `files.json`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    version: Literal[1] = 1
    step: Annotated[int, Field(gt=0)]
    """Optimizer steps done."""
    processes: Annotated[int, Field(gt=0)]
    sharded: bool
    """Whether FSDP wrote it, in parts."""
    files: dict[str, StoredFile]
    """By path within the checkpoint."""


@dataclass(frozen=True)
class Snapshots:
    """The checkpoints in a stage's folder, seen by all ranks."""

    folder: Path
    keep: int
    """Number of whole checkpoints to keep."""

    @property
    def staging(self) -> Path:
        """Where the next one is written."""
        return self.folder / ".checkpoint.partial"

    @contextlib.contextmanager
    def writing(self, step: int, *, sharded: bool) -> Iterator[None]:
        """Let all ranks write into `staging/checkpoint-STEP` inside this block; then put it in its place.

        Raises:
            UserError: the disk is full, or otherwise refuses; what was there before is as it was.
        """
        ranks.first(lambda: _empty(self.staging))
        try:
            yield
            ranks.meet()  # all have written
            ranks.first(lambda: self._place(step, sharded))
        except Exception as error:
            if (reason := write_failure(error)) is None:
                raise
            shutil.rmtree(self.staging, ignore_errors=True)
            last = self.newest()
            kept = f"the one of step {last[1].step} is whole" if last else "there is no earlier one"
            raise UserError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {reason} ({kept})"
            ) from error

    def newest(self) -> tuple[Path, Manifest] | None:
        """The whole checkpoint of the most steps; None if there is none."""
        whole = self._whole()
        return whole[-1] if whole else None

    def discard(self) -> None:
        """Remove them all, half-written ones included."""
        for path in (*self._paths(), self.staging):
            shutil.rmtree(path, ignore_errors=True)

    def _place(self, step: int, sharded: bool) -> None:
        written, target = self.staging / f"checkpoint-{step}", self.folder / f"checkpoint-{step}"
        files = {
            str(path.relative_to(written)): StoredFile(bytes=path.stat().st_size, sha256=_hash(path))
            for path in sorted(written.rglob("*"))
            if path.is_file()
        }
        manifest = Manifest(step=step, processes=ranks.world_size(), sharded=sharded, files=files)
        (written / MANIFEST).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        sync_all(written)
        shutil.rmtree(target, ignore_errors=True)  # one of this step that was found damaged
        os.replace(written, target)
        sync(self.folder)
        shutil.rmtree(self.staging, ignore_errors=True)
        kept = [path for path, _ in self._whole()[-self.keep :]]
        for path in self._paths():
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _paths(self) -> list[Path]:
        """Whatever is named like a checkpoint; a copy that a user made under another name is none."""
        return [path for path in self.folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]

    def _whole(self) -> list[tuple[Path, Manifest]]:
        """Every checkpoint whose files are as they were written, by step."""
        found = ((path, _read_manifest(path)) for path in self._paths())
        return sorted(((path, manifest) for path, manifest in found if manifest), key=lambda pair: pair[1].step)


def _read_manifest(checkpoint: Path) -> Manifest | None:
    """What a checkpoint's `files.json` says, if it is valid and true."""
    try:
        manifest = Manifest.model_validate_json((checkpoint / MANIFEST).read_bytes())
        for name, stored in manifest.files.items():
            path = checkpoint / name
            if path.stat().st_size != stored.bytes or _hash(path) != stored.sha256:
                return None
    except (OSError, ValidationError, ValueError):
        return None
    return manifest


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(HASHED_BYTES))
        file.seek(max(file.tell(), path.stat().st_size - HASHED_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
