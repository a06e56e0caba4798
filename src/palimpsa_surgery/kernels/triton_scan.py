"""The Palimpsa scan in Triton, forward and backward (paper Eq. 5 in natural parameters, A.5).

Letters: b batch, t time (s: an earlier token), h heads, p head_dim, g groups, n state_size. Time is cut into
segments of S tokens, and in the backward pass each segment into sub-chunks of L = 16 tokens.

The recurrences of M and Ibar are linear; only the read-out `M / (I_prior + Ibar)` is elementwise. So

1. `_segment_states`: what each segment adds to the state is a decayed matrix product, `(dt x)ᵀ B` and `betaᵀ B²`.
2. `_pass_states`: a short loop over segments gives the state at every segment's start.
3. `_read_out`: all segments in parallel, a loop over time with the state in registers.

The backward pass saves nothing but the inputs. It runs 1 and 2 again, with shorter segments, and then

4. `_segment_adjoints`: what each segment adds to the adjoint of its starting state (a loop over time, as in 3,
   because Z = C dy / I has no low rank), and `_pass_states` backwards over segments.
5. `_segment_gradients`: sub-chunks from last to first. For one value row p of a sub-chunk, with
   D[s, t] = decay from s to t (zero for t < s or across documents), as `[n, t]` tiles:

        M  = Bᵀ (dt x ∘ D)   + M_start decay      I  = I_prior + (B²)ᵀ (beta ∘ D) + Ibar_start decay
        Z  = C dy / I                             Z_I = -Z M / I               (direct adjoints of M and Ibar)
        Q  = Bᵀ Z                                 Q_I = (B²)ᵀ Z_I                  (as [s, t])
        W  = Z Dᵀ + decay E_M                     W_I = Z_I Dᵀ + decay E_I         (total adjoints of M[s], Ibar[s])
        d(dt x)[s] = Σ_t D Q + decay Σ_n B E_M    dbeta[s] = Σ_t D Q_I + decay Σ_n B² E_I
        dC += dy M / I                            dB += (dt x) W + 2 B beta W_I

   E_M and E_I, the adjoints that arrive from after the sub-chunk, become alpha W at its first token. The gradient of
   log alpha[r] sums up what token r lets through, formed inside the sub-chunk without any difference of long sums:
   from s < r to t ≥ r, D (dt x Q + beta Q_I); from the start to t ≥ r, decay (Z M_start + Z_I Ibar_start); from s < r
   to the end, decay (dt x B E_M + beta B² E_I); from the start to the end, decay (E_M M_start + E_I Ibar_start).

A reset at a document's start is a mask (the decay over it is zero), never log alpha = -inf. No decay is divided by.
Sums over heads, key blocks and time go through float32 partial results and a fixed order: results are deterministic.
The launches of the backward pass take a few heads at a time, which bounds its memory.
"""

import functools
import hashlib
import os

import torch
from torch import Tensor

from .decay import document_numbers
from .hopper_scan import BACKWARD_SEGMENT as TUNED_SEGMENT
from .hopper_scan import ROW_VALUES as TUNED_ROW_VALUES
from .hopper_scan import STATE_COPIES as TUNED_STATE_COPIES
from .hopper_scan import fits as tuned_fits
from .hopper_scan import read_out as tuned_read_out
from .hopper_scan import segment_adjoints as tuned_segment_adjoints
from .hopper_scan import segment_gradients as tuned_segment_gradients

try:
    import triton
    import triton.language as tl

    # Whatever grows with the sequence is not specialised on: a prompt of another length compiles nothing anew
    jit = functools.partial(triton.jit, do_not_specialize=("T", "NSEG", "dt_b", "ddt_b"))
except ImportError:  # the module still imports; `palimpsa_scan_triton` is then not to be called
    from types import SimpleNamespace

    triton, tl = None, SimpleNamespace(constexpr=None)

    def jit(function):
        """Leave the kernels as plain functions."""
        return function


# Constants measured on one H200 at B=1 T=32768 H=80 P=64 N=128 G=1 bf16 (docs/experiments.md has the table).
# Tokens a segment: the read-out takes 8.8, 8.9, 8.9 ms with 256, 512, 1024; 512 keeps the states at 0.33 GiB.
FORWARD_SEGMENT = 512
# Backward: the kernel works out each sub-chunk's starting state from the segment's, so it prefers short ones.
BACKWARD_SEGMENT = 128
SUB_CHUNK = 16
KEY_BLOCK = 64  # of the portable gradient kernel: 10% faster than 32 on Hopper although it spills registers
# Tokens, value rows and keys of a product in `_segment_states`. Without tensor cores a product is unrolled: in float32
# the larger tile spills 13 KB a thread and compiles in 33 seconds, the smaller one spills nothing and takes 2.
STATE_TILE, STATE_TILE_FP32 = (64, 64, 128), (16, 64, 64)
# Of the gradient kernel, one by default. In float32 one warp spills 2.3 KB a thread and compiles in 55 seconds, four
# spill 0.2 KB and take 15.
WARPS = {torch.float32: 4}
# Bytes of temporary tensors that a launch of the backward pass may take; twice as many save 2%.
WORKSPACE_BYTES = 768 * 2**20
# Whether `hopper_scan.py` is used where it fits; tests turn it off to reach the portable kernels.
USE_TUNED = True
_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


# ---------------------------------------------------------------------------------------------------------------------
# Kernels


@jit
def _reciprocal(x, FAST: tl.constexpr):
    if FAST:  # one instruction, 1 ulp
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        r = 1.0 / x
    return r


@jit
def _segment_states(
    x, dt, beta, A, B, doc, states, decay,
    x_b, x_t, x_h, x_p, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, beta_p, B_b, B_t, B_g,
    T, H, HPG, P, N, NSEG, S,
    BT: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, HAS_DOC: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Slot k + 1 of states [b, h, NSEG + 1, 2, p, n] = what segment k adds; decay [b, h, NSEG] = what it keeps."""
    i_seg = tl.program_id(0).to(tl.int64)
    i_bh = tl.program_id(1).to(tl.int64)
    NBN = tl.cdiv(N, BN)
    i_p = tl.program_id(2) // NBN
    i_n = tl.program_id(2) % NBN
    b = i_bh // H
    h = i_bh % H
    o_t = tl.arange(0, BT)
    o_p = i_p * BP + tl.arange(0, BP)
    o_n = i_n * BN + tl.arange(0, BN)
    m_p = o_p < P
    m_n = o_n < N
    b_A = tl.load(A + h)
    t0 = i_seg * S
    end = tl.minimum(t0 + S, T)
    p_x = x + b * x_b + h * x_h + o_p[:, None] * x_p
    p_beta = beta + b * beta_b + h * beta_h + o_p[:, None] * beta_p
    p_B = B + b * B_b + (h // HPG) * B_g + o_n[None, :]
    p_dt = dt + b * dt_b + h * dt_h
    b_M = tl.zeros([BP, BN], tl.float32)
    b_I = tl.zeros([BP, BN], tl.float32)
    b_keep = 1.0
    b_before = 0
    if HAS_DOC:
        b_before = tl.load(doc + b * T + tl.maximum(t0 - 1, 0))
    for start in range(t0, end, BT):
        t = start + o_t
        m_t = t < end
        b_dt = tl.load(p_dt + t * dt_t, mask=m_t, other=0.0)  # [BT]
        b_log = -b_A * b_dt
        # decay from token to the block's end, over the later tokens alone: the token's own may be larger by far
        b_later = tl.load(p_dt + (t + 1) * dt_t, mask=(o_t + 1 < BT) & (t + 1 < end), other=0.0)
        b_w = tl.exp(tl.cumsum(-b_A * b_later, 0, reverse=True))
        b_pass = tl.exp(tl.sum(b_log, 0))
        if HAS_DOC:
            b_doc = tl.load(doc + b * T + t, mask=m_t, other=-1)
            b_last = tl.load(doc + b * T + tl.minimum(start + BT, end) - 1)
            b_w = tl.where(b_doc == b_last, b_w, 0.0)
            b_pass = tl.where(b_before == b_last, b_pass, 0.0)
            b_before = b_last
        b_x = tl.load(p_x + t[None, :] * x_t, mask=m_p[:, None] & m_t[None, :], other=0.0)  # [BP, BT]
        b_beta = tl.load(p_beta + t[None, :] * beta_t, mask=m_p[:, None] & m_t[None, :], other=0.0)
        b_B = tl.load(p_B + t[:, None] * B_t, mask=m_t[:, None] & m_n[None, :], other=0.0)  # [BT, BN]
        b_Bf = b_B.to(tl.float32)
        b_v = (b_x.to(tl.float32) * (b_dt * b_w)[None, :]).to(DOT)
        b_u = (b_beta.to(tl.float32) * b_w[None, :]).to(DOT)
        b_M = tl.dot(b_v, b_B.to(DOT), acc=b_M * b_pass, input_precision=PRECISION)
        b_I = tl.dot(b_u, (b_Bf * b_Bf).to(DOT), acc=b_I * b_pass, input_precision=PRECISION)
        b_keep *= b_pass
    p_s = states + (i_bh * (NSEG + 1) + i_seg + 1) * 2 * P * N + o_p[:, None] * N + o_n[None, :]
    m_s = m_p[:, None] & m_n[None, :]
    tl.store(p_s, b_M, mask=m_s)
    tl.store(p_s + P * N, b_I, mask=m_s)
    if tl.program_id(2) == 0:
        tl.store(decay + i_bh * NSEG + i_seg, b_keep)


@jit
def _pass_states(states, decay, NSEG, SIZE, BLOCK: tl.constexpr, REVERSE: tl.constexpr):
    """In place over slots of states [b, h, NSEG + 1, SIZE]: s[k + 1] += decay[k] s[k]; reversed, k and k + 1 swap."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i_bh = tl.program_id(1).to(tl.int64)
    m = o < SIZE
    p = states + i_bh * (NSEG + 1) * SIZE + o
    p_decay = decay + i_bh * NSEG
    step = SIZE
    if REVERSE:
        p = states + (i_bh * (NSEG + 1) + NSEG) * SIZE + o
        step = -SIZE
    sign = 1
    if REVERSE:
        p_decay += NSEG - 1
        sign = -1
    last = i_bh * 0 + NSEG - 1
    b_s = tl.load(p, mask=m, other=0.0)
    for k in range(0, NSEG, 4):  # four loads in flight: the loop waits for memory, not for arithmetic
        m_1 = m & (o * 0 + k + 1 <= last)
        m_2 = m & (o * 0 + k + 2 <= last)
        m_3 = m & (o * 0 + k + 3 <= last)
        b_0 = tl.load(p + step, mask=m, other=0.0)
        b_1 = tl.load(p + 2 * step, mask=m_1, other=0.0)
        b_2 = tl.load(p + 3 * step, mask=m_2, other=0.0)
        b_3 = tl.load(p + 4 * step, mask=m_3, other=0.0)
        b_0 += tl.load(p_decay + sign * k) * b_s
        b_1 += tl.load(p_decay + sign * tl.minimum(k + 1, last)) * b_0
        b_2 += tl.load(p_decay + sign * tl.minimum(k + 2, last)) * b_1
        b_3 += tl.load(p_decay + sign * tl.minimum(k + 3, last)) * b_2
        tl.store(p + step, b_0, mask=m)
        tl.store(p + 2 * step, b_1, mask=m_1)
        tl.store(p + 3 * step, b_2, mask=m_2)
        tl.store(p + 4 * step, b_3, mask=m_3)
        b_s = b_3
        p += 4 * step


@jit
def _read_out(
    x, dt, beta, A, B, C, prior, doc, states, y, variance,
    x_b, x_t, x_h, x_p, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, beta_p, B_b, B_t, B_g, C_b, C_t, C_g,
    T, H, HPG, P, N, NSEG, S,
    BP: tl.constexpr, BN: tl.constexpr, HAS_DOC: tl.constexpr, HAS_VAR: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """y and variance [b, t, h, p] of one segment, from the state at its start; BN = N rounded up."""
    i_p = tl.program_id(0)
    i_seg = tl.program_id(1).to(tl.int64)
    i_bh = tl.program_id(2).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    o_p = i_p * BP + tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    m_p = o_p < P
    m_n = o_n < N
    b_A = tl.load(A + h)
    b_prior = tl.load(prior + h)
    t0 = i_seg * S
    p_x = x + b * x_b + h * x_h + o_p * x_p + t0 * x_t
    p_beta = beta + b * beta_b + h * beta_h + o_p * beta_p + t0 * beta_t
    p_B = B + b * B_b + (h // HPG) * B_g + o_n + t0 * B_t
    p_C = C + b * C_b + (h // HPG) * C_g + o_n + t0 * C_t
    p_dt = dt + b * dt_b + h * dt_h + t0 * dt_t
    p_y = y + ((b * T + t0) * H + h) * P + o_p
    p_var = variance + ((b * T + t0) * H + h) * P + o_p
    p_doc = doc + b * T + t0
    p_s = states + (i_bh * (NSEG + 1) + i_seg) * 2 * P * N + o_p[:, None] * N + o_n[None, :]
    m_s = m_p[:, None] & m_n[None, :]
    b_M = tl.load(p_s, mask=m_s, other=0.0)  # [BP, BN]
    b_I = tl.load(p_s + P * N, mask=m_s, other=0.0) + b_prior
    b_before = 0
    if HAS_DOC:
        b_before = tl.load(doc + b * T + tl.maximum(t0 - 1, 0))
    for _ in range(tl.minimum(S, T - t0)):
        b_dt = tl.load(p_dt)
        b_a = tl.exp(-b_A * b_dt)
        if HAS_DOC:
            b_doc = tl.load(p_doc)
            b_a = tl.where(b_doc == b_before, b_a, 0.0)
            b_before = b_doc
            p_doc += 1
        b_v = tl.load(p_x, mask=m_p, other=0.0).to(tl.float32) * b_dt
        b_u = tl.load(p_beta, mask=m_p, other=0.0).to(tl.float32)
        b_B = tl.load(p_B, mask=m_n, other=0.0).to(tl.float32)
        b_C = tl.load(p_C, mask=m_n, other=0.0).to(tl.float32)
        b_M = b_a * b_M + b_v[:, None] * b_B[None, :]
        # the prior does not decay
        b_I = (b_a * b_I + (1.0 - b_a) * b_prior) + b_u[:, None] * (b_B * b_B)[None, :]
        b_r = b_C[None, :] * _reciprocal(b_I, FAST)
        tl.store(p_y, tl.sum(b_M * b_r, 1).to(y.dtype.element_ty), mask=m_p)
        if HAS_VAR:
            tl.store(p_var, tl.sum(b_C[None, :] * b_r, 1), mask=m_p)
            p_var += H * P
        p_x += x_t
        p_beta += beta_t
        p_B += B_t
        p_C += C_t
        p_dt += dt_t
        p_y += H * P


@jit
def _segment_adjoints(
    x, dt, beta, A, B, C, prior, dy, dvar, doc, states, adjoints,
    x_b, x_t, x_h, x_p, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, beta_p, B_b, B_t, B_g, C_b, C_t, C_g,
    dy_b, dy_t, dy_h, dy_p, dvar_b, dvar_t, dvar_h, dvar_p,
    T, H, HPG, P, N, NSEG, S,
    BP: tl.constexpr, BN: tl.constexpr, HAS_DOC: tl.constexpr, HAS_VAR: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Slot k of adjoints [b, h, NSEG + 1, 2, p, n] = adjoint of segment k's starting state, from its own tokens."""
    i_p = tl.program_id(0)
    i_seg = tl.program_id(1).to(tl.int64)
    i_bh = tl.program_id(2).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    o_p = i_p * BP + tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    m_p = o_p < P
    m_n = o_n < N
    b_A = tl.load(A + h)
    b_prior = tl.load(prior + h)
    t0 = i_seg * S
    p_x = x + b * x_b + h * x_h + o_p * x_p + t0 * x_t
    p_beta = beta + b * beta_b + h * beta_h + o_p * beta_p + t0 * beta_t
    p_dy = dy + b * dy_b + h * dy_h + o_p * dy_p + t0 * dy_t
    p_dvar = dvar + b * dvar_b + h * dvar_h + o_p * dvar_p + t0 * dvar_t
    p_B = B + b * B_b + (h // HPG) * B_g + o_n + t0 * B_t
    p_C = C + b * C_b + (h // HPG) * C_g + o_n + t0 * C_t
    p_dt = dt + b * dt_b + h * dt_h + t0 * dt_t
    p_doc = doc + b * T + t0
    o_s = (i_bh * (NSEG + 1) + i_seg) * 2 * P * N + o_p[:, None] * N + o_n[None, :]
    m_s = m_p[:, None] & m_n[None, :]
    b_M = tl.load(states + o_s, mask=m_s, other=0.0)  # [BP, BN]
    b_I = tl.load(states + o_s + P * N, mask=m_s, other=0.0) + b_prior
    b_E = tl.zeros([BP, BN], tl.float32)
    b_EI = tl.zeros([BP, BN], tl.float32)
    b_w = 1.0
    b_before = 0
    if HAS_DOC:
        b_before = tl.load(doc + b * T + tl.maximum(t0 - 1, 0))
    for _ in range(tl.minimum(S, T - t0)):
        b_dt = tl.load(p_dt)
        b_a = tl.exp(-b_A * b_dt)
        if HAS_DOC:
            b_doc = tl.load(p_doc)
            b_a = tl.where(b_doc == b_before, b_a, 0.0)
            b_before = b_doc
            p_doc += 1
        b_w *= b_a  # decay since the segment's start
        b_v = tl.load(p_x, mask=m_p, other=0.0).to(tl.float32) * b_dt
        b_u = tl.load(p_beta, mask=m_p, other=0.0).to(tl.float32)
        b_dy = tl.load(p_dy, mask=m_p, other=0.0).to(tl.float32) * b_w
        b_B = tl.load(p_B, mask=m_n, other=0.0).to(tl.float32)
        b_C = tl.load(p_C, mask=m_n, other=0.0).to(tl.float32)
        b_M = b_a * b_M + b_v[:, None] * b_B[None, :]
        b_I = (b_a * b_I + (1.0 - b_a) * b_prior) + b_u[:, None] * (b_B * b_B)[None, :]
        b_r = _reciprocal(b_I, FAST)
        b_Z0 = b_C[None, :] * b_r
        b_Z = b_dy[:, None] * b_Z0
        b_E += b_Z
        b_EI -= b_Z * (b_M * b_r)
        if HAS_VAR:
            b_dvar = tl.load(p_dvar, mask=m_p, other=0.0) * b_w
            b_EI -= b_dvar[:, None] * (b_Z0 * b_Z0)
            p_dvar += dvar_t
        p_x += x_t
        p_beta += beta_t
        p_dy += dy_t
        p_B += B_t
        p_C += C_t
        p_dt += dt_t
    tl.store(adjoints + o_s, b_E, mask=m_s)
    tl.store(adjoints + o_s + P * N, b_EI, mask=m_s)


@jit
def _segment_gradients(
    xT, dt, betaT, A, B, C, prior, dyT, dvarT, doc, states, starts, adjoints,
    dvT, dbetaT, dB, dC, dlog, dprior,
    dt_b, dt_t, dt_h, B_b, B_t, B_g, C_b, C_t, C_g,
    T, BATCH, H, HPG, P, N, NSEG,
    S: tl.constexpr, L: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    HAS_DOC: tl.constexpr, HAS_VAR: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of one segment, one head and one block of keys, sub-chunk by sub-chunk from the last.

    Slot k + 1 of adjoints is the adjoint after segment k and is overwritten; starts [b, h, NSEG, 2, p, n] is scratch.
    Partial results: dvT = d(dt x), dbetaT [key blocks, b, h, p, t]; dB, dC [b, h, t, n]; dlog = d log alpha
    [key blocks, b, h, t]; dprior [key blocks, b, h, NSEG].
    """
    i_n = tl.program_id(0)
    i_seg = tl.program_id(1).to(tl.int64)
    i_bh = tl.program_id(2).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    i_part = i_n * BATCH * H + i_bh
    o_l = tl.arange(0, L)
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < N
    b_A = tl.load(A + h)
    b_prior = tl.load(prior + h)
    t0 = i_seg * S
    p_dt = dt + b * dt_b + h * dt_h
    p_B = B + b * B_b + (h // HPG) * B_g
    p_C = C + b * C_b + (h // HPG) * C_g
    p_doc = doc + b * T
    p_seg = states + (i_bh * (NSEG + 1) + i_seg) * 2 * P * N  # state at the segment's start
    p_start = starts + (i_bh * NSEG + i_seg) * 2 * P * N  # state at the sub-chunk's start
    p_E = adjoints + (i_bh * (NSEG + 1) + i_seg + 1) * 2 * P * N + o_n
    b_dprior = 0.0
    n_sub = tl.cdiv(tl.minimum(S, T - t0), L)
    for i in range(n_sub):
        j = n_sub - 1 - i
        ts = t0 + j * L
        t = ts + o_l
        m_t = t < T
        b_before = 0
        b_doc = tl.zeros([L], tl.int32)
        if HAS_DOC:
            b_before = tl.load(p_doc + tl.maximum(ts - 1, 0))
            b_doc = tl.load(p_doc + t, mask=m_t, other=-1)

        # The state at the sub-chunk's start: the segment's, decayed, and a product over the tokens between.
        for p0 in range(0, P, BP):
            o_p = p0 + tl.arange(0, BP)
            m_p = o_p < P
            b_M = tl.zeros([BP, BN], tl.float32)
            b_I = tl.zeros([BP, BN], tl.float32)
            b_sum = 0.0  # log decay from the end of the tokens still to come to the sub-chunk's start
            for k in range(j):
                s = ts - (k + 1) * L + o_l
                b_dt = tl.load(p_dt + s * dt_t)
                b_later = tl.load(p_dt + (s + 1) * dt_t, mask=o_l + 1 < L, other=0.0)
                b_w = tl.exp(tl.cumsum(-b_A * b_later, 0, reverse=True) + b_sum)
                b_sum -= b_A * tl.sum(b_dt, 0)
                if HAS_DOC:
                    b_w = tl.where(tl.load(p_doc + s) == b_before, b_w, 0.0)
                o_row = (i_bh * P + o_p[:, None]) * T + s[None, :]
                b_x = tl.load(xT + o_row, mask=m_p[:, None], other=0.0).to(tl.float32)  # [BP, L]
                b_u = tl.load(betaT + o_row, mask=m_p[:, None], other=0.0).to(tl.float32)
                b_B = tl.load(p_B + s[:, None] * B_t + o_n[None, :], mask=m_n[None, :], other=0.0)  # [L, BN]
                b_Bf = b_B.to(tl.float32)
                b_M = tl.dot((b_x * (b_dt * b_w)[None, :]).to(DOT), b_B.to(DOT), acc=b_M, input_precision=PRECISION)
                b_I = tl.dot((b_u * b_w[None, :]).to(DOT), (b_Bf * b_Bf).to(DOT), acc=b_I, input_precision=PRECISION)
            b_keep = tl.exp(b_sum)
            if HAS_DOC:
                b_keep = tl.where(tl.load(p_doc + tl.maximum(t0 - 1, 0)) == b_before, b_keep, 0.0)
            o_s = o_p[:, None] * N + o_n[None, :]
            m_s = m_p[:, None] & m_n[None, :]
            b_M += b_keep * tl.load(p_seg + o_s, mask=m_s, other=0.0)
            b_I += b_keep * tl.load(p_seg + P * N + o_s, mask=m_s, other=0.0)
            tl.store(p_start + o_s, b_M, mask=m_s)
            tl.store(p_start + P * N + o_s, b_I, mask=m_s)
        tl.debug_barrier()

        b_dt = tl.load(p_dt + t * dt_t, mask=m_t, other=0.0)
        b_log = -b_A * b_dt
        # decay from s to t: sums of log alpha over s < r <= t alone, never differences of longer sums
        b_D = tl.exp(tl.cumsum(tl.where(o_l[None, :] > o_l[:, None], b_log[None, :], 0.0), 1))
        b_D = tl.where(o_l[None, :] >= o_l[:, None], b_D, 0.0)  # [s, t]
        b_in = tl.exp(tl.cumsum(b_log, 0))  # from the sub-chunk's start to t
        if HAS_DOC:
            b_D = tl.where(b_doc[:, None] == b_doc[None, :], b_D, 0.0)
            b_in = tl.where(b_doc == b_before, b_in, 0.0)
        # tokens past the sequence's end have dt = 0 and pass the adjoint through
        b_last = o_l == tl.minimum(T - ts, L) - 1
        b_out = tl.sum(tl.where(b_last[None, :], b_D, 0.0), 1)  # from s to the sub-chunk's end
        b_first = tl.sum(tl.where(o_l == 0, b_in, 0.0), 0)
        b_through = tl.sum(tl.where(b_last, b_in, 0.0), 0)  # from the sub-chunk's start to its end
        b_DT = tl.trans(b_D).to(DOT)  # [t, s]
        m_nt = m_n[:, None] & m_t[None, :]
        b_B = tl.load(p_B + t[None, :] * B_t + o_n[:, None], mask=m_nt, other=0.0)  # [BN, L]
        b_C = tl.load(p_C + t[None, :] * C_t + o_n[:, None], mask=m_nt, other=0.0).to(tl.float32)
        b_Bf = b_B.to(tl.float32)
        b_B2 = (b_Bf * b_Bf).to(DOT)
        b_B = b_B.to(DOT)

        # The part of d(dt x) and dbeta that arrives from after the sub-chunk; the rows' loop adds the rest
        b_late = tl.zeros([L], tl.float32)
        for p0 in range(0, P, BP):
            o_p = p0 + tl.arange(0, BP)
            m_p = o_p < P
            o_e = o_p[:, None] * N
            m_e = m_p[:, None] & m_n[None, :]
            b_E = tl.load(p_E[None, :] + o_e, mask=m_e, other=0.0)  # [BP, BN]
            b_EI = tl.load(p_E[None, :] + P * N + o_e, mask=m_e, other=0.0)
            b_dv = tl.dot(b_E.to(DOT), b_B, input_precision=PRECISION) * b_out[None, :]  # [BP, L]
            b_du = tl.dot(b_EI.to(DOT), b_B2, input_precision=PRECISION) * b_out[None, :]
            o_row = o_p[:, None] * T + t[None, :]
            m_row = m_p[:, None] & m_t[None, :]
            b_x = tl.load(xT + i_bh * P * T + o_row, mask=m_row, other=0.0).to(tl.float32)
            b_u = tl.load(betaT + i_bh * P * T + o_row, mask=m_row, other=0.0).to(tl.float32)
            b_late += tl.sum(b_x * b_dt[None, :] * b_dv + b_u * b_du, 0)
            tl.store(dvT + i_part * P * T + o_row, b_dv, mask=m_row)
            tl.store(dbetaT + i_part * P * T + o_row, b_du, mask=m_row)
        tl.debug_barrier()

        b_BT = tl.trans(b_B)
        b_B2T = tl.trans(b_B2)
        b_dC = tl.zeros([BN, L], tl.float32)
        b_dB = tl.zeros([BN, L], tl.float32)
        b_dB2 = tl.zeros([BN, L], tl.float32)
        b_z = tl.zeros([L], tl.float32)
        b_spans = tl.zeros([L, L], tl.float32)  # [s, t]
        b_start = tl.zeros([L], tl.float32)
        b_whole = tl.zeros([BN], tl.float32)
        for p in range(P):
            o_row = (i_bh * P + p) * T + t
            b_v = tl.load(xT + o_row, mask=m_t, other=0.0).to(tl.float32) * b_dt
            b_u = tl.load(betaT + o_row, mask=m_t, other=0.0).to(tl.float32)
            b_dy = tl.load(dyT + o_row, mask=m_t, other=0.0).to(tl.float32)
            b_M0 = tl.load(p_start + p * N + o_n, mask=m_n, other=0.0)
            b_I0 = tl.load(p_start + (P + p) * N + o_n, mask=m_n, other=0.0)
            b_M = tl.dot(
                b_B, (b_D * b_v[:, None]).to(DOT), acc=b_M0[:, None] * b_in[None, :], input_precision=PRECISION
            )  # [BN, L]
            b_I = tl.dot(
                b_B2,
                (b_D * b_u[:, None]).to(DOT),
                acc=b_I0[:, None] * b_in[None, :] + b_prior,
                input_precision=PRECISION,
            )
            b_r = _reciprocal(b_I, FAST)
            b_Z0 = b_C * b_r
            b_mu = b_M * b_r
            b_dC += b_dy[None, :] * b_mu
            b_Z = b_dy[None, :] * b_Z0
            b_ZI = -b_Z * b_mu
            if HAS_VAR:
                b_dvar = tl.load(dvarT + o_row, mask=m_t, other=0.0)
                b_g = b_dvar[None, :] * b_Z0
                b_dC += 2.0 * b_g
                b_ZI -= b_g * b_Z0
            b_z += tl.sum(b_ZI, 0)
            b_E = tl.load(p_E + p * N, mask=m_n, other=0.0)
            b_EI = tl.load(p_E + (P + p) * N, mask=m_n, other=0.0)
            b_start += tl.sum(b_Z * b_M0[:, None] + b_ZI * b_I0[:, None], 0)
            b_whole += b_E * b_M0 + b_EI * b_I0
            b_Z = b_Z.to(DOT)
            b_ZI = b_ZI.to(DOT)
            b_Q = tl.dot(b_BT, b_Z, input_precision=PRECISION) * b_D  # [s, t]
            b_QI = tl.dot(b_B2T, b_ZI, input_precision=PRECISION) * b_D
            b_spans += b_Q * b_v[:, None] + b_QI * b_u[:, None]
            o_part = (i_part * P + p) * T + t
            b_dv = tl.load(dvT + o_part, mask=m_t, other=0.0) + tl.sum(b_Q, 1)
            b_du = tl.load(dbetaT + o_part, mask=m_t, other=0.0) + tl.sum(b_QI, 1)
            b_W = tl.dot(b_Z, b_DT, acc=b_E[:, None] * b_out[None, :], input_precision=PRECISION)
            b_WI = tl.dot(b_ZI, b_DT, acc=b_EI[:, None] * b_out[None, :], input_precision=PRECISION)
            b_dB += b_W * b_v[None, :]
            b_dB2 += b_WI * b_u[None, :]
            b_E = tl.sum(tl.where(o_l[None, :] == 0, b_W, 0.0), 1) * b_first
            b_EI = tl.sum(tl.where(o_l[None, :] == 0, b_WI, 0.0), 1) * b_first
            tl.debug_barrier()  # all warps have read what is overwritten now
            tl.store(dvT + o_part, b_dv, mask=m_t)
            tl.store(dbetaT + o_part, b_du, mask=m_t)
            tl.store(p_E + p * N, b_E, mask=m_n)
            tl.store(p_E + (P + p) * N, b_EI, mask=m_n)
        o_out = (i_bh * T + t[None, :]) * N + o_n[:, None]
        tl.store(dC + o_out, b_dC, mask=m_nt)
        tl.store(dB + o_out, b_dB + 2.0 * b_Bf * b_dB2, mask=m_nt)
        # What each token lets through: from s before it to t from it on
        b_q = tl.sum(tl.where(o_l[:, None] < o_l[None, :], tl.cumsum(b_spans, 1, reverse=True), 0.0), 0)
        b_q += tl.cumsum(b_start * b_in, 0, reverse=True)
        b_q += tl.sum(tl.where(o_l[:, None] < o_l[None, :], b_late[:, None], 0.0), 0)
        b_q += b_through * tl.sum(b_whole, 0)
        tl.store(dlog + i_part * T + t, b_q, mask=m_t)
        b_dprior += tl.sum(b_z, 0)
        tl.debug_barrier()
    tl.store(dprior + i_part * NSEG + i_seg, b_dprior)


@jit
def _reduce_rows(
    xT, dt, A, dvT, dbetaT, dlog, dx, ddt, dbeta, dA,
    dt_b, dt_t, dt_h, g_b, g_t, g_h, ddt_b, ddt_t, ddt_h,
    T, H, P, PARTS, PART_ROWS, BT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Sum the key blocks' parts: dx and dbeta [b, t, h, p] (strides g_*), ddt [b, t, h], dA [b, h, blocks of t]."""
    i_t = tl.program_id(0).to(tl.int64)
    i_bh = tl.program_id(1).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    t = i_t * BT + tl.arange(0, BT)
    o_p = tl.arange(0, BP)
    m_t = t < T
    m = m_t[:, None] & (o_p < P)[None, :]
    part = (i_bh * 0 + PART_ROWS) * P * T  # in 64 bits
    o_row = (i_bh * P + o_p[None, :]) * T + t[:, None]
    b_dt = tl.load(dt + b * dt_b + t * dt_t + h * dt_h, mask=m_t, other=0.0)
    b_dv = tl.zeros([BT, BP], tl.float32)
    b_du = tl.zeros([BT, BP], tl.float32)
    b_q = tl.zeros([BT], tl.float32)
    p_q = dlog + i_bh * T + t
    for _ in range(PARTS):
        b_dv += tl.load(dvT + o_row, mask=m, other=0.0)
        b_du += tl.load(dbetaT + o_row, mask=m, other=0.0)
        b_q += tl.load(p_q, mask=m_t, other=0.0)
        dvT += part
        dbetaT += part
        p_q += PART_ROWS * T
    b_x = tl.load(xT + o_row, mask=m, other=0.0).to(tl.float32)
    b_ddt = tl.sum(b_dv * b_x, 1) - tl.load(A + h) * b_q
    o_g = b * g_b + t[:, None] * g_t + h * g_h + o_p[None, :]
    tl.store(dx + o_g, (b_dv * b_dt[:, None]).to(dx.dtype.element_ty), mask=m)
    tl.store(dbeta + o_g, b_du.to(dbeta.dtype.element_ty), mask=m)
    tl.store(ddt + b * ddt_b + t * ddt_t + h * ddt_h, b_ddt, mask=m_t)
    tl.store(dA + i_bh * tl.num_programs(0) + i_t, -tl.sum(b_dt * b_q, 0))


@jit
def _reduce_heads(part, total, H, PART_SIZE, SIZE, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    """total [b, SIZE] (+)= sum over h of part [b, h, PART_SIZE], of which the first SIZE = t n count."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = tl.program_id(1).to(tl.int64)
    m = o < SIZE
    b_sum = tl.zeros([BLOCK], tl.float32)
    if not FIRST:
        b_sum = tl.load(total + b * SIZE + o, mask=m, other=0.0)
    for h in range(H):
        b_sum += tl.load(part + (b * H + h) * PART_SIZE + o, mask=m, other=0.0)
    tl.store(total + b * SIZE + o, b_sum, mask=m)


# ---------------------------------------------------------------------------------------------------------------------
# Launchers


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _dot_types(x: Tensor) -> dict:
    """Types of the matrix products' operands: float16 lacks the range for B² and adjoints, so it runs as TF32."""
    if x.dtype == torch.bfloat16:
        return {"DOT": tl.bfloat16, "PRECISION": "tf32"}
    return {"DOT": tl.float32, "PRECISION": "tf32" if x.dtype == torch.float16 else "ieee"}


def _states(x, dt, A, B, beta, initial_state, doc, segment, heads_per_group):
    """States at the segments' boundaries `[b, h, segments + 1, 2, p, n]` and decays `[b, h, segments]`."""
    batch, time, heads, head_dim = x.shape
    state_size = B.shape[3]
    segments = triton.cdiv(time, segment)
    states = x.new_empty(batch, heads, segments + 1, 2, head_dim, state_size, dtype=torch.float32)
    decay = x.new_empty(batch, heads, segments, dtype=torch.float32)
    if initial_state is None:
        states[:, :, 0].zero_()
    else:
        states[:, :, 0].copy_(initial_state)
    BT, BP, BN = STATE_TILE_FP32 if x.dtype == torch.float32 else STATE_TILE
    BT = min(BT, segment)
    BP, BN = min(BP, max(16, _power_of_two(head_dim))), min(BN, max(16, _power_of_two(state_size)))
    grid = (segments, batch * heads, triton.cdiv(head_dim, BP) * triton.cdiv(state_size, BN))
    _segment_states[grid](
        x, dt, beta, A, B, dt if doc is None else doc, states, decay,
        *x.stride(), *dt.stride(), *beta.stride(), *B.stride()[:3],
        time, heads, heads_per_group, head_dim, state_size, segments, segment,
        BT=BT, BP=BP, BN=BN, HAS_DOC=doc is not None, **_dot_types(x), num_warps=4, num_stages=1,
    )  # fmt: skip
    _pass(states, decay, reverse=False)
    return states, decay


def _pass(states: Tensor, decay: Tensor, reverse: bool) -> None:
    batch, heads, segments = decay.shape
    size = states[0, 0, 0].numel()
    block = 1024
    _pass_states[(triton.cdiv(size, block), batch * heads)](
        states, decay, segments, size, BLOCK=block, REVERSE=reverse, num_warps=4
    )


def _forward(x, dt, A, B, C, beta, I_prior, initial_state, doc, return_variance):
    batch, time, heads, head_dim = x.shape
    groups, state_size = B.shape[2:]
    states, _ = _states(x, dt, A, B, beta, initial_state, doc, FORWARD_SEGMENT, heads // groups)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    variance = torch.empty(x.shape if return_variance else (0,), dtype=torch.float32, device=x.device)
    segments, documents = states.shape[2] - 1, dt if doc is None else doc
    sizes = (time, heads, heads // groups, head_dim)
    if not return_variance and USE_TUNED and tuned_fits(x, beta, B):
        tuned_read_out(x, dt, A, B, C, beta, I_prior, doc, states, y, FORWARD_SEGMENT)
    else:
        BP = 8
        _read_out[(triton.cdiv(head_dim, BP), segments, batch * heads)](
            x, dt, beta, A, B, C, I_prior, documents, states, y, variance,
            *x.stride(), *dt.stride(), *beta.stride(), *B.stride()[:3], *C.stride()[:3],
            *sizes, state_size, segments, FORWARD_SEGMENT,
            BP=BP, BN=_power_of_two(state_size), HAS_DOC=doc is not None, HAS_VAR=return_variance,
            FAST=not _INTERPRET, num_warps=1,
        )  # fmt: skip
    return y, states[:, :, -1].clone(), variance


def _backward_heads(
    x, dt, A, B, C, beta, I_prior, initial_state, doc, dy, dfinal, dvar, gradients, heads, group, first, tuned, segment
):
    """Write or, for dB and dC of the group, add what these heads, a slice within one group, contribute."""
    dx, ddt, dA, dB, dC, dbeta, dprior, dinitial = gradients
    x, dt, beta, dy, dx, ddt, dbeta = (v[:, :, heads] for v in (x, dt, beta, dy, dx, ddt, dbeta))
    dvar = dy if dvar is None else dvar[:, :, heads]
    A, I_prior, dA, dprior = A[heads], I_prior[heads], dA[heads], dprior[heads]
    B, C = B[:, :, group : group + 1], C[:, :, group : group + 1]
    batch, time, n_heads, head_dim = x.shape
    state_size = B.shape[3]
    documents = dt if doc is None else doc
    initial = None if initial_state is None else initial_state[:, heads]
    states, decay = _states(x, dt, A, B, beta, initial, doc, segment, n_heads)
    segments = decay.shape[2]
    adjoints = torch.empty_like(states)
    if dfinal is None:
        adjoints[:, :, -1].zero_()
    else:
        adjoints[:, :, -1].copy_(dfinal[:, heads])
    flags = {"HAS_DOC": doc is not None, "HAS_VAR": dvar is not dy, "FAST": not _INTERPRET}
    if tuned:
        prepared = tuned_segment_adjoints(x, dt, A, B, C, beta, I_prior, doc, dy, states, adjoints, segment)
    else:
        BP = 8
        _segment_adjoints[(triton.cdiv(head_dim, BP), segments, batch * n_heads)](
            x, dt, beta, A, B, C, I_prior, dy, dvar, documents, states, adjoints,
            *x.stride(), *dt.stride(), *beta.stride(), *B.stride()[:3], *C.stride()[:3], *dy.stride(),
            *dvar.stride(), time, n_heads, n_heads, head_dim, state_size, segments, segment,
            BP=BP, BN=_power_of_two(state_size), **flags, num_warps=1,
        )  # fmt: skip
    _pass(adjoints, decay, reverse=True)
    if dinitial is not None:
        dinitial[:, heads].copy_(adjoints[:, :, 0])
    outputs = (dx, ddt, dA, dbeta, dprior, segment)
    if tuned:
        keys = tuned_segment_gradients(x, dt, A, B, C, I_prior, prepared, adjoints, *outputs)
    else:
        keys = _gradients_portable(x, dt, A, B, C, beta, I_prior, doc, dy, states, adjoints, *outputs, dvar, flags)
    for part, total in zip(keys, (dB, dC), strict=True):
        part_size, size, block = part[0, 0].numel(), total[0].numel(), 1024
        _reduce_heads[(triton.cdiv(size, block), batch)](
            part, total, n_heads, part_size, size, BLOCK=block, FIRST=first, num_warps=4
        )


def _gradients_portable(
    x, dt, A, B, C, beta, I_prior, doc, dy, states, adjoints, dx, ddt, dA, dbeta, dprior, segment, dvar, flags
):
    """Step 5 in plain Triton; returns dB and dC `[b, h, t, n]`."""
    batch, time, heads, head_dim = x.shape
    state_size, segments = B.shape[3], states.shape[2] - 1
    xT, betaT, dyT, dvarT = (v.permute(0, 2, 3, 1).contiguous() for v in (x, beta, dy, dvar))
    BN = min(KEY_BLOCK, max(16, _power_of_two(state_size)))
    blocks = triton.cdiv(state_size, BN)
    starts = torch.empty_like(states[:, :, 1:])
    rows = x.new_empty(2, blocks, batch, heads, head_dim, time, dtype=torch.float32)
    keys = x.new_empty(2, batch, heads, time, state_size, dtype=torch.float32)
    dlog = x.new_empty(blocks, batch, heads, time, dtype=torch.float32)
    dprior_part = x.new_empty(blocks, batch, heads, segments, dtype=torch.float32)
    _segment_gradients[(blocks, segments, batch * heads)](
        xT, dt, betaT, A, B, C, I_prior, dyT, dvarT, dt if doc is None else doc, states, starts, adjoints,
        *rows, *keys, dlog, dprior_part,
        *dt.stride(), *B.stride()[:3], *C.stride()[:3],
        time, batch, heads, heads, head_dim, state_size, segments,
        S=segment, L=SUB_CHUNK, BP=min(32, max(16, _power_of_two(head_dim))), BN=BN,
        **flags, **_dot_types(x), num_warps=WARPS.get(x.dtype, 1), num_stages=1,
    )  # fmt: skip
    BT = 64
    dA_part = x.new_empty(batch, heads, triton.cdiv(time, BT), dtype=torch.float32)
    _reduce_rows[(triton.cdiv(time, BT), batch * heads)](
        xT, dt, A, *rows, dlog, dx, ddt, dbeta, dA_part,
        *dt.stride(), *dx.stride()[:3], *ddt.stride(),
        time, heads, head_dim, blocks, batch * heads, BT=BT, BP=_power_of_two(head_dim), num_warps=4,
    )  # fmt: skip
    dA.copy_(dA_part.sum((0, 2)))
    dprior.copy_(dprior_part.sum((0, 1, 3)))
    return keys


def _backward(x, dt, A, B, C, beta, I_prior, initial_state, doc, dy, dfinal, dvar):
    batch, time, heads, head_dim = x.shape
    groups, state_size = B.shape[2:]
    dx, dbeta = (torch.empty(x.shape, dtype=v.dtype, device=x.device) for v in (x, beta))
    ddt = torch.empty(dt.shape, dtype=torch.float32, device=x.device)
    dA, dprior = torch.empty_like(A, dtype=torch.float32), torch.empty_like(I_prior, dtype=torch.float32)
    dinitial = None if initial_state is None else torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    dB, dC = (torch.empty(B.shape, dtype=B.dtype, device=x.device) for _ in range(2))
    tuned = dvar is None and USE_TUNED and tuned_fits(x, beta, B)
    segment = TUNED_SEGMENT if tuned else BACKWARD_SEGMENT
    dy = dy if dy.stride(-1) == 1 else dy.contiguous()
    # bytes of temporary tensors for each head: states, adjoints, scratch; transposed copies; partial results
    copies = TUNED_STATE_COPIES if tuned else 3
    state_bytes = copies * 2 * 4 * head_dim * state_size * (triton.cdiv(time, segment) + 1)
    row_values = TUNED_ROW_VALUES if tuned else 3 * x.element_size() / 4 + 2 * triton.cdiv(state_size, KEY_BLOCK)
    row_bytes = int(4 * time * head_dim * row_values)
    per_head = batch * (state_bytes + row_bytes + 2 * 4 * time * state_size)
    heads_per_group = heads // groups
    launches = triton.cdiv(heads_per_group, max(1, WORKSPACE_BYTES // per_head))
    step = triton.cdiv(heads_per_group, launches)
    for g in range(groups):
        group_dB, group_dC = (
            torch.empty(batch, time, state_size, dtype=torch.float32, device=x.device) for _ in range(2)
        )
        end = (g + 1) * heads_per_group
        for h0 in range(g * heads_per_group, end, step):
            gradients = (dx, ddt, dA, group_dB, group_dC, dbeta, dprior, dinitial)
            _backward_heads(
                x, dt, A, B, C, beta, I_prior, initial_state, doc, dy, dfinal, dvar, gradients,
                slice(h0, min(h0 + step, end)), g, first=h0 == g * heads_per_group, tuned=tuned,
                segment=segment,
            )  # fmt: skip
        dB[:, :, g] = group_dB
        dC[:, :, g] = group_dC
    return dx, ddt, dA, dB, dC, dbeta, dprior, dinitial


# ---------------------------------------------------------------------------------------------------------------------
# Custom ops: one namespace for each copy of this file, so that exports and the package live in one process

_NAMESPACE = "palimpsa_" + hashlib.sha1(__name__.encode()).hexdigest()[:10]


def _zeros_like_rows(x: Tensor) -> Tensor:
    """A zero beta that takes no memory."""
    return x.new_zeros(1).expand(x.shape)


def _scan_forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor | None,
    I_prior: Tensor,
    initial_state: Tensor | None,
    documents: Tensor | None,
    return_variance: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    beta = _zeros_like_rows(x) if beta is None else beta
    return _forward(x, dt, A, B, C, beta, I_prior, initial_state, documents, return_variance)


def _scan_forward_fake(x, dt, A, B, C, beta, I_prior, initial_state, documents, return_variance):
    batch, _, heads, head_dim = x.shape
    return (
        x.new_empty(x.shape),
        x.new_empty(batch, heads, 2, head_dim, B.shape[3], dtype=torch.float32),
        x.new_empty(x.shape if return_variance else (0,), dtype=torch.float32),
    )


def _scan_backward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor | None,
    I_prior: Tensor,
    initial_state: Tensor | None,
    documents: Tensor | None,
    dy: Tensor,
    dfinal: Tensor | None,
    dvariance: Tensor | None,
) -> list[Tensor]:
    rows = _zeros_like_rows(x) if beta is None else beta
    *gradients, dinitial = _backward(x, dt, A, B, C, rows, I_prior, initial_state, documents, dy, dfinal, dvariance)
    return gradients if dinitial is None else [*gradients, dinitial]


def _scan_backward_fake(x, dt, A, B, C, beta, I_prior, initial_state, documents, dy, dfinal, dvariance):
    likes = [x, dt, A, B, C, x if beta is None else beta, I_prior]
    likes += [] if initial_state is None else [initial_state]
    return [torch.empty(v.shape, dtype=v.dtype, device=v.device) for v in likes]


_scan_op = torch.library.custom_op(f"{_NAMESPACE}::scan", _scan_forward, mutates_args=())
_scan_op.register_fake(_scan_forward_fake)
_scan_backward_op = torch.library.custom_op(f"{_NAMESPACE}::scan_backward", _scan_backward, mutates_args=())
_scan_backward_op.register_fake(_scan_backward_fake)


def _setup_context(ctx, inputs, output):
    *tensors, return_variance = inputs
    ctx.save_for_backward(*tensors)
    ctx.return_variance = return_variance
    ctx.set_materialize_grads(False)


def _autograd_backward(ctx, dy, dfinal, dvariance):
    x, dt, A, B, C, beta, I_prior, initial_state, documents = ctx.saved_tensors
    dy = x.new_zeros(1).expand(x.shape) if dy is None else dy
    dvariance = dvariance if ctx.return_variance else None
    gradients = _scan_backward_op(x, dt, A, B, C, beta, I_prior, initial_state, documents, dy, dfinal, dvariance)
    dx, ddt, dA, dB, dC, dbeta, dprior = gradients[:7]
    dinitial = None if initial_state is None else gradients[7]
    return dx, ddt, dA, dB, dC, None if beta is None else dbeta, dprior, dinitial, None, None


_scan_op.register_autograd(_autograd_backward, setup_context=_setup_context)


# ---------------------------------------------------------------------------------------------------------------------
# Public


def palimpsa_scan_triton(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor | None,
    I_prior: Tensor,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_state: bool = False,
    return_variance: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The scan of `scan.palimpsa_scan`, which validates and says what the arguments mean, in Triton.

    Args:
        x: `[b, t, h, p]`, bfloat16, float16 or float32; any strides, as for all inputs, but the last dimension of
            B and C contiguous.
        dt: `[b, t, h]` float32. A, I_prior: `[h]` float32. B, C: `[b, t, g, n]` of x's type.
        beta: `[b, t, h, p]` or None for zero. initial_state: `[b, h, 2, p, n]` float32 or None.
        seq_idx: `[b, t]` integers or None.
        return_final_state: return the state after the last token, `[b, h, 2, p, n]` float32.
        return_variance: return the predictive variance, `[b, t, h, p]` float32.

    Returns:
        y `[b, t, h, p]` of x's type, final state or None, variance or None; differentiable.
    """
    documents = None if seq_idx is None else document_numbers(seq_idx).to(torch.int32)
    B, C = (v if v.stride(-1) == 1 else v.contiguous() for v in (B, C))
    y, final_state, variance = _scan_op(x, dt, A, B, C, beta, I_prior, initial_state, documents, return_variance)
    return y, final_state if return_final_state else None, variance if return_variance else None
