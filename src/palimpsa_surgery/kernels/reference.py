"""The Palimpsa recurrence as an explicit loop over time: slow, obvious, and what every other path is held to.

Letters, as in Mamba2: b batch, t time, h heads, p head_dim (value side), g groups, n state_size (key side).
"""

import torch
from torch import Tensor


def palimpsa_scan_reference(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor | None,
    I_prior: Tensor,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Palimpsa in natural parameters (paper Eq. 5 and A.5), one token at a time, differentiable by autograd.

    Computes in float32, or in float64 when any input is float64.

    Args:
        x: values `[b, t, h, p]`.
        dt: step sizes `[b, t, h]`, ≥ 0.
        A: decay rates `[h]`, > 0; the forget gate is `exp(-A dt)`.
        B: keys `[b, t, g, n]`, shared by the `h / g` heads of a group.
        C: queries `[b, t, g, n]`.
        beta: precision of each observation `[b, t, h, p]`, ≥ 0; None means zero, which is Mamba2.
        I_prior: prior importance `[h]`, > 0.
        initial_state: `[b, h, 2, p, n]`: M and Ibar before the first token; None means zero.
        seq_idx: document numbers `[b, t]`; the state is zeroed wherever the number changes.

    Returns:
        y `[b, t, h, p]`, the final state `[b, h, 2, p, n]`, and the predictive variance `[b, t, h, p]`,
        all in the computing type.
    """
    tensors = [v for v in (x, dt, A, B, C, beta, I_prior, initial_state) if v is not None]
    dtype = torch.float64 if any(v.dtype == torch.float64 for v in tensors) else torch.float32
    x, dt, A, B, C, I_prior = (v.to(dtype) for v in (x, dt, A, B, C, I_prior))
    beta = torch.zeros_like(x) if beta is None else beta.to(dtype)
    batch, time, heads, head_dim = x.shape
    heads_per_group = heads // B.shape[2]

    if initial_state is None:
        initial_state = x.new_zeros(batch, heads, 2, head_dim, B.shape[3])
    M, Ibar = initial_state.to(dtype).unbind(2)
    prior = I_prior[None, :, None, None]

    y, variance = [], []
    for t in range(time):
        if seq_idx is not None and t > 0:
            same_document = (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
            M, Ibar = torch.where(same_document, M, 0), torch.where(same_document, Ibar, 0)
        key = B[:, t].repeat_interleave(heads_per_group, dim=1)[:, :, None, :]
        query = C[:, t].repeat_interleave(heads_per_group, dim=1)[:, :, None, :]
        alpha = torch.exp(-A * dt[:, t])[:, :, None, None]
        M = alpha * M + (dt[:, t, :, None] * x[:, t])[..., None] * key
        Ibar = alpha * Ibar + beta[:, t][..., None] * key.square()
        y.append((M / (prior + Ibar) * query).sum(-1))
        variance.append((query.square() / (prior + Ibar)).sum(-1))
    return torch.stack(y, 1), torch.stack((M, Ibar), 2), torch.stack(variance, 1)
