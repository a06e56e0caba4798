"""Launches of the kernels for Hopper; `triton_scan.py` asks `fits` and has the portable path.

Letters as in `triton_scan.py`, whose backward pass goes on from step 2 in another order here:

4. `prepare_rows` and `sub_chunk_starts`: operands, and the states before every 16th token.
5. `segment_gradients`: the gradients that a segment's own tokens cause, and the adjoint of its start.
6. `pass_states` backwards, and `carry_rows` and `carry_keys`: by matrix products, what the adjoint after each segment
   adds. `sum_spans`: the gradient of log alpha.
"""

import torch
from torch import Tensor

from .hopper_carry import carry_keys, carry_rows, sub_chunk_starts
from .hopper_gradients import HEAD_DIM, NUM_WARPS, ROW_WORDS, SPAN_WORDS, STATE_SIZE
from .hopper_gradients import segment_gradients as segment_gradients_kernel
from .hopper_lanes import AVAILABLE
from .hopper_read_out import read_out as read_out_kernel
from .triton_jit import jit, tl, triton

# Constants measured on one H200 at B=1 T=32768 H=80 P=64 N=128 G=1 bf16 (docs/experiments.md has the table).
# Tokens a segment in the backward pass: the gradient kernel took 28 ms with 256 and 35 with 512.
BACKWARD_SEGMENT = 256
SUB_CHUNK = 16
# Value rows of a program of `sub_chunk_starts`: 2.21 ms with 32, 2.44 with 16, 2.85 with 64
START_ROWS = 32
# Tokens at a time of a program of `carry_rows` (2.1 ms with 64, 2.6 with 32, 3.0 with 128 and 8 warps) and of one of
# `carry_keys`, and its keys (0.89 ms; 1.19 with 32 tokens, 0.97 with 128, 0.92 with 128 keys)
CARRY_TOKENS = 64
CARRY_KEYS = 64
SPAN_BLOCK = 4  # sub-chunks of a program of `sum_spans`: one warp, eight lanes for each
# Temporary tensors of the backward pass. States, adjoints and, at half the size, states at the sub-chunks' starts:
STATE_COPIES = 2 + BACKWARD_SEGMENT // SUB_CHUNK // 2
ROW_VALUES = 6  # rows, spans and decays: float32 values for each token and value row


@jit
def prepare_rows(
    x, dt, beta, A, dy, doc, rows, pairs, decays,
    x_b, x_t, x_h, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, dy_b, dy_t, dy_h, T, H,
    P: tl.constexpr, HAS_DOC: tl.constexpr,
):  # fmt: skip
    """Operands of the gradient kernel for one sub-chunk and head, in the order in which its lanes read them.

    rows [b, h, sub-chunks, p, 64] float32, with tokens 0 <= g < 8, 0 <= c < 4 and v = dt x: for each g v[g],
    v[g + 8], -beta[g], -beta[g + 8]; for each c the bfloat16 pairs v[2c], v[2c + 8], beta[2c], beta[2c + 8] (written
    through `pairs`, the same memory); for each c dy[2c], dy[2c + 1], dy[2c + 8], dy[2c + 9]. decays
    [b, h, sub-chunks, 272]: from s to t [16, 16], then from the sub-chunk's start to t [16].
    """
    i_bh = tl.program_id(1).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    ts = tl.program_id(0) * 16
    o_l = tl.arange(0, 16)
    o_p = tl.arange(0, P)
    t = ts.to(tl.int64) + o_l
    m_t = t < T
    m = m_t[:, None] & (o_p < P)[None, :]
    b_dt = tl.load(dt + b * dt_b + t * dt_t + h * dt_h, mask=m_t, other=0.0)
    b_v = tl.load(x + b * x_b + t[:, None] * x_t + h * x_h + o_p[None, :], mask=m, other=0.0)
    b_v = tl.trans(b_v.to(tl.float32) * b_dt[:, None])  # [p, t]
    b_u = tl.load(beta + b * beta_b + t[:, None] * beta_t + h * beta_h + o_p[None, :], mask=m, other=0.0)
    b_u = tl.trans(b_u.to(tl.float32))
    b_dy = tl.load(dy + b * dy_b + t[:, None] * dy_t + h * dy_h + o_p[None, :], mask=m, other=0.0)
    b_dy = tl.trans(b_dy.to(tl.float32))
    i_sub = i_bh * tl.num_programs(0) + tl.program_id(0)
    p_row = (i_sub * P + o_p)[:, None] * 64
    b_vu = tl.join(tl.reshape(b_v, [P, 2, 8]), tl.reshape(-b_u, [P, 2, 8]))  # [p, half, g, kind]
    b_vu = tl.reshape(tl.permute(b_vu, (0, 2, 3, 1)), [P, 32])
    tl.store(rows + p_row + tl.arange(0, 32)[None, :], b_vu)
    b_vu = tl.join(tl.reshape(b_v, [P, 2, 4, 2]), tl.reshape(b_u, [P, 2, 4, 2]))  # [p, half, c, parity, kind]
    b_vu = tl.reshape(tl.permute(b_vu, (0, 2, 4, 1, 3)), [P, 32])
    tl.store(pairs + p_row * 2 + 64 + tl.arange(0, 32)[None, :], b_vu.to(tl.bfloat16))
    b_dy = tl.reshape(tl.permute(tl.reshape(b_dy, [P, 2, 4, 2]), (0, 2, 1, 3)), [P, 16])
    tl.store(rows + p_row + 48 + o_l[None, :], b_dy)
    # sums of log alpha over s < r <= t alone, never differences of longer sums
    b_log = -tl.load(A + h) * b_dt
    b_D = tl.exp(tl.cumsum(tl.where(o_l[None, :] > o_l[:, None], b_log[None, :], 0.0), 1))
    b_D = tl.where(o_l[None, :] >= o_l[:, None], b_D, 0.0)  # [s, t]
    b_in = tl.exp(tl.cumsum(b_log, 0))
    if HAS_DOC:
        b_doc = tl.load(doc + b * T + tl.minimum(t, T - 1))
        b_before = tl.load(doc + b * T + tl.minimum(tl.maximum(ts - 1, 0), T - 1))
        b_D = tl.where(b_doc[:, None] == b_doc[None, :], b_D, 0.0)
        b_in = tl.where(b_doc == b_before, b_in, 0.0)
    p_d = decays + i_sub * 272
    tl.store(p_d + o_l[:, None] * 16 + o_l[None, :], b_D)
    tl.store(p_d + 256 + o_l, b_in)


@jit
def _by_column(b_v, SUBS: tl.constexpr):
    """[SUBS, 32 lanes (g, c)] as a [SUBS, g] for each c."""
    b_even, b_odd = tl.split(tl.reshape(b_v, [SUBS, 8, 2, 2]))
    b_0, b_2 = tl.split(b_even)
    b_1, b_3 = tl.split(b_odd)
    return b_0, b_1, b_2, b_3


@jit
def sum_spans(
    spans, dvx, flow, whole, dt, A, ddt, dA, dprior,
    dt_b, dt_t, dt_h, ddt_b, ddt_t, ddt_h, T, TP, H,
    S: tl.constexpr, SUBS: tl.constexpr, NW: tl.constexpr,
):  # fmt: skip
    """From the gradient kernel's spans: ddt, and for SUBS sub-chunks the parts of dA and dprior [b, h, blocks].

    From each token, flow [2, b, h, TP], and from before its segment of S tokens, whole [2, b, h, TP / S], to
    after the segment.
    """
    i_bh = tl.program_id(1).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    sub = tl.program_id(0).to(tl.int64) * SUBS + tl.arange(0, SUBS)
    m_sub = (sub * 16 < T)[:, None]
    g = tl.arange(0, 8)[None, :]
    p_s = spans + (i_bh * (TP // 16) + sub)[:, None] * (NW * 448) + tl.arange(0, 32)[None, :]
    sums = ()
    for k in tl.static_range(14):
        b_k = tl.load(p_s + k * 32, mask=m_sub, other=0.0)
        for w in tl.static_range(1, NW):
            b_k += tl.load(p_s + w * 448 + k * 32, mask=m_sub, other=0.0)
        sums += (_by_column(b_k, SUBS),)
    i_part = i_bh * tl.num_programs(0) + tl.program_id(0)
    b_k = sums[13][0] + sums[13][1] + sums[13][2] + sums[13][3]
    tl.store(dprior + i_part, tl.sum(tl.sum(b_k, 1), 0))
    # spans from s = g, from s = g + 8 and from the start, to j and later tokens, the end included
    b_g = sums[10][0] + sums[10][1] + sums[10][2] + sums[10][3]
    b_g8 = sums[11][0] + sums[11][1] + sums[11][2] + sums[11][3]
    b_start = sums[12][0] + sums[12][1] + sums[12][2] + sums[12][3]
    # of what leaves the segment, what comes from before the sub-chunk, and from its tokens
    o_l = tl.arange(0, 16)[None, :]
    first = (sub * 16 // S * S)[:, None]
    m_before = m_sub & (first + tl.arange(0, S)[None, :] < sub[:, None] * 16)
    p_whole = whole + i_bh * (TP // S) + sub * 16 // S
    p_flow = flow + i_bh * TP
    m_flow = sub[:, None] * 16 + o_l < T
    b_through = tl.zeros([SUBS], tl.float32)
    b_flow = tl.zeros([SUBS, 16], tl.float32)
    for _ in tl.static_range(2):  # M and Ibar
        b_through += tl.load(p_whole, mask=sub * 16 < T, other=0.0)
        b_through += tl.sum(tl.load(p_flow + first + tl.arange(0, S)[None, :], mask=m_before, other=0.0), 1)
        b_flow += tl.load(p_flow + sub[:, None] * 16 + o_l, mask=m_flow, other=0.0)
        p_whole += tl.num_programs(1).to(tl.int64) * (TP // S)
        p_flow += tl.num_programs(1).to(tl.int64) * TP
    b_A = tl.load(A + h)
    b_dA = tl.zeros([SUBS], tl.float32)
    for j in tl.static_range(15, -1, -1):
        b_g += sums[j % 2 + j // 8 * 2][j % 8 // 2]
        b_start += sums[6 + j % 2 + j // 8 * 2][j % 8 // 2]
        b_q = b_start + tl.where(g < j, b_g, 0.0)
        if j >= 8:
            b_g8 += sums[4 + j % 2][j % 8 // 2]
            b_q += tl.where(g + 8 < j, b_g8, 0.0)
        b_q = tl.sum(b_q, 1) + b_through + tl.sum(tl.where(o_l < j, b_flow, 0.0), 1)  # d log alpha
        t = sub * 16 + j
        m_t = t < T
        b_dt = tl.load(dt + b * dt_b + t * dt_t + h * dt_h, mask=m_t, other=0.0)
        b_dvx = tl.load(dvx + i_bh * TP + t, mask=m_t, other=0.0)
        tl.store(ddt + b * ddt_b + t * ddt_t + h * ddt_h, b_dvx - b_A * b_q, mask=m_t)
        b_dA -= b_dt * b_q
    tl.store(dA + i_part, tl.sum(b_dA, 0))


def fits(x: Tensor, beta: Tensor, B: Tensor) -> bool:
    """Whether the kernels, measured on Hopper alone, take these arguments."""
    return (
        AVAILABLE
        and x.is_cuda
        and x.dtype == beta.dtype == torch.bfloat16
        and x.stride(-1) == 1
        and beta.stride(-1) == 1
        and B.shape[3] == STATE_SIZE
        and x.shape[3] == HEAD_DIM
        and torch.cuda.get_device_capability(x.device)[0] == 9
    )


def _pairs(v: Tensor) -> Tensor:
    """The last axis as int32 pairs of bfloat16, without a copy where its addresses allow."""
    if v.data_ptr() % 4 or any(stride % 2 for stride in v.stride()[:-1]):
        v = v.clone(memory_format=torch.contiguous_format)
    return v.view(torch.int32)


def read_out(x, dt, A, B, C, beta, I_prior, D, doc, states, y, segment):
    """Step 3: y `[b, t, h, p]`, with the skip, from the states at the segments' starts."""
    batch, time, heads, _ = x.shape
    segments = states.shape[2] - 1
    per_group = heads // B.shape[2]
    x, beta, B, C = _pairs(x), _pairs(beta), _pairs(B), _pairs(C)
    read_out_kernel[(segments, batch * heads)](
        x, dt, beta, A, B, C, I_prior, A if D is None else D, dt if doc is None else doc, states, y.view(torch.int32),
        *x.stride()[:3], *dt.stride(), *beta.stride()[:3], *B.stride()[:3], *C.stride()[:3],
        time, heads, per_group, segments, segment, HAS_DOC=doc is not None, HAS_SKIP=D is not None, num_warps=4,
    )  # fmt: skip


def segment_gradients(x, dt, A, B, C, beta, I_prior, doc, dy, states, adjoints, segment, dot_types):
    """Steps 4 and 5 for heads of one group: what each segment's own tokens cause.

    Slot k of adjoints becomes the adjoint of segment k's start. Returns dB and dC `[2, b, h, segments S, n]`, and what
    `carry_gradients` needs: the gradients of dt x and beta in `rows`, and `spans`.
    """
    batch, time, heads, head_dim = x.shape
    state_size, segments = B.shape[3], adjoints.shape[2] - 1
    chunks = segments * segment // SUB_CHUNK
    padded = chunks * SUB_CHUNK
    rows = x.new_empty(batch, heads, chunks, head_dim, ROW_WORDS, dtype=torch.float32)
    decays = x.new_empty(batch, heads, chunks, 272, dtype=torch.float32)
    prepare_rows[(chunks, batch * heads)](
        x, dt, beta, A, dy, dt if doc is None else doc, rows, rows.view(torch.bfloat16), decays,
        *x.stride()[:3], *dt.stride(), *beta.stride()[:3], *dy.stride()[:3], time, heads,
        P=head_dim, HAS_DOC=doc is not None, num_warps=2,
    )  # fmt: skip
    starts = x.new_empty(batch, heads, chunks, head_dim // 8, 2, state_size, 8, dtype=torch.bfloat16)
    sub_chunk_starts[(segments * (head_dim // START_ROWS), batch * heads)](
        x, dt, beta, B, states, decays, starts,
        *x.stride()[:3], *dt.stride(), *beta.stride()[:3], *B.stride()[:3],
        time, padded, heads, heads, segments, segment,
        P=head_dim, N=state_size, BP=START_ROWS, **dot_types, num_warps=2, num_stages=3,
    )  # fmt: skip
    spans = x.new_empty(batch, heads, chunks, NUM_WARPS, SPAN_WORDS, 32, dtype=torch.float32)
    keys = x.new_empty(2, batch, heads, padded, state_size, dtype=torch.float32)
    B, C = _pairs(B), _pairs(C)
    segment_gradients_kernel[(segments, batch * heads)](
        B, C, I_prior, rows, decays, starts.view(torch.int32), adjoints, *keys, spans,
        *B.stride()[:3], *C.stride()[:3], time, padded, heads, heads, segments, segment, num_warps=NUM_WARPS,
    )  # fmt: skip
    return keys, (rows, spans)


def carry_gradients(x, dt, A, B, beta, doc, states, adjoints, decay, own, keys, dx, ddt, dbeta, segment, dot_types):
    """Step 6, adjoints passed on: what the adjoint after segment k, slot k + 1, adds to what its `own` tokens cause.

    Writes dx, ddt and dbeta and adds to dB, the first of `keys`; returns dA and dprior `[2, h]`.
    """
    batch, time, heads, head_dim = x.shape
    state_size, segments = B.shape[3], decay.shape[2]
    rows, spans = own
    padded, block = segments * segment, min(segment, CARRY_TOKENS)
    dvx, w = x.new_empty(2, batch, heads, padded, dtype=torch.float32)
    flow = x.new_empty(2, batch, heads, padded, dtype=torch.float32)
    whole = x.new_empty(2, batch, heads, segments, dtype=torch.float32)
    sizes = {"S": segment, "BT": block, "P": head_dim, "N": state_size, **dot_types}
    carry_rows[(segments, batch * heads, 2)](
        x, dt, beta, A, B, dt if doc is None else doc, rows, states, adjoints, decay, dx, dbeta, dvx, w, flow, whole,
        *x.stride()[:3], *dt.stride(), *beta.stride()[:3], *B.stride()[:2], *dx.stride()[:3],
        time, padded, heads, segments, HAS_DOC=doc is not None, **sizes, num_warps=4, num_stages=1,
    )  # fmt: skip
    carry_keys[(triton.cdiv(time, block) * (state_size // CARRY_KEYS), batch)](
        x, dt, beta, B, adjoints, w, keys[0],
        *x.stride()[:3], *dt.stride(), *beta.stride()[:3], *B.stride()[:2],
        time, padded, heads, segments, BN=CARRY_KEYS, **sizes, num_warps=4, num_stages=3,
    )  # fmt: skip
    blocks = triton.cdiv(padded // SUB_CHUNK, SPAN_BLOCK)
    scalars = x.new_empty(2, batch, heads, blocks, dtype=torch.float32)
    sum_spans[(blocks, batch * heads)](
        spans, dvx, flow, whole, dt, A, ddt, *scalars, *dt.stride(), *ddt.stride(), time, padded, heads,
        S=segment, SUBS=SPAN_BLOCK, NW=NUM_WARPS, num_warps=1,
    )  # fmt: skip
    return scalars.sum((1, 3))
