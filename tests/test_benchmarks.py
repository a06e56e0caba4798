"""The benchmarks refuse to time what is wrong, and say what they need."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

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
