"""The short causal convolution before the scan, with a carried tail and resets at document boundaries.

On CUDA in Triton (`triton_conv.py`) where Triton imports, with 2 to 4 taps and but for float64; else in PyTorch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .decay import document_numbers
from .triton_conv import TAPS, causal_conv1d_triton
from .triton_jit import kernels_take, triton


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Depthwise causal convolution followed by SiLU.

    Args:
        x: `[b, t, d]`.
        weight: `[d, k]`, the last tap belongs to the current token; bias: `[d]`.
        initial_state: the inputs before the first token, `[b, d, k]` of which the last k - 1 count, as in
            transformers' caches; None for zeros. It belongs to the first document of a row.
        seq_idx: document numbers `[b, t]`; a token sees no input of another document.

    Returns:
        `[b, t, d]` in the type of `x`.

    Raises:
        ValueError: an argument has another shape.
    """
    (batch, time, channels), taps = x.shape, weight.shape[-1]
    given = {"weight": weight, "bias": bias, "initial_state": initial_state, "seq_idx": seq_idx}
    shapes = ((channels, taps), (channels,), (batch, channels, taps), (batch, time))
    for (name, value), shape in zip(given.items(), shapes, strict=True):
        if value is not None and value.shape != shape:
            raise ValueError(f"the convolution's {name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
    if triton is not None and taps in TAPS and kernels_take(x, *(v for v in given.values() if v is not None)):
        return causal_conv1d_triton(x, weight, bias, initial_state, seq_idx)
    if initial_state is None:
        padded = F.pad(x, (0, 0, taps - 1, 0))
    else:
        padded = torch.cat((initial_state[..., 1:].to(x.dtype).transpose(1, 2), x), dim=1)

    if seq_idx is None and x.dtype != torch.float32:
        # conv1d accumulates half precision in float32. Its result has time innermost, which the scan reads slowly.
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        out = F.conv1d(padded.transpose(1, 2), weight[:, None], bias, groups=x.shape[-1])
        return F.silu(out.transpose(1, 2).contiguous())

    # One multiply-add a tap: on a CPU a quarter faster than conv1d, and able to skip other documents.
    documents = None if seq_idx is None else F.pad(document_numbers(seq_idx), (taps - 1, 0))
    dtype = torch.promote_types(x.dtype, torch.float32)
    padded, weight = padded.to(dtype), weight.to(dtype)
    out = padded.new_zeros(()) if bias is None else bias.to(dtype)
    for tap in range(taps):
        seen = padded[:, tap : tap + time]
        if documents is not None:
            other = documents[:, tap : tap + time] != documents[:, taps - 1 :]
            seen = seen.masked_fill(other[..., None], 0)
        out = torch.addcmul(out, seen, weight[:, tap])
    return F.silu(out).to(x.dtype)
