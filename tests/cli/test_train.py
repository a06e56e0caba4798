"""The verb `train`."""

import json
import re

import pytest


@pytest.fixture
def recipe(tmp_path, kjv):
    """Two stages of two short steps."""
    (tmp_path / "text.txt").write_text(kjv.read_text(encoding="utf-8")[:3000])
    stage = """
  - name: {name}
    data: {{kind: text, files: [text.txt], held_out: 0.2}}
    sequence_length: 32
    batch_tokens: 32
    tokens: 64
    learning_rate: 1e-4
    importance_learning_rate: 1e-3"""
    path = tmp_path / "short.yaml"
    path.write_text("name: short\nstages:" + stage.format(name="one") + stage.format(name="two") + "\n")
    return path


def test_plan_run_and_run_again(cli, tiny_checkpoint, recipe, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    command = ("train", tiny_checkpoint, "--recipe", recipe, "--output", tmp_path / "run")

    plan = cli(*command, "--prepare-only", "--dry-run")
    assert (plan.code, plan.stderr) == (0, "")
    assert not (tmp_path / "run").exists()
    for text in ("6,634,016 parameters, 0 of 12 layers are Palimpsa layers.", "one", "two", "norms, biases, A_log, D"):
        assert text in plan.stdout, text
    assert plan.stdout.endswith("Dry run: nothing was written.\n")

    ready = cli(*command, "--prepare-only")
    assert (ready.code, ready.stderr) == (0, "")
    folders = [tmp_path / "run" / stage / "data" for stage in ("01-one", "02-two")]
    assert ready.stdout.splitlines()[-2:] == [f"Data are ready: 96 tokens in {folder}" for folder in folders]

    first = cli(*command, "--stage", "one")
    assert (first.code, first.stderr) == (0, "")
    assert first.stdout.splitlines()[-1] == f"Wrote {tmp_path / 'run'}"

    whole = cli(*command)
    assert (whole.code, whole.stderr) == (0, "")
    lines = whole.stdout.splitlines()
    assert lines[-1] == f"Wrote {tmp_path / 'run' / '02-two' / 'final'}"
    assert max(map(len, lines[:-1])) <= 80
    assert "done" in whole.stdout
    assert "pending" in whole.stdout
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    for stage in record["stages"]:
        assert f"{stage['after']['loss']:.4f}" in whole.stdout

    again = cli(*command)
    assert (again.code, again.stderr) == (0, "")
    assert "This run was finished already." in again.stdout
    assert "This run was finished already." in cli(*command, "--prepare-only").stdout

    changed = cli(*command, "--seed", 3)
    assert f"run {tmp_path / 'run'} was started differently: seed was 0, is 3" in changed.error


def test_all_options_reach_the_library(cli, monkeypatch, tmp_path):
    from palimpsa_surgery.errors import UserError
    from palimpsa_surgery.stages import pipeline

    def library(*arguments, **options):
        calls.append((arguments, options))
        raise UserError("enough")

    calls = []
    monkeypatch.setattr(pipeline, "train", library)
    options = {"--stage": "one", "--max-steps": 5, "--seed": 7, "--tokenizer": "tok"}
    given = [word for pair in options.items() for word in pair]
    outcome = cli("train", "hybrid", "--recipe", "demo", "--output", tmp_path / "run", *given, "--dry-run")
    assert outcome.error == "enough"
    expected = {"stage": "one", "max_steps": 5, "seed": 7, "tokenizer": "tok", "dry_run": True}
    assert calls == [(("hybrid", "demo", tmp_path / "run"), expected)]


def test_options_are_these(cli):
    options = cli("train", "--help").stdout.partition("Options:")[2]
    expected = ["recipe", "output", "stage", "max-steps", "seed", "tokenizer", "prepare-only", "dry-run", "help"]
    assert re.findall(r"^  (?:-h, )?--([a-z-]+)", options, re.M) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "no-such", "--output", "run"], "recipe 'no-such' is neither a file nor one of: demo"),
        (["--recipe", "demo", "--output", "run", "--stage", "four"], "recipe demo has no stage 'four'"),
        (["--recipe", "demo", "--output", "run", "--max-steps", "0"], "--max-steps must be at least 1, got 0"),
        (["--output", "run"], "Missing option '--recipe'."),
    ],
    ids=["recipe", "stage", "max-steps", "no-recipe"],
)
def test_mistakes_are_one_line(cli, tiny_checkpoint, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in cli("train", tiny_checkpoint, *arguments).error
    assert not (tmp_path / "run").exists()
