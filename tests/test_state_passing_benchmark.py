"""`benchmarks/state_passing.py`: its text, its measure against the plain way, and a whole run of a few steps."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers import assert_close

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "state_passing.py"
SETTINGS = [
    *("--shape", "64", "2", "8", "--vocab-size", "64", "--palimpsa-layers", "1", "--length", "16", "--batch", "4"),
    *("--window", "128", "--windows", "4", "--device", "cpu"),
]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_state_passing", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ids():
    return torch.randint(0, 64, (40_000,), generator=torch.Generator().manual_seed(0))


def text_of(benchmark, ids):
    return benchmark.Text(ids, length=16, batch=4, window=128, windows=4, seed=0)


def test_nothing_that_is_evaluated_is_trained_on(benchmark):
    ids = torch.arange(40_000)  # each its own position
    text = text_of(benchmark, ids)
    assert not set(text.training.tolist()) & set(text.windows.flatten().tolist())
    assert (text.windows.diff() == 1).all()
    assert len(text.training) == 40_000 - 16 * (int(40_000 * benchmark.HELD_OUT) // 16)


def test_rows_in_order_read_on(benchmark):
    batches = text_of(benchmark, torch.arange(40_000)).in_order(seed=0)
    (first, started), (second, goes_on) = next(batches), next(batches)
    assert not started.any()
    assert goes_on.all()
    assert torch.equal(second[:, 0], first[:, -1] + 1)


def test_the_measure_equals_one_long_pass_and_a_short_context(benchmark, ids, monkeypatch):
    monkeypatch.setattr(benchmark, "PIECE", 48)
    monkeypatch.setattr(benchmark, "ROWS", 3)
    parser_args = benchmark.parse(["run", "tokens.npy", "--output", "x", *SETTINGS])
    model = benchmark.make_model(parser_args)
    windows = text_of(benchmark, ids).windows
    whole, short = benchmark.evaluate(model, windows, list(range(1, 130)), 16)
    with torch.no_grad():
        logits = model(windows[:, :-1]).logits
        expected = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(4, -1).sum(0)
        fresh = model(windows[:, 32:64]).logits[:, 16:]
        anew = F.cross_entropy(fresh.flatten(0, 1), windows[:, 49:65].flatten(), reduction="none").view(4, -1).sum(0)
    assert_close(torch.tensor(whole.nll_sums), expected, 1e-5)
    assert_close(torch.tensor(short.nll_sums)[48:64], anew, 1e-5)
    assert short.nll_sums[:32] == pytest.approx(whole.nll_sums[:32], rel=1e-5), "as short in both"


def test_a_whole_run(benchmark, ids, tmp_path, capsys):
    np.save(tmp_path / "tokens.npy", ids.numpy().astype(np.uint16))
    arms = ["zero", "random_noise", "fitted_noise", "state_passing", "tbtt"]
    command = ["run", tmp_path / "tokens.npy", "--output", tmp_path / "out", *SETTINGS, "--arms", *arms]
    command += ["--pretrain-seconds", "0.5", "--steps", "2", "--arm-seconds", "20", "--degraded-by"]
    with pytest.raises(SystemExit, match=r"at 4096 tokens the model does not degrade by a factor of 9\.0"):
        benchmark.main([*map(str, command), "9"])
    benchmark.main([*map(str, command), "0"])
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert list(results["arms"]) == ["base", *arms]
    assert {arm["training"]["steps"] for name, arm in results["arms"].items() if name != "base"} == {2}
    assert len({json.dumps(arm["perplexity"]) for arm in results["arms"].values()}) == len(results["arms"])
    assert (tmp_path / "out" / "perplexity.png").stat().st_size > 5000
    assert "| position | base | zero | random_noise | fitted_noise | state_passing | tbtt |" in capsys.readouterr().out


def test_text_becomes_tokens(benchmark, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("In the beginning")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "b.py").write_text("import os\n")
    benchmark.main(["tokenise", str(tmp_path / "a.txt"), str(tmp_path / "code"), "--output", str(tmp_path / "t.npy")])
    tokens = np.load(tmp_path / "t.npy")
    assert tokens.dtype == np.uint16
    assert (tokens == tokens[-1]).sum() == 2, "one end-of-text token for each document"
    assert f"{len(tokens)} tokens" in capsys.readouterr().out
