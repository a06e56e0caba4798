"""The norms against transformers' own, and which of them runs where."""

import pytest
import torch
from transformers.models.mamba2.modeling_mamba2 import Mamba2RMSNorm, MambaRMSNormGated

from palimpsa_surgery.kernels import norm
from palimpsa_surgery.kernels.norm import rms_norm

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def values(*shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, gate and a gradient."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("groups", [None, 1, 5], ids=["plain", "gated", "gated-5-groups"])
@pytest.mark.parametrize(("dtype", "weight"), [(fp32, fp32), (bf16, fp32), (bf16, bf16), (fp16, fp16)], ids=str)
def test_same_bits_as_transformers(groups, dtype, weight):
    x, gate, gradient = values(2, 7, 80, dtype=dtype)
    theirs = Mamba2RMSNorm(80, 1e-5) if groups is None else MambaRMSNormGated(80, 80 // groups, 1e-5)
    theirs.weight.data = torch.linspace(0.1, 2, 80).to(weight)
    results = []
    for ours in (True, False):
        leaves = [x.clone().requires_grad_(), theirs.weight]
        gates = [] if groups is None else [gate.clone().requires_grad_()]
        if ours:
            group_size = None if groups is None else 80 // groups
            out = rms_norm(*leaves, 1e-5, gate=gates[0] if gates else None, group_size=group_size)
        else:
            out = theirs(leaves[0], *gates)
        results.append((out, *torch.autograd.grad(out, leaves + gates, gradient.to(out.dtype))))
    for actual, expected in zip(*results, strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


def test_float64_stays_float64():
    x, gate, _ = values(3, 20, dtype=fp64)
    weight = torch.rand(20, dtype=fp64)
    u = (x * gate / (1 + torch.exp(-gate))).view(3, 2, 10)
    expected = weight * (u / (u.square().mean(-1, keepdim=True) + 1e-5).sqrt()).view(3, 20)
    assert torch.allclose(rms_norm(x, weight, 1e-5, gate=gate, group_size=10), expected, rtol=1e-13, atol=0)


@pytest.mark.parametrize(
    ("shapes", "group_size"),
    [(((3, 20), (19,), (3, 20)), 10), (((3, 20), (20,), (20,)), 10), (((3, 20), (20,), (3, 20)), 7)],
    ids=["weight", "gate", "groups"],
)
def test_shapes_that_do_not_fit_are_refused(shapes, group_size):
    x, weight, gate = map(torch.ones, shapes)
    with pytest.raises(ValueError, match="do not fit: got"):
        rms_norm(x, weight, 1e-5, gate=gate, group_size=group_size)


@pytest.mark.parametrize(
    ("dtype", "weight", "autocast", "expected"),
    [(fp32, fp32, None, fp32), (bf16, bf16, None, bf16), (bf16, fp32, None, fp32), (fp32, fp32, bf16, bf16)],
)
def test_type_of_the_kernels_result(dtype, weight, autocast, expected, monkeypatch):
    """That of the product with the weight, or what autocast would make of it for the projection that follows."""
    monkeypatch.setattr(norm, "triton", object())
    monkeypatch.setattr(norm, "kernels_take", lambda *_: True)
    monkeypatch.setattr(norm, "rms_norm_triton", lambda *arguments: arguments)
    x, gate, _ = values(3, 20, dtype=dtype)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: autocast is not None)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: autocast)
    *_, group, found = rms_norm(x, torch.ones(20, dtype=weight), 1e-5, gate=gate)
    assert (group, found) == (20, expected)


def test_groups_longer_than_the_kernel_takes_run_pytorch(monkeypatch):
    monkeypatch.setattr(norm, "triton", object())
    monkeypatch.setattr(norm, "kernels_take", lambda *_: True)
    monkeypatch.setattr(norm, "rms_norm_triton", None)
    x, weight = torch.ones(2, norm.MAX_GROUP + 1), torch.ones(norm.MAX_GROUP + 1)
    assert torch.allclose(rms_norm(x, weight, 1e-5), torch.ones(()))
