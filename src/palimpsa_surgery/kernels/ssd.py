"""Mamba2's scan (structured state space duality, Dao and Gu 2024, section 6) in plain PyTorch, for any device.

transformers' own fallback refuses `seq_idx` and expands B and C to every head; this one does neither, and is
what the kept layers run on wherever `mamba_ssm`'s kernels cannot. Letters as in `reference.py`; q is the
position within a chunk, c the chunk.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .decay import decay_from_start, decay_within, document_numbers

# On two CPU cores at tiny-mamba2's size, 1,024 tokens forward and backward: 52 ms (32: 109, 128: 53, 256: 97).
CHUNK = 64


def ssd_scan_chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """M[t] = alpha M[t-1] + (dt x)[t] ⊗ B[t], y[t] = M[t] C[t]; differentiable by autograd.

    Args:
        x: `[b, t, h, p]`; dt: `[b, t, h]`, ≥ 0; A: `[h]`, > 0; B, C: `[b, t, g, n]`.
        initial_state: `[b, h, p, n]`, None for zero.
        seq_idx: `[b, t]`; the state is zeroed wherever the number changes.

    Returns:
        y `[b, t, h, p]` in the type of `x` and the final state `[b, h, p, n]` in float32 (float64 when `A`
        is float64), None unless asked for.
    """
    dtype = torch.float64 if A.dtype == torch.float64 else torch.float32
    batch, time, heads, head_dim = x.shape
    groups, state_size = B.shape[2:]
    per_group = heads // groups
    chunk = min(CHUNK, time)
    padding = -time % chunk  # padded tokens have dt = 0: they neither write nor decay

    def split(v: Tensor) -> Tensor:
        """`[b, t, a, ...]` to `[b, a, c, q, ...]`."""
        v = F.pad(v.to(dtype), (0, 0) * (v.ndim - 2) + (0, padding)).unflatten(1, (-1, chunk))
        return v.movedim(3, 1)

    with torch.autocast(x.device.type, enabled=False):
        dt_split = split(dt)  # [b, h, c, q]
        value = split(x) * dt_split[..., None]  # [b, h, c, q, p]
        key, query = split(B), split(C)  # [b, g, c, q, n]
        log_alpha = -A.to(dtype)[None, :, None, None] * dt_split
        if seq_idx is None:
            decay, decay_start = decay_within(log_alpha), decay_from_start(log_alpha)
        else:
            documents = F.pad(document_numbers(seq_idx), (0, padding), mode="replicate")
            documents = documents.view(batch, 1, -1, chunk)
            before = torch.cat((documents[:, :, :1, :1], documents[:, :, :-1, -1:]), dim=2)
            decay = decay_within(log_alpha, documents)
            decay_start = decay_from_start(log_alpha, documents, before)

        # Within each chunk: attention with decay, its scores shared by the heads of a group.
        scores = (query @ key.transpose(-1, -2)).unsqueeze(2) * decay.unflatten(1, (groups, per_group))
        y = scores.flatten(1, 2) @ value
        # What each chunk adds to the state, and the state before each chunk.
        fed = (value * decay[..., -1, :, None]).unflatten(1, (groups, per_group)).transpose(-1, -2)
        fed = (fed @ key.unsqueeze(2)).flatten(1, 2)  # [b, h, c, p, n]
        state = A.new_zeros(batch, heads, head_dim, state_size, dtype=dtype)
        state = state if initial_state is None else initial_state.to(dtype)
        starts = []
        for c in range(fed.shape[2]):
            starts.append(state)
            state = decay_start[:, :, c, -1, None, None] * state + fed[:, :, c]
        starts = torch.stack(starts, 2).unflatten(1, (groups, per_group))
        y = y + decay_start[..., None] * (query.unsqueeze(2) @ starts.transpose(-1, -2)).flatten(1, 2)
    y = y.movedim(1, 3).flatten(1, 2)[:, :time].to(x.dtype)
    return y, state if return_final_state else None
