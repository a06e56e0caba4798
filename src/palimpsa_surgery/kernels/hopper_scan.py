"""Launches of the tuned kernels of `gluon_scan.py`, for Hopper; `triton_scan.py` asks `fits` and has the portable path.

Letters as in `triton_scan.py`.
"""

import torch
from torch import Tensor

from .gluon_scan import AVAILABLE, HEAD_DIM, NUM_WARPS, STATE_SIZE
from .gluon_scan import read_out as read_out_kernel
from .gluon_scan import segment_adjoints as segment_adjoints_kernel
from .gluon_scan import segment_gradients as segment_gradients_kernel

try:
    import triton
    import triton.language as tl

    jit = triton.jit
except ImportError:
    from types import SimpleNamespace

    triton, tl = None, SimpleNamespace(constexpr=None)

    def jit(function):
        """Leave the kernels as plain functions."""
        return function


# Constants measured on one H200 at B=1 T=32768 H=80 P=64 N=128 G=1 bf16 (docs/experiments.md has the table).
# Tokens a segment in the backward pass: the kernels take 71.7 ms in all with 256 and 73.5 with 128.
BACKWARD_SEGMENT = 256
SUB_CHUNK = 16
# Value rows of a program, value rows and keys of a lane: the fastest of five each.
READ_OUT_TILE = (16, 4, 8)
ADJOINT_TILE = (8, 8, 4)
PROGRAMS_PER_SM = 2  # of the gradient kernel, limited by registers and shared memory
STATE_COPIES = 2  # states and adjoints: tensors of a state for each segment
ROW_VALUES = 3  # float32 values for each token and value row in temporary tensors


@jit
def transpose_rows(
    x, dt, beta, A, dy, v, betaT, dyT, log_alpha,
    x_b, x_t, x_h, x_p, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, beta_p, dy_b, dy_t, dy_h, dy_p,
    T, TP, H, P, BT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """v = dt x, beta and dy as float32 [b, h, p, TP], and log alpha [b, h, TP], zero from T on."""
    i_bh = tl.program_id(1).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_p = tl.arange(0, BP)
    m_t = t < T
    m_p = (o_p < P)[None, :]
    m = m_t[:, None] & m_p
    b_dt = tl.load(dt + b * dt_b + t * dt_t + h * dt_h, mask=m_t, other=0.0)
    tl.store(log_alpha + i_bh * TP + t, -tl.load(A + h) * b_dt, mask=t < TP)
    o_out = (i_bh * P + o_p[:, None]) * TP + t[None, :]
    m_out = (o_p < P)[:, None] & (t < TP)[None, :]
    b_x = tl.load(x + b * x_b + t[:, None] * x_t + h * x_h + o_p[None, :] * x_p, mask=m, other=0.0)
    tl.store(v + o_out, tl.trans(b_x.to(tl.float32) * b_dt[:, None]), mask=m_out)
    b_u = tl.load(beta + b * beta_b + t[:, None] * beta_t + h * beta_h + o_p[None, :] * beta_p, mask=m, other=0.0)
    tl.store(betaT + o_out, tl.trans(b_u.to(tl.float32)), mask=m_out)
    b_dy = tl.load(dy + b * dy_b + t[:, None] * dy_t + h * dy_h + o_p[None, :] * dy_p, mask=m, other=0.0)
    tl.store(dyT + o_out, tl.trans(b_dy.to(tl.float32)), mask=m_out)


def fits(x: Tensor, beta: Tensor, B: Tensor) -> bool:
    """Whether the kernels, measured on Hopper alone, take these arguments."""
    return (
        AVAILABLE
        and x.is_cuda
        and x.dtype == torch.bfloat16
        and x.stride(-1) == 1
        and beta.stride(-1) == 1
        and B.shape[3] == STATE_SIZE
        and x.shape[3] == HEAD_DIM
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def read_out(x, dt, A, B, C, beta, I_prior, doc, states, y, segment):
    """Step 3: y `[b, t, h, p]` from the states at the segments' starts."""
    batch, time, heads, head_dim = x.shape
    segments = states.shape[2] - 1
    BP, R, KC = READ_OUT_TILE
    read_out_kernel[(triton.cdiv(head_dim, BP), segments, batch * heads)](
        x, dt, beta, A, B, C, I_prior, dt if doc is None else doc, states, y,
        *x.stride()[:3], *dt.stride(), *beta.stride()[:3], *B.stride()[:3], *C.stride()[:3],
        time, heads, heads // B.shape[2], head_dim, segments, segment,
        BP=BP, R=R, KC=KC, HAS_DOC=doc is not None, num_warps=1,
    )  # fmt: skip


def segment_adjoints(x, dt, A, B, C, beta, I_prior, doc, dy, states, adjoints, segment):
    """Step 4 for heads of one group: slot k of adjoints = adjoint of segment k's start from its own tokens."""
    batch, time, heads, head_dim = x.shape
    segments = states.shape[2] - 1
    BP, R, KC = ADJOINT_TILE
    segment_adjoints_kernel[(triton.cdiv(head_dim, BP), segments, batch * heads)](
        x, dt, beta, A, B, C, I_prior, dy, dt if doc is None else doc, states, adjoints,
        *x.stride()[:3], *dt.stride(), *beta.stride()[:3], *B.stride()[:3], *C.stride()[:3], *dy.stride()[:3],
        time, heads, heads, head_dim, segments, segment,
        BP=BP, R=R, KC=KC, HAS_DOC=doc is not None, num_warps=1,
    )  # fmt: skip


def segment_gradients(x, dt, A, B, C, beta, I_prior, doc, dy, states, adjoints, dx, ddt, dA, dbeta, dprior, segment):
    """Step 5 for heads of one group; returns dB and dC `[b, h, segments S, n]`."""
    batch, time, heads, head_dim = x.shape
    state_size, segments = B.shape[3], states.shape[2] - 1
    padded = segments * segment
    rows = x.new_empty(3, batch, heads, head_dim, padded, dtype=torch.float32)
    log_alpha = x.new_empty(batch, heads, padded, dtype=torch.float32)
    BT = 64
    transpose_rows[(padded // BT, batch * heads)](
        x, dt, beta, A, dy, *rows, log_alpha,
        *x.stride(), *dt.stride(), *beta.stride(), *dy.stride(),
        time, padded, heads, head_dim, BT=BT, BP=head_dim, num_warps=4,
    )  # fmt: skip
    documents = dt
    if doc is not None:
        documents = torch.cat((doc, doc[:, -1:].expand(-1, padded - time)), 1)
    tiles = segments * batch * heads
    programs = min(tiles, PROGRAMS_PER_SM * torch.cuda.get_device_properties(x.device).multi_processor_count)
    starts = x.new_empty(programs, segment // SUB_CHUNK, 2, head_dim, state_size, dtype=torch.float32)
    ends = x.new_empty(programs, 2, head_dim, state_size, dtype=torch.float32)
    parts = x.new_empty(programs, head_dim, 32 * NUM_WARPS, dtype=torch.float32)
    keys = x.new_empty(2, batch, heads, padded, state_size, dtype=torch.float32)
    scalars = x.new_empty(2, batch, heads, segments, dtype=torch.float32)
    segment_gradients_kernel[(programs,)](
        x, *rows, log_alpha, dt, A, B, C, I_prior, documents, states, adjoints, starts, ends, parts,
        dx, dbeta, ddt, *keys, *scalars,
        *x.stride()[:3], *dt.stride(), *B.stride()[:3], *C.stride()[:3], *dx.stride()[:3], *ddt.stride(),
        time, padded, heads, heads, segments, tiles,
        S=segment, P=head_dim, NW=NUM_WARPS, HAS_DOC=doc is not None, num_warps=NUM_WARPS,
    )  # fmt: skip
    dA.copy_(scalars[0].sum((0, 2)))
    dprior.copy_(scalars[1].sum((0, 2)))
    return keys
