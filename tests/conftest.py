"""Fixtures shared by all tests. Tests never reach for the network, and use one thread per process."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # as the command line does where there is no terminal
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # pytest-xdist runs one process per core

import pytest

from palimpsa_surgery.kernels import mamba2_kernels
from palimpsa_surgery.surgery.assets import asset_path


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """Folder of the shipped native checkpoint: 12 layers, d_model 256, with its tokenizer."""
    return asset_path("tiny-mamba2")


@pytest.fixture(scope="session")
def kjv() -> Path:
    """The shipped prose, 4.4 MB of text."""
    return asset_path("kjv.txt")


@pytest.fixture(scope="session")
def reference_path() -> Path:
    """Inputs and the last eight positions' logits of the tiny checkpoint, computed by mamba_ssm itself.

    Keys `NAME.T.input_ids` [2, T] int64 and `NAME.T.logits` [2, min(T, 8), 4096] float32.
    """
    return Path(__file__).parent / "data" / "tiny-mamba2-reference.safetensors"


@pytest.fixture
def mamba2_in_pytorch(monkeypatch):
    """The kept layers do not use `mamba_ssm`, whose kernels take long to compile."""
    monkeypatch.setattr(mamba2_kernels, "_kernels", lambda: None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest test first, so that other processes do the rest meanwhile."""
    items.sort(key=lambda item: item.path.name != "test_demo.py")


@dataclass(frozen=True)
class Outcome:
    """What a command line call left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The message of a user error, having checked that it is one line and exit code 2."""
        assert self.code == 2, f"exit code {self.code}\n{self.stderr}"
        lines = self.stderr.strip().splitlines()
        assert len(lines) == 1, self.stderr
        assert lines[0].startswith("error: "), self.stderr
        return lines[0].removeprefix("error: ")


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run a command line in this process: `cli("replace", folder, "--top-k", 4)`."""
    from palimpsa_surgery.cli.main import main

    def call(*arguments: object) -> Outcome:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call
