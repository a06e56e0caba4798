"""The Triton kernels against the float64 loop through Triton's interpreter on the CPU.

The interpreter must be chosen before Triton is imported, so a process of its own makes the comparisons, each when a
test asks for it: workers of pytest-xdist that share this file share its work. Scans in float32 and float16 only: the
interpreter's bfloat16 products are wrong. Of the Hopper kernels those that are not Gluon; for the others there is
`test_hopper_lanes.py`.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import carry_cases
import conv_cases
import norm_cases

pytest.importorskip("triton")

SCANS = {
    "one-token": "Case(1, 1, 1, 4, 16, 1)",
    "ragged": "Case(1, 35, 2, 3, 20, 2, initial=True)",
    "documents-variance": "Case(2, 33, 2, 3, 16, 1, initial=True, documents=3, variance=True)",
    "no-importance": "Case(1, 17, 2, 2, 16, 1, beta=False)",
    "decay-to-zero": "Case(1, 60, 3, 2, 16, 1, initial=True, extreme='decay')",
    "float16": "Case(1, 17, 1, 4, 16, 1, dtype=torch.float16)",
    "strided": "Case(2, 17, 2, 3, 16, 1, initial=True, variance=True, strided=True, skip=True)",
    "skip": "Case(2, 70, 2, 5, 16, 2, initial=True, skip=True)",
    "rows-in-pieces": "Case(4, 17, 1, 2, 16, 1, initial=True, documents=2, skip=True)",
}
CONV_CHECKS = ("check_alone", "check_nan", "check_operators")
# Segments of 16 and 32 tokens, so that states pass between them; one head a launch, and few rows of a batch; for the
# convolution tiles of 64 tokens. Uninitialised memory is NaN. The interpreter truncates to bfloat16.
PROGRAM = """
import json, os, sys, traceback
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever else is printed is no answer
sys.path.insert(0, {tests!r})
import torch
import triton.language as tl
import carry_cases, conv_cases, norm_cases
from helpers import assert_close, poisoned
from scan_cases import Case, between_nan, check, make
from palimpsa_surgery.kernels import hopper_scan, triton_conv, triton_scan
from palimpsa_surgery.kernels.reference import palimpsa_scan_reference
from palimpsa_surgery.kernels.triton_step import palimpsa_step_triton

torch.set_num_threads(1)
triton_scan.FORWARD_SEGMENT, triton_scan.BACKWARD_SEGMENT, triton_scan.WORKSPACE_BYTES = 16, 32, 1
triton_scan.MAX_GRID = 3
triton_conv.BQ, triton_conv.R = 8, 8
hopper_scan.CARRY_TOKENS = 32

torch.empty, torch.Tensor.new_empty = poisoned(torch.empty), poisoned(torch.Tensor.new_empty)

def scan(case):
    half = case.dtype is torch.float16
    check(triton_scan.palimpsa_scan_triton, case, {{"all": 2e-3}} if half else {{"all": 2e-6}})

def step():
    arguments = make(Case(2, 3, 4, 5, 20, 2, initial=True, strided=True)).arguments
    y, final, _ = palimpsa_scan_reference(*arguments.values())
    state, D = between_nan(arguments["initial_state"]), between_nan(torch.rand(4))
    for t in range(3):
        token = [arguments[k] for k in ("x", "dt", "A", "B", "C", "beta", "I_prior")]
        token = [v[:, t] if v.ndim > 2 else v for v in token]
        expected = y[:, t] + D[:, None] * arguments["x"][:, t]
        assert_close(palimpsa_step_triton(*token, state, D), expected, 1e-5, "y")
    assert_close(state, final, 1e-6, "state")

def double_steps():
    arguments = make(Case(1, 17, 2, 3, 16, 1)).arguments
    results = []
    for arguments["dt"] in (arguments["dt"].requires_grad_(), arguments["dt"].detach().double().requires_grad_()):
        y = triton_scan.palimpsa_scan_triton(**arguments)[0]
        results.append((y, *torch.autograd.grad(y.sum(), arguments["dt"])))
    assert all(torch.equal(a.double(), b.double()) for a, b in zip(*results))

comparisons = {{name: lambda case=case: scan(case) for name, case in dict({scans}).items()}}
comparisons |= {{"step": step, "double-steps": double_steps}}
comparisons |= {{str(case): lambda case=case: norm_cases.check(case, "cpu") for case in norm_cases.CASES}}
comparisons |= {{"norm-operator": lambda: norm_cases.check_operator("cpu")}}
bounds = {{torch.float32: 1e-6, torch.float16: 4e-4, torch.bfloat16: 4e-3}}
comparisons |= {{str(case): lambda case=case: conv_cases.check(case, bounds) for case in conv_cases.COVERED}}
comparisons |= {{name: getattr(conv_cases, name) for name in {checks}}}
# B² is cut off to bfloat16
carry = lambda case: carry_cases.check(case, tl.float32, 2e-6)
comparisons |= {{f"carry {{case}}": lambda case=case: carry(case) for case in carry_cases.CASES}}
for line in sys.stdin:
    try:
        comparisons[json.loads(line)]()
        failure = None
    except Exception:
        failure = traceback.format_exc()
    print(json.dumps(failure), file=answers, flush=True)
"""
TIMEOUT = 300  # seconds


@pytest.fixture(scope="module")
def failure(tmp_path_factory) -> Iterator[Callable[[str], str | None]]:
    """Make a comparison: its traceback if it fails, None otherwise."""
    scans = ", ".join(f"[{name!r}, {case}]" for name, case in SCANS.items())
    program = PROGRAM.format(tests=str(Path(__file__).parents[1]), scans=f"[{scans}]", checks=CONV_CHECKS)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    log = tmp_path_factory.mktemp("interpreter") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):

        def make(name: str) -> str | None:
            late = threading.Timer(TIMEOUT, process.kill)
            late.start()
            try:
                print(json.dumps(name), file=process.stdin, flush=True)
                answer = process.stdout.readline()
            except BrokenPipeError:  # it ended with an earlier comparison
                answer = ""
            finally:
                late.cancel()
            assert answer, f"the interpreter's process ended or took {TIMEOUT} s:\n{log.read_text()[-3000:]}"
            return json.loads(answer)

        yield make
        process.communicate(timeout=60)
        assert process.returncode == 0, log.read_text()[-3000:]


@pytest.mark.parametrize("name", [*SCANS, "step", "double-steps"])
def test_equals_the_loop(failure, name):
    assert (traceback := failure(name)) is None, traceback


@pytest.mark.parametrize("name", [*map(str, norm_cases.CASES), "norm-operator"])
def test_norm_equals_its_definition(failure, name):
    assert (traceback := failure(name)) is None, traceback


@pytest.mark.parametrize("name", [*map(str, conv_cases.COVERED), *CONV_CHECKS])
def test_convolution(failure, name):
    assert (traceback := failure(name)) is None, traceback


@pytest.mark.parametrize("name", [f"carry {case}" for case in carry_cases.CASES])
def test_what_comes_from_later_segments(failure, name):
    assert (traceback := failure(name)) is None, traceback
