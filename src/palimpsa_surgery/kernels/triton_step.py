"""One token of the Palimpsa recurrence in Triton, in place on the cached state (paper Eq. 5).

Letters as in `triton_scan.py`. Decoding is bound by launches and by reading and writing the state once, so one
kernel does the update, the read-out and the skip `D x`. It updates its input, so it is not autotuned.
"""

import torch
from torch import Tensor

from .triton_jit import NAMESPACE, cdiv, jit, power_of_two, tl


@jit
def _step(
    x, dt, A, B, C, beta, prior, state, D, y,
    x_b, x_h, x_p, dt_b, dt_h, B_b, B_g, B_n, C_b, C_g, C_n, beta_b, beta_h, beta_p,
    s_b, s_h, s_i, s_p, s_n,
    H, HPG, P, N,
    BP: tl.constexpr, BN: tl.constexpr, HAS_D: tl.constexpr,
):  # fmt: skip
    """y [b, h, p] and the new state; one program per head and BP value rows."""
    i_bh = tl.program_id(0).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    o_p = tl.program_id(1) * BP + tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    m_p = o_p < P
    m_n = o_n < N
    m = m_p[:, None] & m_n[None, :]
    b_dt = tl.load(dt + b * dt_b + h * dt_h)
    b_a = tl.exp(-tl.load(A + h) * b_dt)
    b_x = tl.load(x + b * x_b + h * x_h + o_p * x_p, mask=m_p, other=0.0).to(tl.float32)
    b_u = tl.load(beta + b * beta_b + h * beta_h + o_p * beta_p, mask=m_p, other=0.0).to(tl.float32)
    g = h // HPG
    b_B = tl.load(B + b * B_b + g * B_g + o_n * B_n, mask=m_n, other=0.0).to(tl.float32)
    b_C = tl.load(C + b * C_b + g * C_g + o_n * C_n, mask=m_n, other=0.0).to(tl.float32)
    p_M = state + b * s_b + h * s_h + o_p[:, None] * s_p + o_n[None, :] * s_n
    p_I = p_M + s_i
    b_M = b_a * tl.load(p_M, mask=m, other=0.0) + (b_dt * b_x)[:, None] * b_B[None, :]
    b_I = b_a * tl.load(p_I, mask=m, other=0.0) + b_u[:, None] * (b_B * b_B)[None, :]
    tl.store(p_M, b_M, mask=m)
    tl.store(p_I, b_I, mask=m)
    b_y = tl.sum(b_M * b_C[None, :] / (tl.load(prior + h) + b_I), 1)
    if HAS_D:
        b_y += tl.load(D + h).to(tl.float32) * b_x
    tl.store(y + i_bh * P + o_p, b_y.to(y.dtype.element_ty), mask=m_p)


def _step_forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor,
    I_prior: Tensor,
    state: Tensor,
    D: Tensor | None,
) -> Tensor:
    batch, heads, head_dim = x.shape
    groups, state_size = B.shape[1:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    # 8 rows a program: 8 heads of batch 1 already fill 64 programs, and each reads 8 KiB of state
    BP = 8
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _step[(batch * heads, cdiv(head_dim, BP))](
            x, dt, A, B, C, beta, I_prior, state, x if D is None else D, y,
            *x.stride(), *dt.stride(), *B.stride(), *C.stride(), *beta.stride(), *state.stride(),
            heads, heads // groups, head_dim, state_size,
            BP=BP, BN=power_of_two(state_size), HAS_D=D is not None, num_warps=2,
        )  # fmt: skip
    return y


_step_op = torch.library.custom_op(f"{NAMESPACE}::step", _step_forward, mutates_args=("state",))
_step_op.register_fake(lambda x, dt, A, B, C, beta, I_prior, state, D: x.new_empty(x.shape))


def palimpsa_step_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor,
    I_prior: Tensor,
    state: Tensor,
    D: Tensor | None = None,
) -> Tensor:
    """One token, `state` updated in place; not differentiable.

    Args:
        x: `[b, h, p]`; dt: `[b, h]`, float32; A, I_prior: `[h]`, float32; B, C: `[b, g, n]`; beta: `[b, h, p]`.
        state: `[b, h, 2, p, n]`, float32, M and Ibar. All tensors in any strides.
        D: `[h]`, adds `D x` to y.

    Returns:
        y `[b, h, p]` in x's type.
    """
    A, I_prior, D = (None if v is None else v.contiguous() for v in (A, I_prior, D))
    return _step_op(x, dt, A, B, C, beta, I_prior, state, D)
