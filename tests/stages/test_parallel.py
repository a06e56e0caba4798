"""One run on one, two and four processes: the same training, checkpoints and endings."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate.utils import DistributedType

from palimpsa_surgery.cli.main import run
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.launch import Share, check_honoured, check_request, share
from palimpsa_surgery.stages.recipe import Recipe
from palimpsa_surgery.surgery.checkpoints import load_model

RUNNER = Path(__file__).with_name("run_ranks.py")


@pytest.fixture(scope="module")
def checkpoint(finished) -> Path:
    return finished.plan.source.path


@pytest.fixture(scope="module")
def recipe(tmp_path_factory, text_file) -> Path:
    """A stage of text with accumulation, and one of answers so unequal that some ranks get none in a step."""
    folder = tmp_path_factory.mktemp("parallel")
    pairs = folder / "pairs.jsonl"
    rows = [{"instruction": "one " * (9 if n % 3 else 1), "output": "two " * (1 if n % 3 else 9)} for n in range(60)]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = {"sequence_length": 32, "batch_tokens": 256, "learning_rate": 1e-3, "importance_learning_rate": 1e-2}
    text = {"kind": "text", "files": [str(text_file)], "held_out": 0.1}
    answers = {"kind": "instruction", "files": [str(pairs)], "held_out": 0.2}
    content = {
        "name": "parallel",
        "checkpoint_steps": 2,
        "evaluation": {"tokens": 96, "layers_every": 2, "samples": {"count": 1, "prompt_tokens": 4, "new_tokens": 2}},
        "stages": [
            {"name": "text", "data": text, "tokens": 1280, "micro_batch_tokens": 128, **stage},
            {"name": "answers", "data": answers, "tokens": 768, **stage},
        ],
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def launches(tmp_path_factory, checkpoint, recipe) -> dict[str, SimpleNamespace]:
    """All launches of this file: exit codes, what they printed, and their run folders."""
    folder = tmp_path_factory.mktemp("launches")

    def launch(name: str, ranks: int, output: str | None = None, **options) -> dict:
        arguments = ["train", str(checkpoint), "--recipe", str(recipe), "--output", str(folder / (output or name))]
        if output:
            arguments += ["--stage", "text"]
        return {"name": name, "ranks": ranks, "arguments": arguments, "log": str(folder / f"{name}.log"), **options}

    plan = [
        launch("one", 1),
        launch("two", 2, slow_at=4),
        launch("four", 4),
        launch("killed", 2, "interrupted", kill_at=4, copy_to=str(folder / "copy")),
        launch("resumed", 2, "interrupted"),
        launch("resumed-by-one", 1, "copy"),
        launch("sharded-killed", 2, "sharded", kill_at=4, fsdp=True),
        launch("sharded-by-one", 1, "sharded"),
        launch("sharded", 2, "sharded", fsdp=True),
        launch("uneven", 3, "uneven"),
        launch("failing", 2, "failing", fail_at=2),
    ]
    (folder / "launches.json").write_text(json.dumps(plan))
    command = [sys.executable, RUNNER, folder / "launches.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    found = {}
    for entry, codes in zip(plan, json.loads(done.stdout), strict=True):
        run = Path(entry["arguments"][5])
        found[entry["name"]] = SimpleNamespace(codes=codes, run=run, log=Path(entry["log"]).read_text())
    return found


def logged(run: Path, field: str) -> list[float]:
    lines = [line for path in sorted(run.glob("*/log.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line)[field] for line in lines]


def scores(run: Path) -> list[float]:
    stages = json.loads((run / "run.json").read_text())["stages"]
    return [stage[when]["loss"] for stage in stages for when in ("before", "after") if stage["final"]]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(folder / "final").state_dict()


@pytest.mark.parametrize(
    ("name", "steps"), [("two", 8), ("four", 8), ("resumed-by-one", 5), ("sharded", 5)], ids=lambda value: str(value)
)
def test_any_number_of_ranks_trains_alike(launches, name, steps):
    one, many = launches["one"], launches[name]
    assert set(one.codes) == set(many.codes) == {0}, many.log
    assert len(logged(one.run, "loss")) == 8
    for field, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("learning_rate", 0)):
        assert logged(many.run, field) == pytest.approx(logged(one.run, field)[:steps], rel=tolerance)
    expected = scores(one.run)[: 4 if steps == 8 else 2]
    assert scores(many.run) == pytest.approx(expected, rel=1e-5)
    last = "02-answers" if steps == 8 else "01-text"
    ours, theirs = weights(many.run / last), weights(one.run / last)
    assert ours.keys() == theirs.keys()
    for key in ours:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("name", ["two", "four", "resumed", "sharded"])
def test_any_number_of_ranks_shows_alike(launches, name):
    one, many = (launches[which].run / "01-text" for which in ("one", name))
    lines = [[json.loads(line) for line in (run / "layers.jsonl").read_text().splitlines()] for run in (one, many)]
    assert [line["step"] for line in lines[1]] == [line["step"] for line in lines[0]] == [0, 2, 4, 5]
    for ours, theirs in zip(*lines, strict=True):
        assert ours["layers"][0] == pytest.approx(theirs["layers"][0], rel=1e-4)
    assert (many / "samples.json").read_text() == (one / "samples.json").read_text()
    bins = [json.loads((run.parent / "run.json").read_text())["stages"][0]["after"]["positions"] for run in (one, many)]
    for field in bins[0]:
        assert bins[1][field] == pytest.approx(bins[0][field], rel=1e-5)


def test_only_rank_0_prints(launches):
    assert launches["two"].log.count("Held-out loss") == 1
    assert launches["two"].log.count("Wrote ") == 1


def test_killed_while_writing_a_checkpoint_and_resumed_is_the_same_to_the_bit(launches):
    assert launches["killed"].codes[0] == -signal.SIGKILL
    assert set(launches["resumed"].codes) == {0}
    ours, theirs = (weights(launches[name].run / "01-text") for name in ("resumed", "two"))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert logged(launches["resumed"].run, "loss") == logged(launches["two"].run, "loss")[:5]


def test_a_sharded_checkpoint_needs_shards(launches):
    assert launches["sharded-killed"].codes[0] == -signal.SIGKILL
    assert launches["sharded-by-one"].codes == [2]
    assert re.search(
        r"^error: .*checkpoint-2 was written under FSDP and cannot be read without FSDP: launch the run as before$",
        launches["sharded-by-one"].log,
        re.M,
    )


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("uneven", "stage text: batch_tokens 256 are 8 sequences of 32 tokens, which 3 processes cannot share evenly"),
        ("failing", "rank 1 has had enough"),
    ],
)
def test_an_error_ends_all_and_is_said_once(launches, name, error):
    assert set(launches[name].codes) == {2}
    assert launches[name].log.count("error:") == 1
    assert f"error: {error}\n" in launches[name].log
    assert "Traceback" not in launches[name].log


def test_nothing_is_written_where_a_batch_cannot_be_shared(launches):
    assert not launches["uneven"].run.exists()


@pytest.mark.parametrize(
    ("micro", "processes", "expected"),
    [
        (None, 1, Share(1, accumulation=1, micro_batch=12)),
        (None, 4, Share(4, accumulation=1, micro_batch=3)),
        (4, 1, Share(1, accumulation=3, micro_batch=4)),
        (4, 2, Share(2, accumulation=2, micro_batch=3)),
        (4, 4, Share(4, accumulation=1, micro_batch=3)),
        (1, 3, Share(3, accumulation=4, micro_batch=1)),
    ],
)
def test_batches_are_divided(recipe_dict, micro, processes, expected):
    stage = recipe_dict["stages"][0] | {"batch_tokens": 384, "tokens": 384}
    stage |= {"micro_batch_tokens": None if micro is None else 32 * micro}
    (parsed,) = Recipe.model_validate_json(json.dumps(recipe_dict | {"stages": [stage]})).stages
    assert share(parsed, processes) == expected


FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_CPU": "True", "MASTER_PORT": "29500"}, "started only one, as it does with --cpu"),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed was asked for, which is not supported"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP of version 1 was asked for"),
        (FSDP | {"FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params is not supported"),
        (FSDP | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "set gradient_checkpointing in the recipe"),
        (FSDP, "on the CPU accelerate silently makes DDP of it"),
        ({"WORLD_SIZE": "2"}, "but not RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"LOCAL_RANK": "1"}, "but not RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
    ],
    ids=["one-of-several", "deepspeed", "fsdp1", "offload", "checkpointing", "no-gpu", "no-launch", "left-over"],
)
def test_requests_that_cannot_be_met(monkeypatch, environment, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        check_request()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "0"}, "RANK is 0, which is not below its WORLD_SIZE, 0"),
        ({"RANK": "3"}, "RANK is 3, which is not below its WORLD_SIZE, 1"),
        ({"WORLD_SIZE": "-1"}, "WORLD_SIZE must be a whole number, got '-1'"),
    ],
)
def test_environments_of_no_launch_end_in_one_line(tmp_path, monkeypatch, capfd, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["", "train", "hybrid", "--recipe", "demo", "--output", str(tmp_path / "run")])
    with pytest.raises(SystemExit, match="2"):
        run()
    assert capfd.readouterr().err == f"error: the environment's {message}\n"
    assert not (tmp_path / "run").exists()


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"4 processes were started on .*, which has 2 GPUs"):
        check_request()


@pytest.mark.parametrize(
    ("kind", "processes", "environment", "message"),
    [
        ("MULTI_CPU", 2, FSDP, "FSDP was asked for, but on the CPU accelerate silently makes MULTI_CPU"),
        ("NO", 1, {}, "2 processes were started, but accelerate sees 1"),
        ("DEEPSPEED", 2, {}, "accelerate made DEEPSPEED of a launch that did not ask for it"),
    ],
)
def test_what_accelerate_made_is_checked(monkeypatch, kind, processes, environment, message):
    for name, value in ({"WORLD_SIZE": "2"} | environment).items():
        monkeypatch.setenv(name, value)
    made = SimpleNamespace(num_processes=processes, distributed_type=DistributedType[kind], device=torch.device("cpu"))
    with pytest.raises(UserError, match=message):
        check_honoured(made)


def test_torchrun_itself(tmp_path):
    """The launcher that people use, with its agent's store, which outlives every rank."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = ["-m", "palimpsa_surgery", "train", "hybrid", "--recipe", "no-such", "--output", tmp_path / "run"]
    done = subprocess.run([*launcher, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, "the launcher's own"
    assert len(re.findall(r"^error: recipe 'no-such' is neither a file nor one of", done.stderr, re.M)) == 1
    assert len(re.findall(r"exitcode +: (?:2|-15) ", done.stderr)) == 2
    assert not (tmp_path / "run").exists()
