"""Runs: what they leave behind, how they resume, and when they refuse to."""

import copy
import dataclasses
import errno
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages import data, pipeline, run_folder
from palimpsa_surgery.stages.pipeline import train
from palimpsa_surgery.stages.recipe import load_recipe
from palimpsa_surgery.stages.trainer import StageTrainer
from palimpsa_surgery.surgery import checkpoints
from palimpsa_surgery.surgery.checkpoints import load_model, load_tokenizer, open_source, save_checkpoint


@pytest.fixture
def whole_run(finished) -> Path:
    return finished.plan.output


@pytest.fixture
def checkpoint(finished, tmp_path) -> Path:
    """What `replace` would have written of the small model, in float16."""
    return Path(shutil.copytree(finished.plan.source.path, tmp_path / "hybrid"))


def final_weights(run: Path) -> list[dict[str, torch.Tensor]]:
    return [load_model(path).state_dict() for path in sorted(run.glob("*/final"))]


def assert_same_bits(run: Path, other: Path) -> None:
    ours, theirs = final_weights(run), final_weights(other)
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def printed(thing: object) -> str:
    """What the terminal shows in 80 columns, having checked that nothing is cut off."""
    console = Console(width=80, file=io.StringIO())
    console.print(thing)
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    return text


def record_of(run: Path) -> dict:
    return json.loads((run / "run.json").read_text())


def interrupt_at(monkeypatch, call: int) -> None:
    """Make the training step number `call`, counted over all stages, end like Ctrl-C."""
    original, calls = StageTrainer.training_step, []

    def step(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == call:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(StageTrainer, "training_step", step)


def no_weights(monkeypatch) -> None:
    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(checkpoints, "load_model", refuse)


def test_a_run_and_what_it_leaves(finished, small_recipe):
    run, checkpoint = finished.plan.output, finished.plan.source.path
    assert finished.did == ("first", "second")
    assert not finished.already_finished
    assert finished.final == run / "02-second" / "final"
    assert load_recipe(run / "recipe.yaml") == small_recipe

    record = record_of(run)
    assert record == finished.record
    assert record["version"] == 1
    assert record["recipe"] == "small"
    assert record["base"] == str(checkpoint)
    assert record["base_fingerprint"] == checkpoints.fingerprint(load_model(checkpoint))
    assert record["seed"] == 0
    assert record["final"] == "02-second/final"
    assert record["versions"]["torch"] == torch.__version__
    for stage in record["stages"]:
        assert stage["status"] == "done"
        assert stage["steps"] == 5
        assert stage["final"] == f"{stage['folder']}/final"
        assert stage["after"]["loss"] < stage["before"]["loss"]
        assert stage["before"]["tokens"] == stage["after"]["tokens"] > 0
        left = sorted(path.name for path in (run / stage["folder"]).iterdir())
        assert left == ["final", "log.jsonl", "loss.png", "positions.png"]
        final = run / stage["final"]
        assert (final / "surgery.json").read_bytes() == (checkpoint / "surgery.json").read_bytes()
        assert load_tokenizer(final).eos_token_id == load_tokenizer(checkpoint).eos_token_id
        source, base = open_source(final), open_source(checkpoint)
        assert source.dtype == torch.float32
        assert source.config.palimpsa_layers == [1]
        assert source.config.use_cache == base.config.use_cache
    assert not list(run.rglob("*.partial"))


@pytest.mark.parametrize("call", [2, 4, 8], ids=["before-a-checkpoint", "after-one", "in-the-second-stage"])
def test_interrupted_and_resumed_is_the_same_to_the_bit(
    checkpoint, small_recipe, whole_run, tmp_path, monkeypatch, call
):
    with monkeypatch.context() as patch:
        interrupt_at(patch, call)
        with pytest.raises(KeyboardInterrupt):
            train(checkpoint, small_recipe, tmp_path / "run")
    assert record_of(tmp_path / "run")["final"] is None

    steps = []
    with monkeypatch.context() as patch:
        original = StageTrainer.training_step
        patch.setattr(StageTrainer, "training_step", lambda *a, **k: steps.append(1) or original(*a, **k))
        run = train(checkpoint, small_recipe, tmp_path / "run")
    assert len(steps) == {2: 10, 4: 8, 8: 3}[call], "it goes on from the last checkpoint"
    assert run.did == (("second",) if call == 8 else ("first", "second"))
    assert_same_bits(tmp_path / "run", whole_run)
    results, expected = record_of(tmp_path / "run")["stages"], record_of(whole_run)["stages"]
    for ours, theirs in zip(results, expected, strict=True):
        assert ours["before"] == theirs["before"]
        assert ours["after"] == theirs["after"]
        log, whole_log = (
            [
                {key: value for key, value in json.loads(line).items() if key != "tokens_per_second"}
                for line in (folder / ours["folder"] / "log.jsonl").read_text().splitlines()
            ]
            for folder in (tmp_path / "run", whole_run)
        )
        assert log == whole_log


KILLED = """
import os, signal, sys
from palimpsa_surgery.stages import pipeline, trainer

save = trainer.StageTrainer._save_rng_state

def killed(self, folder):
    if self.state.global_step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    save(self, folder)

trainer.StageTrainer._save_rng_state = killed
pipeline.train(*sys.argv[1:])
"""


def test_killed_while_writing_a_checkpoint(checkpoint, finished, whole_run, tmp_path):
    recipe, run = whole_run.parent / "recipe.yaml", tmp_path / "run"
    command = [sys.executable, "-c", KILLED, str(checkpoint), str(recipe), str(run)]
    assert subprocess.run(command, check=False, capture_output=True).returncode == -signal.SIGKILL
    assert {path.name for path in (run / "01-first").glob("checkpoint-*")} == {"checkpoint-2"}
    assert (run / "01-first" / ".checkpoint.partial" / "checkpoint-4" / "model.safetensors").is_file()
    train(checkpoint, recipe, run)
    assert_same_bits(run, whole_run)


@pytest.mark.parametrize("when", ["before-it-appears", "before-it-is-recorded"])
def test_interrupted_while_writing_the_final_checkpoint(
    checkpoint, small_recipe, whole_run, tmp_path, monkeypatch, when
):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        if when == "before-it-appears":
            patch.setattr(checkpoints, "save_checkpoint", interrupt)
        else:
            write = pipeline.write_run
            patch.setattr(
                pipeline,
                "write_run",
                lambda f, record: interrupt() if record["stages"][0]["final"] else write(f, record),
            )
        with pytest.raises(KeyboardInterrupt):
            train(checkpoint, small_recipe, run)
    assert (run / "01-first" / "final").exists() == (when == "before-it-is-recorded")
    (run / "01-first" / ".final.k1ll3d_x.partial").mkdir()  # as a kill would leave it
    train(checkpoint, small_recipe, run)
    assert_same_bits(run, whole_run)
    assert not list(run.rglob("*.partial"))


def test_stage_by_stage_is_the_same_to_the_bit(checkpoint, small_recipe, whole_run, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(UserError, match="stage second needs stage first, which is not done"):
        train(checkpoint, small_recipe, run, stage="second")
    assert not run.exists()
    first = train(checkpoint, small_recipe, run, stage="first")
    assert first.did == ("first",)
    assert first.final is None
    assert [stage["status"] for stage in record_of(run)["stages"]] == ["done", "pending"]
    assert train(checkpoint, small_recipe, run, stage="first").did == ()
    assert train(checkpoint, small_recipe, run, stage="second").final == run / "02-second" / "final"
    assert_same_bits(run, whole_run)


def test_finished_run_is_left_alone(checkpoint, small_recipe, whole_run):
    before = {path: path.stat().st_mtime_ns for path in whole_run.rglob("*")}
    again = train(checkpoint, small_recipe, whole_run)
    assert again.already_finished
    assert again.final == whole_run / "02-second" / "final"
    assert {path: path.stat().st_mtime_ns for path in whole_run.rglob("*")} == before


def test_a_file_system_without_locks_can_hold_a_run(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="cannot be locked"), run_folder.holding(tmp_path):
        assert (tmp_path / run_folder.LOCK_FILE).is_file()


def test_a_run_in_use_is_left_alone(checkpoint, small_recipe, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    run_stage = pipeline.run_stage
    seen = []

    def meanwhile(*arguments):
        if not seen:
            seen.append(True)
            with pytest.raises(UserError, match="is in use by another process"):
                train(checkpoint, small_recipe, folder)
        run_stage(*arguments)

    monkeypatch.setattr(pipeline, "run_stage", meanwhile)
    assert train(checkpoint, small_recipe, folder).final.is_dir()
    assert seen


def test_another_seed_gives_other_weights(checkpoint, small_recipe, whole_run, tmp_path):
    train(checkpoint, small_recipe, tmp_path / "run", seed=1)
    assert record_of(tmp_path / "run")["seed"] == 1
    ours, theirs = final_weights(tmp_path / "run")[-1], final_weights(whole_run)[-1]
    assert not torch.equal(ours["lm_head.weight"], theirs["lm_head.weight"])


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"learning_rate": 2e-3}, {}, r"stages\[0\]\.learning_rate was 0\.001, is 0\.002"),
        ({"clip": 2.0, "tokens": 640}, {}, r"stages\[0\]\.tokens was 320, is 640; stages\[0\]\.clip was 1\.0, is 2"),
        ({}, {"seed": 7}, "seed was 0, is 7"),
        ({}, {"max_steps": 3}, "--max-steps was None, is 3"),
    ],
    ids=["recipe", "recipe-twice", "seed", "max-steps"],
)
def test_changed_run_is_refused(
    checkpoint, recipe_dict, write_recipe, whole_run, monkeypatch, changes, options, message
):
    recipe_dict["stages"][0] |= changes
    no_weights(monkeypatch)
    with pytest.raises(UserError, match=message) as error:
        train(checkpoint, load_recipe(write_recipe(recipe_dict)), whole_run, **options)
    assert "\n" not in str(error.value)


def test_changed_weights_are_refused(checkpoint, small_recipe, whole_run, small_model, tokenizer, tmp_path):
    with torch.no_grad():
        small_model.backbone.norm_f.weight[0] += 0.5
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    save_checkpoint(small_model, checkpoint, tokenizer=tokenizer, dtype=torch.float16)
    with pytest.raises(UserError, match="was started from other weights: fingerprint"):
        train(checkpoint, small_recipe, whole_run)


def test_weights_are_the_same_wherever_they_lie(checkpoint, small_recipe, whole_run, tmp_path):
    checkpoint.rename(tmp_path / "moved")
    assert train(tmp_path / "moved", small_recipe, whole_run).already_finished


def test_max_steps_caps_every_stage(checkpoint, small_recipe, tmp_path):
    run = train(checkpoint, small_recipe, tmp_path / "run", max_steps=2)
    assert run.record["max_steps"] == 2
    assert [stage["steps"] for stage in run.record["stages"]] == [2, 2]
    assert [stage["tokens"] for stage in run.record["stages"]] == [128, 128]
    assert len((tmp_path / "run" / "02-second" / "log.jsonl").read_text().splitlines()) == 2


def test_dry_run_loads_and_writes_nothing(checkpoint, small_recipe, small_model, tmp_path, monkeypatch):
    no_weights(monkeypatch)
    before = sorted(tmp_path.rglob("*"))
    run = train(checkpoint, small_recipe, tmp_path / "run", dry_run=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert run.record == {}
    assert run.plan.parameters == sum(parameter.numel() for parameter in small_model.parameters())
    assert [(part.folder, part.steps, part.tokens, part.status) for part in run.plan.stages] == [
        ("01-first", 5, 320, "pending"),
        ("02-second", 5, 320, "pending"),
    ]
    assert "importance scale b_scale" in printed(run.plan)


def test_data_are_prepared_where_there_are_no_weights(
    checkpoint, small_recipe, whole_run, finished, tmp_path, monkeypatch
):
    """A call without `prepare_only` goes on from there, in which nothing is tokenised again."""
    weights = checkpoint / "model.safetensors"
    weights.rename(tmp_path / "elsewhere")
    run = train(checkpoint, small_recipe, tmp_path / "run", prepare_only=True)
    assert run.did == ()
    folders = [tmp_path / "run" / name / "data" for name in ("01-first", "02-second")]
    assert run.prepared == {folder: 32 * 12 for folder in folders}
    assert [sorted(path.name for path in folder.parent.iterdir()) for folder in folders] == [["data"], ["data"]]
    assert run.record == record_of(tmp_path / "run")
    again = train(checkpoint, small_recipe, tmp_path / "run", prepare_only=True)
    assert again.record == run.record

    (tmp_path / "elsewhere").rename(weights)
    with monkeypatch.context() as patch:
        patch.setattr(data, "prepare", lambda *args, **kwargs: pytest.fail("data were prepared again"))
        done = train(checkpoint, small_recipe, tmp_path / "run")
    assert done.did == ("first", "second")
    assert done.prepared == {}
    assert done.record["base_fingerprint"] == finished.record["base_fingerprint"]
    assert_same_bits(tmp_path / "run", whole_run)


def test_data_of_another_tokenizer_are_not_trained_on(checkpoint, small_recipe, tmp_path):
    """Before the weights are known, nothing else would tell them from those of this checkpoint."""
    train(checkpoint, small_recipe, tmp_path / "run", prepare_only=True)
    other = Path(shutil.copytree(checkpoint, tmp_path / "other"))
    content = json.loads((other / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="was started with another tokenizer, whose vocabulary differs"):
        train(other, small_recipe, tmp_path / "run")
    assert train(checkpoint, small_recipe, tmp_path / "run").did == ("first", "second")
    with pytest.raises(UserError, match="was started with another tokenizer"):
        train(other, small_recipe, tmp_path / "run")


def test_the_record_names_the_weights_that_were_trained(checkpoint, small_recipe, tmp_path):
    train(checkpoint, small_recipe, tmp_path / "run", prepare_only=True)
    checkpoint.rename(tmp_path / "moved")
    assert train(tmp_path / "moved", small_recipe, tmp_path / "run").record["base"] == str(tmp_path / "moved")


def test_data_that_were_removed_before_training_are_made_again(checkpoint, small_recipe, whole_run, tmp_path):
    prepared = train(checkpoint, small_recipe, tmp_path / "run", prepare_only=True).prepared
    shutil.rmtree(next(iter(prepared)))
    assert train(checkpoint, small_recipe, tmp_path / "run", prepare_only=True).prepared == prepared
    assert all(folder.is_dir() for folder in prepared)
    train(checkpoint, small_recipe, tmp_path / "run")
    assert_same_bits(tmp_path / "run", whole_run)


def test_results_fit_80_columns(finished):
    assert "second" in printed(finished)


def test_what_was_left_out_is_said_at_the_end(finished):
    assert "left out" not in printed(finished)
    record = copy.deepcopy(finished.record)
    record["stages"][1]["data"]["sources"][0] |= {"too_long": 1234, "unanswered": 5}
    text = " ".join(printed(dataclasses.replace(finished, record=record)).split())
    assert "stage second: 1,234 examples too long for a sequence of verses.jsonl were left out" in text
    assert "stage second: 5 rows without a prompt or an answer of verses.jsonl were left out" in text


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"base": "mamba2-2.7b"}, "base is small-mamba2 where the recipe expects mamba2-2.7b"),
        ({"palimpsa_layers": 8}, "palimpsa_layers is 1 where the recipe expects 8"),
        ({"init": "paper"}, "init is calibrated where the recipe expects paper"),
    ],
    ids=["base", "layers", "init"],
)
def test_checkpoint_that_does_not_suit_the_recipe(
    checkpoint, recipe_dict, write_recipe, tmp_path, monkeypatch, expected, message
):
    no_weights(monkeypatch)
    recipe = load_recipe(write_recipe(recipe_dict | {"model": expected}))
    with pytest.raises(UserError, match=f"checkpoint {checkpoint} does not suit the recipe: {message}"):
        train(checkpoint, recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_checked_is_said(checkpoint, recipe_dict, write_recipe, tmp_path):
    (checkpoint / "surgery.json").unlink()
    expected = {"base": "hub/small-mamba2", "palimpsa_layers": 1, "init": "paper"}
    plan = train(
        checkpoint, load_recipe(write_recipe(recipe_dict | {"model": expected})), tmp_path / "run", dry_run=True
    ).plan
    assert "The checkpoint does not say its base and init: not checked." in plan.notes


def test_base_is_compared_by_its_last_part(checkpoint, recipe_dict, write_recipe, tmp_path):
    recipe = load_recipe(write_recipe(recipe_dict | {"model": {"base": "hub/small-mamba2"}}))
    notes = train(checkpoint, recipe, tmp_path / "run", dry_run=True).plan.notes
    assert not any("not checked" in note for note in notes)


@pytest.mark.parametrize("content", ["file", "folder", "other-json"])
def test_output_that_is_something_else(checkpoint, small_recipe, tmp_path, monkeypatch, content):
    no_weights(monkeypatch)
    output = tmp_path / "run"
    if content == "file":
        output.write_text("mine")
    else:
        output.mkdir()
        (output / {"folder": "mine.txt", "other-json": "run.json"}[content]).write_text("{}")
    with pytest.raises(UserError, match=r"is not empty|is not a folder|is not the record of a run") as error:
        train(checkpoint, small_recipe, output)
    assert "--overwrite" not in str(error.value), "train has no such option"


def test_bad_data_leave_no_run_behind(checkpoint, recipe_dict, write_recipe, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "one"}\n{"body": "two"}\n')
    recipe_dict["stages"][0]["data"] = {"kind": "text", "files": ["bad.jsonl"]}
    with pytest.raises(UserError, match=r"stages\[0\]\.data: .*bad.jsonl:2: no column 'text'"):
        train(checkpoint, load_recipe(write_recipe(recipe_dict)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_bad_data_of_a_later_stage_cost_an_earlier_one_nothing(
    checkpoint, recipe_dict, write_recipe, tmp_path, monkeypatch
):
    good = '{"text": "a line of text that makes some tokens, and some more of them"}\n' * 80
    (tmp_path / "bad.jsonl").write_text(good + '{"body": "two"}\n')
    recipe_dict["stages"][1]["data"] = {"kind": "text", "files": ["bad.jsonl"]}
    recipe_dict["stages"][1]["tokens"] = 64_000
    recipe = load_recipe(write_recipe(recipe_dict))
    with pytest.raises(UserError, match=r"stages\[1\]\.data: .*bad.jsonl:81: no column 'text'"):
        train(checkpoint, recipe, tmp_path / "run")
    written = (tmp_path / "run" / "01-first" / "data" / "tokens.bin").stat()
    assert not (tmp_path / "run" / "02-second" / "data.unfinished").exists(), "no state had been written"
    (tmp_path / "bad.jsonl").write_text(good)
    found = []

    def look(plan, record, index, text_tokenizer):
        found.append((plan.output / plan.stages[index].folder / "data" / "tokens.bin").stat())

    monkeypatch.setattr(pipeline, "run_stage", look)
    assert train(checkpoint, recipe, tmp_path / "run").did == ("first", "second")
    assert (found[0].st_ino, found[0].st_mtime_ns) == (written.st_ino, written.st_mtime_ns), "it was not done again"


def test_damaged_run(checkpoint, small_recipe, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        with pytest.raises(KeyboardInterrupt):
            train(checkpoint, small_recipe, run)
    shutil.rmtree(run / "01-first" / "data")
    with pytest.raises(UserError, match=r"is damaged: .*data is missing"):
        train(checkpoint, small_recipe, run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": "third"}, "recipe small has no stage 'third'; its stages are first, second"),
        ({"max_steps": 0}, "--max-steps must be at least 1, got 0"),
        ({"seed": -1}, "--seed must lie within 0 and"),
    ],
    ids=["stage", "max-steps", "seed"],
)
def test_bad_options(checkpoint, small_recipe, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        train(checkpoint, small_recipe, tmp_path / "run", **options)


def test_recipe_file_of_the_run_is_yaml_that_runs(checkpoint, small_recipe, whole_run, tmp_path):
    assert yaml.safe_load((whole_run / "recipe.yaml").read_text())["stages"][1]["sequence_length"] == 64
    train(checkpoint, whole_run / "recipe.yaml", tmp_path / "again")
    assert_same_bits(tmp_path / "again", whole_run)
