"""RMSNorm as the model uses it: of the blocks' inputs, and of what the scans return, under a gate."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .triton_jit import kernels_take, triton
from .triton_norm import MAX_GROUP, MAX_GROUPS, rms_norm_triton


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, gate: Tensor | None = None, group_size: int | None = None
) -> Tensor:
    """`weight u / sqrt(mean(u²) + eps)` with u = x SiLU(gate), the mean over groups of neighbouring channels.

    Args:
        x: `[..., d]`.
        weight: `[d]`; eps: > 0.
        gate: `[..., d]`; None for u = x.
        group_size: channels a group, a divisor of d; None for d.

    Returns:
        `[..., d]` in the type of `weight x`; from the kernel under autocast in autocast's, to which the projection
        that follows would cast it.

    Raises:
        ValueError: shapes that do not fit.
    """
    group = x.shape[-1] if group_size is None else group_size
    if weight.shape != x.shape[-1:] or x.shape[-1] % group != 0 or (gate is not None and gate.shape != x.shape):
        raise ValueError(
            f"x [..., d], weight [d], gate like x and groups of {group} channels do not fit: got {tuple(x.shape)}, "
            f"{tuple(weight.shape)} and {None if gate is None else tuple(gate.shape)}"
        )
    # mamba_ssm's rmsnorm_fn has offsets of 32 bits, refuses long groups, and is absent where Triton alone is installed.
    small = group <= MAX_GROUP and x.shape[-1] <= MAX_GROUPS * group
    if triton is not None and small and kernels_take(x, weight, x if gate is None else gate):
        autocast = torch.is_autocast_enabled("cuda")
        dtype = torch.get_autocast_dtype("cuda") if autocast else torch.promote_types(x.dtype, weight.dtype)
        return rms_norm_triton(x, weight, eps, gate, group, dtype)
    return rms_norm_pytorch(x, weight, eps, gate, group)


def rms_norm_pytorch(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, group_size: int) -> Tensor:
    """`rms_norm` as transformers' Mamba2 computes it, to the bit; float64 stays float64."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    u = x.to(dtype)
    if gate is not None:
        u = u * F.silu(gate.to(dtype))
    u = u.unflatten(-1, (-1, group_size))
    u = u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + eps)
    return weight * u.flatten(-2).to(x.dtype)
