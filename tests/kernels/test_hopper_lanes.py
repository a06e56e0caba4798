"""The Hopper kernels on the CPU, those of the backward pass lane by lane, against the float64 loop.

In a process of its own, where Triton interprets the kernels around them: the variable that asks for it is read when
the package is imported.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
import triton.language as tl
from lane_machine import load_kernels
from helpers import assert_close
from palimpsa_surgery.kernels import hopper_scan, triton_scan
from palimpsa_surgery.kernels.decay import document_numbers
from palimpsa_surgery.kernels.reference import palimpsa_scan_reference
from scan_cases import NAMES, Case, differentiate, make

torch.set_num_threads(1)
read_out, segment_adjoints, segment_gradients = load_kernels()
hopper_scan.read_out_kernel = read_out
hopper_scan.segment_adjoints_kernel, hopper_scan.segment_gradients_kernel = segment_adjoints, segment_gradients
triton_scan.tuned_fits = lambda x, beta, B: True
triton_scan.FORWARD_SEGMENT = triton_scan.TUNED_SEGMENT = 64
# Triton's interpreter multiplies bfloat16 matrices wrongly
triton_scan._dot_types = lambda x: {{"DOT": tl.float32, "PRECISION": "ieee"}}

data = make(Case(1, 70, 1, 64, 128, 1, torch.bfloat16, initial=True, documents=3))
expected = differentiate(palimpsa_scan_reference, data, False, torch.float64)
documents = document_numbers(data.seq_idx).to(torch.int32)
y, final_state, _ = triton_scan._forward(*data.arguments.values(), documents, False)
assert_close(y, expected["y"], 2e-3, "y")
assert_close(final_state, expected["final_state"], 1e-6, "final_state")
gradients = triton_scan._backward(*data.arguments.values(), documents, data.dy, data.dfinal, None)
# and rounds to bfloat16 by cutting off: what it prepares errs twice as much and to one side, which sums over all
# tokens, rows and keys show most
tolerances = {{"A": 3e-2, "I_prior": 3e-2}}
for name, gradient in zip(NAMES, gradients, strict=True):
    assert_close(gradient, expected["d" + name], tolerances.get(name, 6e-3), "d" + name)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton for its interpreter")
def test_scan_and_gradients():
    script = SCRIPT.format(tests=str(Path(__file__).parents[1]))
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
