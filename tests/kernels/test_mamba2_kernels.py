"""How `mamba_ssm`'s kernels are called, on the CPU: stand-ins compute what they do, in their own terms."""

import pytest
import torch

from helpers import assert_close
from palimpsa_surgery.kernels import mamba2_kernels, scan, ssd_scan, ssd_step
from palimpsa_surgery.kernels.ssd import ssd_scan_chunked


def arguments(time: int) -> list[torch.Tensor]:
    """x, dt, A, B, C and D of 4 heads in 2 groups, in float32."""
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    x, B, C = (uniform(2, time, *sizes) - 0.5 for sizes in ((4, 3), (2, 5), (2, 5)))
    return [x, uniform(2, time, 4), uniform(4) + 0.1, B, C, uniform(4)]


def scan_kernel(x, dt, A, B, C, D, chunk_size, initial_states, seq_idx, return_final_states):
    """D arrives from 2.3.0 on; the gradient of it is wrong before."""
    assert (D is None) == (mamba2_kernels._kernels()["version"] < "2.3")
    assert D is None or D.is_contiguous()
    y, state = ssd_scan_chunked(x, dt, -A, B, C, initial_states, seq_idx, return_final_states)
    y = y if D is None else y + D[:, None] * x
    return (y, state) if return_final_states else y


def step_kernel(state, x, dt, A, B, C, D, dt_bias):
    """Returns a tensor of x's strides, as its `empty_like`."""
    heads = x.shape[1] // B.shape[1]
    B, C = (v.repeat_interleave(heads, 1)[:, :, None] for v in (B, C))
    dt = (dt + dt_bias)[..., None]
    state.copy_(state * torch.exp(A * dt) + dt * x[..., None] * B)
    return torch.empty_like(x).copy_((state * C).sum(-1) + D * x)


@pytest.fixture(params=["2.2.6.post3", "2.3.2.post1"])
def stand_ins(request, monkeypatch):
    kernels = {"scan": scan_kernel, "step": step_kernel, "version": request.param}
    monkeypatch.setattr(scan, "kernels_take", lambda *_: True)
    monkeypatch.setattr(mamba2_kernels, "_kernels", lambda: kernels)


def test_the_skip_reaches_only_versions_whose_gradient_is_right(stand_ins):
    *given, D = arguments(9)
    D = torch.stack((D, D), -1)[:, 0].requires_grad_()
    y, _ = ssd_scan(*given, D=D)
    expected = ssd_scan_chunked(*given, None, None, False)[0] + D[:, None] * given[0]
    assert_close(y, expected, 1e-6)
    (gradient,) = torch.autograd.grad(y.square().sum(), D)
    assert_close(gradient, (2 * expected * given[0]).sum((0, 1, 3)), 1e-5)


@pytest.mark.parametrize("backend", ["eager", "seen", "aot_eager", "inductor"])
def test_the_step_is_one_operator_when_compiled(backend, stand_ins):
    x, dt, A, B, C, D = arguments(1)
    x = x[:, 0].transpose(0, 1).contiguous().transpose(0, 1)  # [b, h, p] whose heads come first in memory
    given = (x, dt[:, 0], A, B[:, 0], C[:, 0])

    def run(state):
        return ssd_step(*given, state, D) * 2

    operators = []

    def seen(graph, inputs):
        operators.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    if backend == "seen":
        compiled = torch.compile(run, backend=seen, fullgraph=True)
    else:
        compiled = run if backend == "eager" else torch.compile(run, backend=backend, fullgraph=True)
    states = [torch.ones(2, 4, 3, 5) for _ in range(2)]
    y = compiled(states[0])
    expected, final = ssd_scan_chunked(*(v if v is A else v[:, None] for v in given), states[1], None, True)
    assert_close(y, 2 * (expected[:, 0] + D[:, None] * x), 1e-6)
    assert_close(states[0], final, 1e-6)
    assert backend != "seen" or sum("ssd_step" in name for name in operators) == 1


def test_the_step_passes_torch_library_checks(stand_ins):
    x, dt, A, B, C, D = arguments(1)
    given = (x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], torch.ones(2, 4, 3, 5))
    torch.library.opcheck(mamba2_kernels._step_op, (*given, D), test_utils=("test_schema", "test_faketensor"))
