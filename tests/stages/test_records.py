"""Files that the package reads back, edited by hand: one line that names the field, before any work."""

import json
import shutil
from pathlib import Path

import pytest

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.pipeline import train
from palimpsa_surgery.stages.reporting import append, keep_until, read_lines
from palimpsa_surgery.stages.run_folder import write_run
from palimpsa_surgery.stages.run_plots import plot_stage
from palimpsa_surgery.surgery.export import export
from palimpsa_surgery.surgery.records import read_run, read_run_recipe, read_surgery


@pytest.fixture
def run(finished, tmp_path) -> Path:
    """A copy of the finished run, without its weights."""
    return Path(shutil.copytree(finished.plan.output, tmp_path / "run", ignore=shutil.ignore_patterns("final")))


def edit(path: Path, where: str, value: object) -> None:
    """Set the value at `stages.0.name` and the like; `...` removes it."""
    content = json.loads(path.read_text())
    *parents, last = (int(part) if part.isdigit() else part for part in where.split("."))
    inner = content
    for part in parents:
        inner = inner[part]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    path.write_text(json.dumps(content))


def error_of(function, *arguments, **options) -> str:
    with pytest.raises(UserError) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_written_is_read(finished):
    assert read_run(finished.plan.output) == finished.record
    assert read_surgery(finished.plan.source.path)["init"] == {"kind": "calibrated"}
    assert read_run(finished.plan.source.path) is None
    assert read_surgery(finished.plan.output) == {}


@pytest.mark.parametrize(
    ("where", "value", "field"),
    [
        ("version", "1", "of version '1'"),
        ("stages", {}, "stages"),
        ("stages", [], "stages"),
        ("stages.0", None, "stages.0"),
        ("stages.0.status", "finished", "stages.0.status"),
        ("stages.0.status", "running", "stages.0: final is '01-first/final', which does not fit status running"),
        ("stages.1.steps", "5", "stages.1.steps"),
        ("stages.1.steps", 0, "stages.1.steps"),
        ("stages.0.folder", "../elsewhere", "stages.0.folder"),
        ("stages.0.final", "../elsewhere", "stages.0: final is '../elsewhere'"),
        ("stages.0.before", "good", "stages.0.before"),
        ("stages.0.before.loss", "3.2", "stages.0.before.loss"),
        ("stages.0.after.perplexity", float("nan"), "stages.0.after.perplexity"),
        ("stages.0.after.positions.loss", [1.0], "its lists are not of one length"),
        ("stages.0.after", ..., "not all of data, before, after and seconds are there"),
        ("stages.0.data.sources", 3, "stages.0.data.sources"),
        ("stages.0.seconds", [], "stages.0.seconds"),
        ("base_fingerprint", 12, "base_fingerprint"),
        ("seed", None, "seed"),
        ("max_steps", "all", "max_steps"),
        ("final", "elsewhere", "final is 'elsewhere', but that of the last stage is '02-second/final'"),
        ("final", ..., "final"),
    ],
)
def test_run_that_was_edited(finished, run, where, value, field):
    edit(run / "run.json", where, value)
    assert field in error_of(read_run, run)
    assert field in error_of(train, finished.plan.source.path, finished.plan.recipe, run)
    assert field in error_of(export, run, run.parent / "exported")


@pytest.mark.parametrize("content", ["[]", "3", "{", "null", "[" * 10_000])
def test_run_that_is_no_record(run, content):
    (run / "run.json").write_text(content)
    assert "run.json is not" in error_of(read_run, run)


def test_run_whose_stages_are_not_the_recipes(finished, run):
    edit(run / "run.json", "stages.1.name", "other")
    message = error_of(train, finished.plan.source.path, finished.plan.recipe, run)
    assert message == f"{run / 'recipe.yaml'} has the stages first, second, but the run has first, other"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("name: 3", "is not the recipe of a run: name: "),
        ("a list", "is not the recipe of a run: it: "),
        (" \n", "is not the recipe of a run: it: "),
        ("stages: [3]", "is not the recipe of a run: name: "),
        (": : :", "cannot be read: "),
        ("a: [\n\n", "cannot be read: "),
        (None, "cannot be read: "),
    ],
)
def test_recipe_of_a_run_that_was_edited(finished, run, content, problem):
    path = run / "recipe.yaml"
    path.unlink() if content is None else path.write_text(content)
    for message in (
        error_of(read_run_recipe, run, finished.record),
        error_of(train, finished.plan.source.path, finished.plan.recipe, run),
    ):
        assert message.startswith(f"{path} {problem}")
        assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ([], "valid dictionary"),
        ({"base_model": 7}, "base_model"),
        ({"init": "paper"}, "init"),
        ({"init": {"kind": 3}}, "init.kind"),
        ({"analysis": {"median_windows": [1.0]}}, "analysis.median_windows"),
        ({"analysis": {"median_windows": {"one": 1.0}}}, "analysis.median_windows"),
        ({"analysis": {"median_windows": {"1": "long"}}}, "analysis.median_windows.1"),
        ({"analysis": {"tokens": -1}}, "analysis.tokens"),
        ({"drift": {"relative": 0.1}}, "drift.kl"),
        ({"drift": {"relative": "0.1", "kl": 0.0, "max_importance_ratio": 0.1, "tokens": 3}}, "drift.relative"),
        ({"fingerprint": []}, "fingerprint"),
    ],
)
def test_surgery_that_was_edited(tmp_path, content, field):
    (tmp_path / "surgery.json").write_text(json.dumps(content))
    assert field in error_of(read_surgery, tmp_path)


@pytest.mark.parametrize(
    "line",
    ["{", "[]", '{"loss": 1.0}', '{"step": "1"}', '{"step": 1, "loss": "2", "grad_norm": 1, "learning_rate": 1}'],
)
def test_log_that_was_edited(run, line):
    path = run / "01-first" / "log.jsonl"
    whole = path.read_text()
    path.write_text(whole + line + "\n")
    assert error_of(read_lines, path).startswith(f"{path}, line 6: not a line of this log")
    path.write_bytes(whole.encode() + b"\xff\xfe\n")
    assert error_of(read_lines, path).startswith(f"{path}, line 6: not a line of this log")
    path.write_text(whole + line)  # cut short by a kill
    assert [entry["step"] for entry in read_lines(path)] == [1, 2, 3, 4, 5]
    keep_until(path, 3)
    assert path.read_text() == "".join(whole.splitlines(keepends=True)[:3])


@pytest.mark.parametrize(
    ("written", "named", "act"),
    [
        (".run.json.partial", "run.json", lambda run: write_run(run, {})),
        ("01-first/log.jsonl", "01-first/log.jsonl", lambda run: append(run / "01-first" / "log.jsonl", {})),
        (
            "01-first/.log.jsonl.partial",
            "01-first/log.jsonl",
            lambda run: keep_until(run / "01-first" / "log.jsonl", 3),
        ),
        ("01-first/loss.png", "01-first/loss.png", lambda run: plot_stage(run / "01-first", {"steps": 5, "name": "a"})),
    ],
    ids=["record", "line", "lines", "figure"],
)
def test_a_full_disk_names_the_file(run, written, named, act):
    """Linux has a file that is always full."""
    (run / written).unlink(missing_ok=True)
    (run / written).symlink_to("/dev/full")
    assert error_of(act, run) == (
        f"{run / named} cannot be written: No space left on device; once it can be, run the same command again to go on"
    )
