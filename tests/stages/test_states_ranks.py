"""Carried states on two processes: each has its own, and a run that was killed goes on to the same bits."""

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


@pytest.fixture(scope="module")
def launches(tmp_path_factory, finished, text_file) -> dict[str, SimpleNamespace]:
    """An undisturbed run, one killed in its first stage's second checkpoint, and its resumption."""
    folder = tmp_path_factory.mktemp("states")
    stage = {
        "data": {"kind": "text", "files": [str(text_file)], "held_out": 0.1},
        "sequence_length": 32,
        "batch_tokens": 128,
        "micro_batch_tokens": 32,  # two micro-batches a step on each of two ranks
        "tokens": 384,
        "learning_rate": 1e-3,
        "importance_learning_rate": 1e-2,
    }
    stages = [stage | {"name": kind.replace("_", "-"), "state": {"kind": kind}} for kind in ("fitted_noise", "tbtt")]
    recipe = {"name": "states", "checkpoint_steps": 1, "evaluation": {"tokens": 96}, "stages": stages}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    planned = []
    for name, output, ranks, options in (
        ("whole", "whole", 2, {}),
        ("killed", "stopped", 2, {"kill_at": 2}),
        ("resumed", "stopped", 2, {}),
    ):
        arguments = ["train", str(finished.plan.source.path), "--recipe", str(folder / "recipe.yaml")]
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


def test_killed_and_resumed_is_the_same_to_the_bit(launches):
    whole, resumed = launches["whole"], launches["resumed"]
    assert launches["killed"].codes[0] == -9
    assert whole.codes == resumed.codes == [0, 0], whole.log + resumed.log
    for stage in ("01-fitted-noise", "02-tbtt"):
        ours, theirs = (load_model(launch.run / stage / "final").state_dict() for launch in (resumed, whole))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), stage
