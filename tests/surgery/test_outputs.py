"""Output folders: whole or not at all, and never at the cost of an input."""

import os
import stat
from pathlib import Path

import pytest

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.outputs import check_output_directory, fresh_directory, replacing


def test_appears_whole(tmp_path):
    with fresh_directory(tmp_path / "new" / "out") as work:
        (work / "file").write_text("x")
        assert not (tmp_path / "new" / "out").exists()
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["out"]
    assert (tmp_path / "new" / "out" / "file").read_text() == "x"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_what_was_there(error, tmp_path):
    old = tmp_path / "out"
    old.mkdir()
    (old / "file").write_text("old")

    def write():
        with fresh_directory(old, overwrite=True) as work:
            (work / "file").write_text("new")
            raise error

    with pytest.raises(error):
        write()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (old / "file").read_text() == "old"


def test_a_failed_move_puts_the_old_folder_back(tmp_path, monkeypatch):
    old = tmp_path / "out"
    old.mkdir()
    (old / "file").write_text("old")
    rename = Path.rename

    def fail(self, target):
        if self.suffix == ".partial":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no"), fresh_directory(old, overwrite=True):
        pass
    assert (old / "file").read_text() == "old"


def test_a_folder_that_another_process_filled_meanwhile_is_left_alone(tmp_path):
    def write():
        with fresh_directory(tmp_path / "out") as work:
            (work / "file").write_text("ours")
            with fresh_directory(tmp_path / "out") as other:
                (other / "file").write_text("theirs")

    with pytest.raises(UserError, match="out was written by another process meanwhile"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "file").read_text() == "theirs"


@pytest.fixture
def order(monkeypatch) -> list[str]:
    """What reaches the disk and what is moved, in this order, by name."""
    seen = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda n: (seen.append(Path(os.readlink(f"/proc/self/fd/{n}")).name), fsync(n)))
    for owner, name in ((Path, "rename"), (os, "replace")):
        move = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda old, new, move=move: (seen.append("moved"), move(old, new)))
    return seen


def test_all_of_a_folder_is_on_the_disk_before_it_appears(tmp_path, order):
    with fresh_directory(tmp_path / "out") as work:
        (work / "part").mkdir()
        (work / "part" / "file").write_text("x")
    assert sorted(order[:3]) == sorted(["file", "part", work.name])
    assert order[3:] == ["moved", tmp_path.name]


def test_a_file_is_replaced_by_one_that_is_on_the_disk(tmp_path, order):
    (tmp_path / "file").write_text("old")
    with replacing(tmp_path / "file") as draft:
        draft.write_text("new")
        assert (tmp_path / "file").read_text() == "old"
    assert order == [draft.name, "moved"]
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]


def test_overwriting_replaces_everything(tmp_path):
    old = tmp_path / "out"
    old.mkdir()
    (old / "stale").write_text("old")
    with fresh_directory(old, overwrite=True) as work:
        (work / "file").write_text("new")
    assert [p.name for p in old.iterdir()] == ["file"]


@pytest.mark.parametrize("place", ["model", "model/weights", "."], ids=["input", "inside", "around"])
def test_an_input_is_never_overwritten(place, tmp_path):
    inside = tmp_path / "model" / "weights"
    inside.mkdir(parents=True)
    (inside / "file").write_text("x")
    output = tmp_path / ("model/weights" if place == "model/weights" else place)
    wanted = inside if place == "model/weights" else tmp_path / "model"
    with pytest.raises(UserError, match="is or holds the input"):
        check_output_directory(output, overwrite=True, inputs=[None, "state-spaces/mamba2-2.7b", wanted])
    check_output_directory(tmp_path / "other", overwrite=True, inputs=[wanted])


def test_the_current_folder_cannot_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for output in (".", "..", tmp_path / "here"):
        with pytest.raises(UserError, match="is or holds the current folder"):
            check_output_directory(output, overwrite=True)


@pytest.mark.parametrize("verb", ["analyze", "replace", "diagnose"])
def test_verbs_keep_their_inputs(verb, cli, tmp_path, kjv, tiny_checkpoint):
    model = tmp_path / "model"
    model.symlink_to(tiny_checkpoint)
    folder = tmp_path / "project"
    folder.mkdir()
    text = folder / "text.txt"
    text.write_text(kjv.read_text()[:20000])
    options = ["--layers", "1"] if verb == "replace" else []
    outcome = cli(verb, model, "--data", text, "--output", folder, "--overwrite", *options)
    assert "is or holds the input text.txt" in outcome.error
    assert text.exists()


@pytest.mark.parametrize("umask", [0o022, 0o007, 0o077])
def test_permissions_follow_the_umask(umask, tmp_path):
    """Of temporary folders and private files too, such as safetensors writes."""
    before = os.umask(umask)
    try:
        with fresh_directory(tmp_path / "out") as work:
            (work / "part").mkdir()
            (work / "part" / "file").touch(mode=0o600)
    finally:
        os.umask(before)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out", *sorted((tmp_path / "out").rglob("*")))]
    assert modes == [0o777 & ~umask, 0o777 & ~umask, 0o666 & ~umask]


def test_a_mount_point_is_refused_before_any_work(tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "disk")
    with pytest.raises(UserError, match="disk is a mount point, which cannot be replaced"):
        check_output_directory(tmp_path / "disk", overwrite=True)


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    left = tmp_path / ".out.abcd1234.partial"
    left.mkdir()
    (left / "half").write_text("half")
    other = tmp_path / ".outer.abcd1234.partial"
    other.mkdir()
    with fresh_directory(tmp_path / "out") as living:
        assert not left.exists()
        with fresh_directory(tmp_path / "out") as second:
            assert living.exists()
            (second / "file").write_text("second")
        (living / "file").write_text("first")
        living_name = living.name
        (tmp_path / "out" / "file").unlink()
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert living_name not in {path.name for path in tmp_path.iterdir()}
    assert other.exists()


@pytest.mark.parametrize("moved", [False, True], ids=["before the second move", "after it"])
def test_a_kill_while_replacing_loses_nothing(moved, tmp_path):
    """The process dies between moving the old folder away and the new one in, or before the old one is removed."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("old")
    child = os.fork()
    if child == 0:
        rename = Path.rename

        def rename_and_die(self, target):
            if self.suffix == ".old" or not self.name.endswith(".partial"):
                return rename(self, target)
            if moved:
                rename(self, target)
            os._exit(9)

        Path.rename = rename_and_die
        try:
            with fresh_directory(tmp_path / "out", overwrite=True) as work:
                (work / "file").write_text("new")
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    check_output_directory(tmp_path / "out", overwrite=True)
    assert (tmp_path / "out" / "file").read_text() == ("new" if moved else "old")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
