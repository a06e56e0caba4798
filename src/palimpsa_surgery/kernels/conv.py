"""The short causal convolution before the scan, with a carried tail and resets at document boundaries."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .decay import document_numbers


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
        `[b, t, d]`.
    """
    taps = weight.shape[-1]
    time = x.shape[1]
    weight = weight.to(x.dtype)
    bias = None if bias is None else bias.to(x.dtype)
    if initial_state is None:
        padded = F.pad(x, (0, 0, taps - 1, 0))
    else:
        padded = torch.cat((initial_state[..., 1:].to(x.dtype).transpose(1, 2), x), dim=1)
    if seq_idx is None:
        out = F.conv1d(padded.transpose(1, 2), weight[:, None], bias, groups=x.shape[-1]).transpose(1, 2)
        return F.silu(out)
    documents = F.pad(document_numbers(seq_idx), (taps - 1, 0))
    out = x.new_zeros(()) if bias is None else bias
    for tap in range(taps):
        same = documents[:, tap : tap + time] == documents[:, taps - 1 :]
        out = out + (padded[:, tap : tap + time] * weight[:, tap]).masked_fill(~same[..., None], 0)
    return F.silu(out)
