"""The benchmarks refuse to time what is wrong, and say what they need."""

import contextlib
import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import torch

from palimpsa_surgery.kernels import palimpsa_scan

pytest.importorskip("triton")
FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def kernels(monkeypatch):
    """`benchmarks/kernels.py` as a module."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", ["kernels.py"])
    spec = importlib.util.spec_from_file_location("benchmark_of_kernels", FOLDER / "kernels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("error", [0.02, float("nan")])
def test_wrong_kernels_are_not_timed(error, kernels, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "verify", lambda: {"y": 1e-3, "dt": error})
    monkeypatch.setattr(kernels, "milliseconds", lambda *_: pytest.fail("timed"))
    assert kernels.main() == 1
    assert "error: wrong results, nothing is timed" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(kernels, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main() == 2
    assert capsys.readouterr().err == "error: needs a CUDA device\n"


def test_rows_are_printed_and_written(kernels, monkeypatch, capsys, tmp_path):
    """With the GPU's clocks and counters replaced, and kernels that run anywhere."""
    argv = ["kernels.py", "--lengths", "8", "16", "--heads", "2", "--output", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", argv)

    def make(batch, tokens, heads, head_dim, state_size, groups):
        keys = (batch, tokens, groups, state_size)
        rows = [torch.rand(size).bfloat16() for size in ((batch, tokens, heads, head_dim), keys, keys)]
        dt, A = torch.rand(batch, tokens, heads), torch.ones(heads)
        return dict(zip(kernels.NAMES, (rows[0], dt, A, rows[1], rows[2], rows[0], A), strict=True))

    def backward_refuses(**arguments):
        if torch.is_grad_enabled():
            raise NotImplementedError("not on this GPU")
        return arguments["x"]

    fake_cuda = {
        "is_available": lambda: True,
        "get_device_name": lambda: "some GPU",
        "synchronize": lambda: None,
        "CUDAGraph": lambda: types.SimpleNamespace(replay=lambda: None),
        "graph": lambda graph: contextlib.nullcontext(),
    }
    for name, value in fake_cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(kernels, "verify", lambda: {"y": 1e-3})
    monkeypatch.setattr(kernels, "make", make)
    monkeypatch.setattr(kernels, "milliseconds", lambda function, repeats: 2.0)
    monkeypatch.setattr(kernels, "extra_gibibytes", lambda function: 0.5)
    scan = (lambda **a: palimpsa_scan(**a).y, kernels.NAMES[:-1])
    compared = {"ssd": scan, "simple_gla": (backward_refuses, kernels.NAMES[:5]), "palimpsa": scan}
    monkeypatch.setattr(kernels, "kernels", lambda: compared)
    assert kernels.main() == 0
    printed = capsys.readouterr().out
    assert "simple_gla refuses its backward pass: NotImplementedError: not on this GPU" in printed
    report = json.loads((tmp_path / "found.json").read_text())
    assert [(row["kernel"], row["tokens"]) for row in report["rows"]] == [(k, t) for t in (8, 16) for k in compared]
    for row in report["rows"]:
        assert row["forward_ms_to_ssd"] == 1
        assert row["both_ms_to_ssd"] == (None if row["kernel"] == "simple_gla" else 1)
        assert f"{row['kernel']:<11}{row['tokens']:>8}" in printed
    assert set(report["decode_us"]) == {"1", "8"}
