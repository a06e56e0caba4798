"""RMSNorm of groups of channels, with or without a gate, in Triton: each tensor is read and written once.

With s = SiLU(z), u = x s (u = x without a gate) and r = (mean(u²) + eps)^(-1/2) over the N channels of a group,

    out = w r u        du = r (w dout - u r² mean(w dout u))        dw = Σ_rows dout r u
    dx = s du          dz = x SiLU'(z) du                           SiLU'(z) = σ(z) + s (1 - σ(z))

A program holds a row's group in registers, all in float32. The backward pass saves the inputs alone and works out r
again. A program of it takes every so many rows and writes the sum of their dw; these are summed in a fixed order.
"""

import torch
from torch import Tensor

from .triton_jit import NAMESPACE, cdiv, jit, power_of_two, tl

# Channels of a group that a program's registers hold, if not without spilling in the backward pass.
MAX_GROUP = 2**14
# CUDA's limit for a grid's second axis
MAX_GROUPS = 65535
# Of the backward pass: rows a program at least, and programs at most, whose sums of dw are 20 MiB at 5,120 channels.
ROWS, PROGRAMS = 16, 1024
# Channels a warp holds, measured on one H200 (docs/experiments.md has the table), and warps at most
FORWARD_CHANNELS, BACKWARD_CHANNELS, MAX_WARPS = 1024, 512, 32


@jit
def norm_forward(
    x, gate, weight, out, x_row, gate_row, D, N, eps, BN: tl.constexpr, HAS_GATE: tl.constexpr
):  # fmt: skip
    """One program a row and group of out [T, D]."""
    row = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)
    m_n = o_n < N
    o_n += tl.program_id(1) * N
    b_u = tl.load(x + row * x_row + o_n, mask=m_n, other=0.0).to(tl.float32)
    if HAS_GATE:
        b_z = tl.load(gate + row * gate_row + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_u *= b_z * tl.sigmoid(b_z)
    b_r = 1.0 / tl.sqrt(tl.sum(b_u * b_u, 0) / N + eps)
    b_w = tl.load(weight + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(out + row * D + o_n, (b_w * (b_u * b_r)).to(out.dtype.element_ty), mask=m_n)


@jit
def norm_backward(
    x, gate, weight, dout, dx, dgate, dw_part, x_row, gate_row, dout_row, T, D, N, eps,
    BN: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """One program a group and every so many rows of dx and dgate [T, D]; its slot of dw_part [programs, D]."""
    first = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)
    m_n = o_n < N
    o_n += tl.program_id(1) * N
    b_dw = tl.zeros([BN], tl.float32)
    for row in range(first, T, tl.num_programs(0)):
        b_x = tl.load(x + row * x_row + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_d = tl.load(dout + row * dout_row + o_n, mask=m_n, other=0.0).to(tl.float32)
        b_w = tl.load(weight + o_n, mask=m_n, other=0.0).to(tl.float32)  # cached; held over rows it would spill
        b_u = b_x
        if HAS_GATE:
            b_z = tl.load(gate + row * gate_row + o_n, mask=m_n, other=0.0).to(tl.float32)
            b_sig = tl.sigmoid(b_z)
            b_s = b_z * b_sig
            b_u = b_x * b_s
        b_wd = b_w * b_d
        b_r = 1.0 / tl.sqrt(tl.sum(b_u * b_u, 0) / N + eps)
        b_c = b_r * b_r * tl.sum(b_wd * b_u, 0) / N
        b_dw += b_d * (b_u * b_r)
        b_du = b_r * (b_wd - b_u * b_c)
        if HAS_GATE:
            b_dz = b_du * b_x * (b_sig + b_s * (1.0 - b_sig))
            tl.store(dgate + row * D + o_n, b_dz.to(dgate.dtype.element_ty), mask=m_n)
            b_du *= b_s
        tl.store(dx + row * D + o_n, b_du.to(dx.dtype.element_ty), mask=m_n)
    tl.store(dw_part + first * D + o_n, b_dw, mask=m_n)


def _rows(v: Tensor) -> Tensor:
    """`[..., d]` as rows `[t, d]` whose channels are neighbours in memory; without a copy where strides allow."""
    v = v.reshape(-1, v.shape[-1])
    return v if v.stride(-1) == 1 else v.contiguous()


def _sizes(group: int, warp_channels: int) -> dict:
    block = power_of_two(group)
    return {"BN": block, "num_warps": min(MAX_WARPS, max(1, block // warp_channels))}


# ---------------------------------------------------------------------------------------------------------------------
# Custom ops


def _norm(x: Tensor, gate: Tensor | None, weight: Tensor, eps: float, group: int, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    rows, weight = _rows(x), weight.contiguous()
    gates = rows if gate is None else _rows(gate)
    time, channels = rows.shape
    with torch.cuda.device_of(x):  # Triton launches on the current device
        norm_forward[(time, channels // group)](
            rows, gates, weight, out, rows.stride(0), gates.stride(0), channels, group, eps,
            HAS_GATE=gate is not None, **_sizes(group, FORWARD_CHANNELS),
        )  # fmt: skip
    return out


def _norm_backward(
    x: Tensor, gate: Tensor | None, weight: Tensor, dout: Tensor, eps: float, group: int
) -> list[Tensor]:
    gradients = _empty_gradients(x, gate)
    rows, douts, weight = _rows(x), _rows(dout), weight.contiguous()
    gates = rows if gate is None else _rows(gate)
    time, channels = rows.shape
    programs = min(PROGRAMS, cdiv(time, ROWS))
    dw_part = torch.empty(programs, channels, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        norm_backward[(programs, channels // group)](
            rows, gates, weight, douts, gradients[0], gradients[-1], dw_part,
            rows.stride(0), gates.stride(0), douts.stride(0), time, channels, group, eps,
            HAS_GATE=gate is not None, **_sizes(group, BACKWARD_CHANNELS),
        )  # fmt: skip
    return [*gradients, dw_part.sum(0).to(weight.dtype)]


def _empty_gradients(x: Tensor, gate: Tensor | None) -> list[Tensor]:
    return [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in (x, gate) if v is not None]


_norm_op = torch.library.custom_op(f"{NAMESPACE}::norm", _norm, mutates_args=())
_norm_op.register_fake(lambda x, gate, weight, eps, group, dtype: x.new_empty(x.shape, dtype=dtype))
_norm_backward_op = torch.library.custom_op(f"{NAMESPACE}::norm_backward", _norm_backward, mutates_args=())
_norm_backward_op.register_fake(
    lambda x, gate, weight, dout, eps, group: [*_empty_gradients(x, gate), weight.new_empty(weight.shape)]
)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.eps, ctx.group, _ = inputs
    ctx.save_for_backward(*tensors)


def _autograd_backward(ctx, dout):
    x, gate, weight = ctx.saved_tensors
    dx, *dgate, dweight = _norm_backward_op(x, gate, weight, dout, ctx.eps, ctx.group)
    return dx, dgate[0] if dgate else None, dweight, None, None, None


_norm_op.register_autograd(_autograd_backward, setup_context=_setup_context)


def rms_norm_triton(
    x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, group_size: int, dtype: torch.dtype
) -> Tensor:
    """`norm.rms_norm`, which validates and says what the arguments mean, in Triton.

    Args:
        x: `[..., d]`, bfloat16, float16 or float32 like all tensors, in any strides.
        weight: `[d]`; gate: `[..., d]` or None.
        group_size: at most `MAX_GROUP`, and at most `MAX_GROUPS` times in d.
        dtype: type of the result.

    Returns:
        `[..., d]`, contiguous; differentiable.
    """
    return _norm_op(x, gate, weight, eps, group_size, dtype)
