"""`benchmarks/mqar.py`: the models of A.8, its shortcuts against the plain way, and a whole run of a few steps."""

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

from helpers import assert_close

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def mqar():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("benchmark_mqar", BENCHMARKS / "mqar.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules["benchmark_mqar"] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.parametrize("name", ["Mamba2", "Palimpsa-M"])
def test_models_start_as_in_the_paper(mqar, name):
    model = mqar.make_model(name, seed=3)
    for layer in model.backbone.layers:
        mixer = layer.mixer
        assert mixer.in_proj.weight.shape == (2 * 256 + 2 * 8 * 16 + 8, 128)
        torch.testing.assert_close(mixer.decay_rate(), torch.linspace(0.01, 0.16, 8))
        dt = mixer.time_step(torch.zeros(1, 1, 8))[0, 0]
        torch.testing.assert_close(dt.log10().diff(), torch.full((7,), 2 / 7), rtol=1e-3, atol=0)
        assert (dt[0].item(), dt[-1].item()) == pytest.approx((0.001, 0.1), rel=1e-3)
        assert hasattr(mixer, "b_scale") == (name == "Palimpsa-M")
        if name == "Palimpsa-M":
            assert (mixer.b_scale == 1).all()
    again, other = mqar.make_model(name, seed=3), mqar.make_model(name, seed=4)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)


def test_a_step_is_that_of_the_whole_model(mqar):
    examples = mqar.Examples.make(8, 32, seed=1, device=torch.device("cpu"))
    run = mqar.Run("Palimpsa-M", 0, 1e-3)
    run.start(torch.device("cpu"))
    run.begin(examples, batch=4, steps=3)
    rows = run.order[0]
    labels = torch.full((4, 33), -100)
    labels[:, 17::2] = examples.answers[rows]
    padded = torch.nn.functional.pad(examples.input_ids[rows], (0, 1))
    expected = run.model(padded, labels=labels).loss
    run.train_step()
    assert_close(run.losses[0], expected, 1e-6)
    assert run.rate_now.item() == pytest.approx(1e-3 / mqar.WARMUP)
    assert int(run.step) == 1


def test_learning_rates_rise_and_fall(mqar):
    run = mqar.Run("Mamba2", 0, 4e-3)
    run.start(torch.device("cpu"))
    run.begin(mqar.Examples.make(8, 32, seed=1, device=torch.device("cpu")), batch=2, steps=400)
    run.plan(200)
    expected = [4e-3 * min(n / 50, 1) * (1 + math.cos(math.pi * (n - 1) / 200)) / 2 for n in range(1, 201)]
    torch.testing.assert_close(run.schedule[:200], torch.tensor(expected))
    epoch = run.order.flatten()[:8]
    assert epoch.sort().values.tolist() == list(range(8))


def test_it_runs_and_reports(mqar, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mqar, "VOCABULARY", 64)
    options = (
        f"--output {tmp_path} --lengths 8 16 --seeds 0 1 --rates 1e-3 1e-2 --examples 16 --epochs 2 --batch 8 "
        "--probe-every 2 --probed 2 --test-examples 4 --keep-best --device cpu --minutes 5"
    )
    mqar.main(options.split())
    table = capsys.readouterr().out
    assert "| Palimpsa-M | 0.01 | 2 |" in table
    record = json.loads((tmp_path / "results.json").read_text())
    assert [phase["steps"] for phase in record["phases"]] == [4, 4]
    assert [phase["runs"] for phase in record["phases"]] == [8, 4]
    assert len(record["runs"]) == 8
    finished = [run for run in record["runs"] if "16" in run["accuracies"]]
    assert len(finished) == 4
    assert len({(run["name"], run["rate"]) for run in finished}) == 2
    for run in finished:
        assert [entry["length"] for entry in run["history"]] == [8, 16]
        assert len(run["history"][0]["metaplasticity_ratios"]) == (2 if run["name"] == "Palimpsa-M" else 0)
    for name in ("accuracy.png", "dynamics.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_no_limit_of_time_is_valid_json(mqar, tmp_path):
    mqar._write(argparse.Namespace(output=tmp_path, minutes=math.inf, seeds=[0]), "CPU", [], [])
    record = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert record["options"] == {"minutes": None, "seeds": [0]}
