"""What Triton specialises the kernels on: nothing that changes from one batch to the next."""

import pytest
import torch

from palimpsa_surgery.kernels import hopper_scan, triton_norm, triton_scan
from scan_cases import Case, make

jit = pytest.importorskip("triton.runtime.jit")
compiler = pytest.importorskip("triton.compiler")
backends = pytest.importorskip("triton.backends.compiler")


class Launches:
    """Stands in for a kernel and launches nothing: what Triton would compile for each launch's arguments."""

    def __init__(self, kernel):
        backend = compiler.make_backend(backends.GPUTarget("cuda", 90, 32))
        self.bind = jit.create_function_from_signature(kernel.signature, kernel.params, backend)
        self.compiled = set()

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            _, specialization, options = self.bind(*arguments, **options)
            self.compiled.add((str(specialization), str(options)))

        return launch


@pytest.mark.parametrize("tuned", [True, False], ids=["hopper", "portable"])
def test_other_lengths_and_heads_compile_nothing_anew(tuned, monkeypatch):
    kernels = {}
    for module in (triton_scan, hopper_scan):
        for name, value in list(vars(module).items()):
            if isinstance(value, jit.JITFunction):
                monkeypatch.setattr(module, name, kernels.setdefault(f"{module.__name__}.{name}", Launches(value)))
    monkeypatch.setattr(triton_scan, "tuned_fits", lambda *_: tuned)
    data = make(Case(1, 700, 16, 64, 128, 1, torch.bfloat16))
    for time, workspace in ((700, 2**30), (700, 2**25), (33, 2**30), (512, 1), (1, 1)):
        monkeypatch.setattr(triton_scan, "WORKSPACE_BYTES", workspace)
        x, dt, A, B, C, beta, I_prior, _ = (
            v[:, :time].clone() if v is not None and v.ndim > 2 else v for v in data.arguments.values()
        )
        triton_scan._forward(x, dt, A, B, C, beta, I_prior, None, None, False)
        triton_scan._backward(x, dt, A, B, C, beta, I_prior, None, None, data.dy[:, :time], None, None)
    found = {name: len(kernel.compiled) for name, kernel in kernels.items() if kernel.compiled}
    assert len(found) >= 7
    twice = ("pass_states", "reduce_heads")  # forwards and backwards; the first heads and those that follow
    assert found == {name: 2 if name.endswith(twice) else 1 for name in found}


def test_other_numbers_of_rows_compile_no_norm_anew(monkeypatch):
    kernels = {name: Launches(getattr(triton_norm, name)) for name in ("norm_forward", "norm_backward")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(triton_norm, name, kernel)
    for rows in (1, 16, 33, 700, 20000):
        x, weight = torch.zeros(1, rows, 256, dtype=torch.bfloat16), torch.zeros(256)
        gate = torch.zeros(1, rows, 528, dtype=torch.bfloat16)[..., :256]
        triton_norm._norm(x, gate, weight, 1e-5, 256, x.dtype)
        triton_norm._norm_backward(x, gate, weight, x, 1e-5, 256)
    assert {name: len(kernel.compiled) for name, kernel in kernels.items()} == dict.fromkeys(kernels, 1)


@pytest.mark.parametrize("capability", [75, 80, 90, 120])
@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
def test_norm_compiles_without_a_gpu(gated, capability):
    """At mamba2-2.7b's sizes for Turing, which has no bfloat16 of its own, to Blackwell."""
    sizes = triton_norm._sizes(5120 if gated else 2560)
    half, x = "*bf16", "*bf16" if gated else "*fp32"
    types = {"x": x, "dx": x, "weight": "*fp32", "dw_part": "*fp32", "eps": "fp32"}
    types |= dict.fromkeys(("gate", "out", "dout", "dgate"), half)
    constants = {"BN": sizes["BN"], "HAS_GATE": gated}
    for kernel in (triton_norm.norm_forward, triton_norm.norm_backward):
        signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        source = compiler.ASTSource(kernel, signature, constants)
        options = {"num_warps": sizes["num_warps"]}
        compiled = compiler.compile(source, backends.GPUTarget("cuda", capability, 32), options)
        assert f".target sm_{capability}" in compiled.asm["ptx"]
        assert compiled.asm["cubin"]
