"""Initial states and dropout on two processes: what one process has, and what a killed run goes on with."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from palimpsa_surgery.surgery.checkpoints import load_model

RUNNER = Path(__file__).with_name("run_ranks.py")
STATES = [
    {"kind": "zero"},
    {"kind": "random_noise", "sigma": 0.5},
    {"kind": "fitted_noise"},
    {"kind": "state_passing", "zero_probability": 0.4},
    {"kind": "tbtt"},
]


@pytest.fixture(scope="module")
def launches(tmp_path_factory, finished, text_file) -> dict[str, SimpleNamespace]:
    """Every kind of state on one and on two ranks; and two ranks with dropout: undisturbed, killed, resumed."""
    folder = tmp_path_factory.mktemp("states")
    stage = {
        "data": {"kind": "text", "files": [str(text_file)], "held_out": 0.1},
        "packing": {"reset_at_documents": False},
        "sequence_length": 32,
        "batch_tokens": 256,
        "tokens": 512,
        "learning_rate": 1e-3,
        "importance_learning_rate": 1e-2,
    }

    def kinds(micro: int) -> list[dict]:
        return [stage | {"name": s["kind"].replace("_", "-"), "state": s, "micro_batch_tokens": micro} for s in STATES]

    lora = {"lora": {"rank": 2, "alpha": 4.0, "dropout": 0.5}, "tokens": 768, "micro_batch_tokens": 64}
    stages = {
        "one": kinds(128),  # two passes a step, of four rows
        "two": kinds(64),  # of two rows on each rank
        "dropout": [stage | lora | {"name": "fitted-noise", "state": STATES[2]}],
    }
    for name, entries in stages.items():
        evaluation = {"tokens": 96, "layers_every": None}
        recipe = {"name": "states", "checkpoint_steps": 1, "evaluation": evaluation, "stages": entries}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    planned = []
    for name, recipe, output, ranks, options in (
        ("one", "one", "one", 1, {}),
        ("two", "two", "two", 2, {}),
        ("whole", "dropout", "whole", 2, {"log_masks": str(folder / "whole-")}),
        ("killed", "dropout", "stopped", 2, {"kill_at": 2}),
        ("resumed", "dropout", "stopped", 2, {"log_masks": str(folder / "resumed-")}),
    ):
        arguments = ["train", str(finished.plan.source.path), "--recipe", str(folder / f"{recipe}.yaml")]
        arguments += ["--output", str(folder / output)]
        planned.append({"ranks": ranks, "arguments": arguments, "log": str(folder / f"{name}.log"), **options})
    (folder / "launches.json").write_text(json.dumps(planned))
    command = [sys.executable, RUNNER, folder / "launches.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return {
        Path(entry["log"]).stem: SimpleNamespace(
            codes=codes, run=Path(entry["arguments"][-1]), log=Path(entry["log"]).read_text()
        )
        for entry, codes in zip(planned, json.loads(done.stdout), strict=True)
    }


@pytest.mark.parametrize("stage", [f"{number:02}-{s['kind']}" for number, s in enumerate(STATES, start=1)])
def test_two_ranks_start_from_the_states_of_one(launches, stage):
    assert launches["one"].codes == [0], launches["one"].log
    assert launches["two"].codes == [0, 0], launches["two"].log
    one, two = (
        [json.loads(line) for line in (launches[name].run / stage.replace("_", "-") / "log.jsonl").open()]
        for name in ("one", "two")
    )
    assert len(one) == 2
    for ours, theirs in zip(two, one, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)


def masks(run: Path) -> list[list[str]]:
    """What dropout kept, in the order of calls, on each rank."""
    return [run.with_name(f"{run.name}{rank}").read_text().split() for rank in (0, 1)]


def test_each_rank_drops_something_else(launches):
    first, second = masks(launches["whole"].run.with_name("whole-"))
    assert len(first) == len(second) == 3 * 2 * 2, "steps, passes, projections"
    assert len({*first, *second}) == len(first) + len(second)


def test_killed_and_resumed_is_the_same_to_the_bit(launches):
    whole, resumed = launches["whole"], launches["resumed"]
    assert launches["killed"].codes[0] == -9
    assert whole.codes == resumed.codes == [0, 0], whole.log + resumed.log
    ours, theirs = (load_model(launch.run / "01-fitted-noise" / "final").state_dict() for launch in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    expected = [rank[4:] for rank in masks(whole.run.with_name("whole-"))]
    assert masks(whole.run.with_name("resumed-")) == expected, "it goes on behind the first step"
