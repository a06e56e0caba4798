"""The Hopper kernels on the CPU, lane by lane, against the float64 loop.

The whole scan in a process of its own, where Triton interprets the kernels around them: the variable that asks for it
is read when the package is imported.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from helpers import assert_close
from lane_machine import load_kernels
from palimpsa_surgery.kernels import hopper_scan
from palimpsa_surgery.kernels.decay import document_numbers
from palimpsa_surgery.kernels.reference import palimpsa_scan_reference
from scan_cases import Case, make

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
import carry_cases
from lane_machine import load_kernels
from helpers import assert_close, poisoned
from palimpsa_surgery.kernels import hopper_scan, triton_scan
from palimpsa_surgery.kernels.decay import document_numbers
from palimpsa_surgery.kernels.reference import palimpsa_scan_reference
from scan_cases import Case, differentiate_exactly, make

torch.set_num_threads(1)
hopper_scan.read_out_kernel, hopper_scan.segment_gradients_kernel = load_kernels()
triton_scan.tuned_fits = lambda x, beta, B: True
# Triton's interpreter multiplies bfloat16 matrices wrongly
triton_scan._dot_types = lambda x: {{"DOT": tl.float32, "PRECISION": "ieee"}}
# and cuts off what does not fit into bfloat16
convert = interpreter._convert_float
def nearest(values, source, target, rounding):
    if source == tl.float32 and target == tl.bfloat16:
        return torch.from_numpy(values.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)
    return convert(values, source, target, rounding)
interpreter._convert_float = nearest

# uninitialised memory is NaN
torch.empty, torch.empty_like = poisoned(torch.empty), poisoned(torch.empty_like)
torch.Tensor.new_empty = poisoned(torch.Tensor.new_empty)

{check}
"""

SCAN = """
expected = differentiate_exactly(palimpsa_scan_reference, data, False)
names = ("x", "dt", "A", "B", "C", "beta", "I_prior", "D", "initial_state")
arguments = [data.arguments.get(name) for name in names]
documents = None if data.seq_idx is None else document_numbers(data.seq_idx).to(torch.int32)
y, final_state, _ = triton_scan._forward(*arguments, documents, False)
assert_close(y, expected["y"], 2e-3, "y")
assert_close(final_state, expected["final_state"], 1e-6, "final_state")
gradients = triton_scan._backward(*arguments, documents, data.dy, data.dfinal, None)
# sums over all tokens, rows and keys, which cancel
tolerances = {"A": 8e-3, "I_prior": 8e-3}
for name, gradient in zip(names, gradients, strict=True):
    if gradient is not None:
        assert_close(gradient, expected["d" + name], tolerances.get(name, 3e-3), "d" + name)
"""


# Two segments of two heads, all by one program; two segments with a span of three blocks, the second going on with a
# document that begins in the first, whose first block is in two parts; of 24 tokens each, alpha is 1e-3, 0, 1 and as
# usual; states of the first keys alone outgrow what was there, and blocks are whole, or of a few parts, or of a token
# each
CASES = {
    "documents": """
triton_scan.FORWARD_SEGMENT = triton_scan.TUNED_SEGMENT = 16
triton_scan.tuned_plan, hopper_scan.programs_on = lambda *_: (2, 1), lambda device: 1
data = make(Case(1, 20, 2, 64, 128, 1, torch.bfloat16, initial=True, documents=3, skip=True))
""",
    "carried": """
triton_scan.FORWARD_SEGMENT = triton_scan.TUNED_SEGMENT = 64
data = make(Case(1, 68, 1, 64, 128, 1, torch.bfloat16, initial=True, skip=True))
data.arguments["A"][:] = 0.3
data.seq_idx = (torch.arange(68) >= 5)[None].int()
""",
    "stretches": """
triton_scan.FORWARD_SEGMENT = triton_scan.TUNED_SEGMENT = 64
data = make(Case(1, 100, 1, 64, 128, 1, torch.bfloat16, initial=True, extreme="stretches"))
""",
    "outgrown": """
triton_scan.FORWARD_SEGMENT = triton_scan.TUNED_SEGMENT = 64
data = make(Case(1, 48, 1, 64, 128, 1, torch.bfloat16, initial=True))
data.arguments["A"][:] = 1
data.arguments["dt"][:, :32], data.arguments["dt"][:, 32:] = 0.05, 1.5
data.arguments["B"][:, 20:, :, :64] *= 200
data.arguments["beta"][:, :32] = 0.05
""",
}


CHECKS = {name: case + SCAN for name, case in CASES.items()} | {
    # of a program for each head
    "anchors": """
hopper_scan.programs_on = lambda device: 64
case = Case(1, 40, 1, 64, 128, 1, torch.bfloat16, documents=2, extreme="large B")
carry_cases.check(case, tl.float32, 2e-6, kernel=hopper_scan.segment_gradients_kernel)
""",
}


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton for its interpreter")
def test_in_a_process_of_its_own(check):
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]), check=CHECKS[check])
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]


def states_at(starts, data):
    """The float64 loop's states at these tokens `[b, h, starts, 2, p, n]`, as the read-out takes them."""
    states = [data.arguments["initial_state"]]
    for start in starts[1:]:
        arguments = {name: (v[:, :start] if v.ndim > 2 else v).double() for name, v in data.arguments.items()}
        arguments["initial_state"] = states[0].double()
        seq_idx = None if data.seq_idx is None else data.seq_idx[:, :start]
        _, state, _ = palimpsa_scan_reference(**arguments, seq_idx=seq_idx)
        states.append(state.float())
    return torch.stack(states, 2)


EXTREMES = ("", "short memory", "stretches", "huge importance", "decay", "no step", "tiny step", "large B")


@pytest.mark.parametrize(
    "case",
    [
        Case(2, 37, 2, 64, 128, 2, torch.bfloat16, initial=True, documents=3, skip=True),
        Case(1, 50, 2, 64, 128, 1, torch.bfloat16, initial=True, documents=5, extreme="no step"),
        *(Case(1, 100, 1, 64, 128, 1, torch.bfloat16, initial=True, extreme=extreme) for extreme in EXTREMES),
    ],
    ids=str,
)
def test_every_token_of_the_read_out(case, monkeypatch):
    monkeypatch.setattr(hopper_scan, "read_out_kernel", load_kernels()[0])
    data = make(case)
    segment = 80
    D = data.arguments.pop("D", None)
    expected, _, _ = palimpsa_scan_reference(*(v.double() for v in data.arguments.values()), data.seq_idx)
    if D is not None:
        expected += D[:, None] * data.arguments["x"]
    states = states_at([*range(0, case.time, segment), case.time], data)
    documents = None if data.seq_idx is None else document_numbers(data.seq_idx).to(torch.int32)
    y = torch.full_like(data.dy, float("nan"))
    given = {name: v for name, v in data.arguments.items() if name != "initial_state"}
    hopper_scan.read_out(**given, D=D, doc=documents, states=states, y=y, segment=segment)
    # a document that begins with dt = 0 has zeros
    errors = (y - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    assert errors.max() < 4e-3, f"token {errors.amax((0, 2)).argmax()}: {errors.max():.2e}"
    # a part left out of the operands rounds more of them otherwise
    assert (y != expected.bfloat16()).float().mean() < 5e-3


def test_a_step_that_is_nan_reaches_no_token_before_it(monkeypatch):
    monkeypatch.setattr(hopper_scan, "read_out_kernel", load_kernels()[0])
    data = make(Case(1, 40, 1, 64, 128, 1, torch.bfloat16, initial=True, documents=10))
    states = states_at([0, 40], data)
    data.arguments["dt"][:, 14] = float("nan")
    expected, _, _ = palimpsa_scan_reference(*(v.double() for v in data.arguments.values()), data.seq_idx)
    y = torch.zeros_like(data.dy)
    given = {name: v for name, v in data.arguments.items() if name != "initial_state"}
    documents = document_numbers(data.seq_idx).to(torch.int32)
    hopper_scan.read_out(**given, D=None, doc=documents, states=states, y=y, segment=48)
    assert_close(y[:, :14], expected[:, :14], 4e-3)
    assert y[:, 14:16].isnan().all()
