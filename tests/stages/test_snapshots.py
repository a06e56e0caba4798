"""Checkpoints of a stage under way: whole, or not there; so many of them; and a full disk."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.snapshots import HASHED_BYTES, MANIFEST, Snapshots


def write(snapshots: Snapshots, step: int) -> Path:
    """A checkpoint of one short and one long file."""
    with snapshots.writing(step, sharded=False):
        folder = snapshots.staging / f"checkpoint-{step}"
        (folder / "part").mkdir(parents=True)
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        (folder / "part" / "weights").write_bytes(b"w" * (HASHED_BYTES + 1))
    return snapshots.folder / f"checkpoint-{step}"


def steps(snapshots: Snapshots) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in snapshots.folder.glob("checkpoint-*[0-9]"))


def test_the_last_ones_are_kept(tmp_path):
    snapshots = Snapshots(tmp_path, keep=2)
    assert snapshots.newest() is None
    copy = tmp_path / "checkpoint-2-backup"
    copy.mkdir()
    for step in (2, 4, 10, 12):
        path = write(snapshots, step)
        assert snapshots.newest()[0] == path
        assert snapshots.newest()[1].step == step
    assert steps(snapshots) == [10, 12]
    assert not snapshots.staging.exists()
    snapshots.discard()
    assert [*tmp_path.iterdir()] == [copy]


def _lose_a_file(path: Path) -> None:
    (path / "part" / "weights").unlink()


def _cut_short(path: Path) -> None:
    os.truncate(path / "part" / "weights", 100)


def _edit(path: Path) -> None:
    state = path / "trainer_state.json"
    state.write_text(state.read_text().replace("4", "9"))


def _lose_the_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def _garble_the_manifest(path: Path) -> None:
    (path / MANIFEST).write_text('{"version": 1, "step": "4"}')


def _zero(path: Path) -> None:
    """As a machine that lost power may leave a long file."""
    weights = path / "part" / "weights"
    weights.write_bytes(bytes(weights.stat().st_size))


@pytest.mark.parametrize("damage", [_lose_a_file, _cut_short, _zero, _edit, _lose_the_manifest, _garble_the_manifest])
def test_a_damaged_one_is_passed_over_and_written_again(tmp_path, damage):
    snapshots = Snapshots(tmp_path, keep=2)
    first, second = write(snapshots, 2), write(snapshots, 4)
    damage(second)
    assert snapshots.newest()[0] == first
    write(snapshots, 4)
    assert snapshots.newest()[0] == second
    assert steps(snapshots) == [2, 4]


def test_what_a_kill_left_is_not_in_the_way(tmp_path):
    snapshots = Snapshots(tmp_path, keep=2)
    left = snapshots.staging / "checkpoint-2" / "half"
    left.parent.mkdir(parents=True)
    left.write_text("half")
    assert snapshots.newest() is None
    assert not (write(snapshots, 2) / "half").exists()


FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, FULL, "file"), FULL),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), FULL),
        (RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"), "a part of a file"),
    ],
    ids=["python", "safetensors", "torch"],
)
def test_a_full_disk_leaves_the_previous_one(tmp_path, error, reason):
    snapshots = Snapshots(tmp_path, keep=1)
    previous = write(snapshots, 2)

    def fill() -> None:
        with snapshots.writing(4, sharded=False):
            (snapshots.staging / "checkpoint-4").mkdir()
            raise error

    with pytest.raises(UserError, match=rf"step 4 could not be written .*{reason} \(the one of step 2 is whole\)"):
        fill()
    assert snapshots.newest()[0] == previous
    assert not snapshots.staging.exists()


def test_other_errors_pass_through(tmp_path):
    with pytest.raises(RuntimeError, match="a bug"), Snapshots(tmp_path, keep=1).writing(4, sharded=False):
        raise RuntimeError("a bug")


LIMITED = """
import resource, signal, sys
from palimpsa_surgery.cli.main import run
from palimpsa_surgery.stages.trainer import StageTrainer

save = StageTrainer._save_checkpoint

def limited(self, *arguments):
    if self.state.global_step == 4:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
    save(self, *arguments)

StageTrainer._save_checkpoint = limited
sys.argv[0] = "palimpsa-surgery"
run()
"""


def test_a_run_on_a_disk_that_takes_no_more(finished, tmp_path):
    """The system itself refuses the checkpoint's larger files: one line, and the run goes on from the one before."""
    checkpoint, recipe = finished.plan.source.path, finished.plan.output.parent / "recipe.yaml"
    command = ["train", str(checkpoint), "--recipe", str(recipe), "--output", str(tmp_path / "run"), "--stage", "first"]
    done = subprocess.run([sys.executable, "-c", LIMITED, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "error: the checkpoint of step 4 could not be written" in done.stderr
    assert "(the one of step 2 is whole)" in done.stderr
    snapshots = Snapshots(tmp_path / "run" / "01-first", keep=2)
    assert snapshots.newest()[1].step == 2
    weights = torch.load(snapshots.newest()[0] / "optimizer.pt", weights_only=True)
    assert weights["state"]
