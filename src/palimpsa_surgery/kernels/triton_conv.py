"""The causal convolution and its SiLU in Triton, forward and backward.

Letters: b batch, t time, d channels, k taps; lag i is the input of i tokens ago, to which tap k - 1 - i belongs.

A tile has BQ rows of R consecutive tokens each, and BD channels. All rows go along time at once, with the inputs of the
last three tokens in registers, so that one pass over memory reads x and writes y. The backward pass keeps x alone and
forms the pre-activation a again. With g = dy SiLU'(a), of the last three tokens too,

    dx[s] = Σ_i w[k - 1 - i] g[s + i]        dw[k - 1 - i] = Σ_t g[t] x[t - i]        dbias = Σ_t g[t]

of tokens of one document. The gradient of the tail is that of the inputs before the first token. Sums over tokens go
through float32 partial results of each tile and a fixed order: results are deterministic.
"""

import math

import torch
from torch import Tensor

from .triton_jit import NAMESPACE, cdiv, jit, tl

# Of a thread 4 channels. Rows are long, since the backward pass reads the first three tokens of the next one again.
# Measured on one H200 (docs/experiments.md has the table).
BQ, R, BD = 8, 32, 64
NUM_WARPS = 4
TAPS = range(2, 5)


@jit
def inputs(
    x, tail, s, o_d, first, in_t, tail_d, tail_k, T, D, K: tl.constexpr, UNIT: tl.constexpr, HAS_TAIL: tl.constexpr
):  # fmt: skip
    """Inputs at tokens s `[q, d]` in float32: before a row, where only its first tile comes, the tail's, else zero."""
    m_d = (o_d < D)[None, :]
    m = ((s >= 0) & (s < T))[:, None] & m_d
    b_x = tl.load(x + s[:, None] * in_t * UNIT + o_d[None, :], mask=m, other=0.0).to(tl.float32)
    if HAS_TAIL:
        m = ((s < 0) & (s > -K))[:, None] & m_d
        if first:
            p_tail = tail + o_d[None, :] * tail_d + (s + K)[:, None] * tail_k
            b_x += tl.load(p_tail, mask=m, other=0.0).to(tl.float32)
    return b_x


@jit
def continues(doc, s, doc_t, T, HAS_DOC: tl.constexpr):
    """Whether tokens s `[q]` are of the document of the tokens before them; a tail is of the row's first."""
    same = s < T
    if HAS_DOC:
        m = (s > 0) & same
        p_doc = doc + s * doc_t
        same = same & (tl.load(p_doc, mask=m, other=0) == tl.load(p_doc - doc_t, mask=m, other=0))
    return same


@jit
def keep(condition, b_x, HAS_DOC: tl.constexpr):
    """`[q, d]` where the condition `[q]` holds, else zero."""
    if HAS_DOC:
        b_x = tl.where(condition[:, None], b_x, 0.0)
    return b_x


@jit
def parameters(weight, bias, o_d, D, K: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Taps of lags 0 to 3, zero from k on, and bias, each `[1, d]` in float32."""
    m = o_d < D
    p_w = weight + o_d * K + K - 1
    b_w0 = tl.load(p_w, mask=m, other=0.0).to(tl.float32)[None, :]
    b_w1 = tl.load(p_w - 1, mask=m, other=0.0).to(tl.float32)[None, :]
    b_w2 = tl.load(p_w - 2, mask=m & (K > 2), other=0.0).to(tl.float32)[None, :]
    b_w3 = tl.load(p_w - 3, mask=m & (K > 3), other=0.0).to(tl.float32)[None, :]
    b_bias = tl.zeros_like(b_w0)
    if HAS_BIAS:
        b_bias = tl.load(bias + o_d, mask=m, other=0.0).to(tl.float32)[None, :]
    return b_w0, b_w1, b_w2, b_w3, b_bias


@jit
def combine(b_w0, b_w1, b_w2, b_w3, b_v0, b_v1, b_v2, b_v3, K: tl.constexpr):
    """Sum over k taps; what is beyond them is not touched, be it NaN."""
    b_sum = b_w0 * b_v0 + b_w1 * b_v1
    if K > 2:
        b_sum += b_w2 * b_v2
    if K > 3:
        b_sum += b_w3 * b_v3
    return b_sum


@jit
def conv_forward(
    x, weight, bias, tail, doc, y, in_b, in_t, tail_b, tail_d, tail_k, doc_b, doc_t, T, NT, D,
    BQ: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_DOC: tl.constexpr,
):  # fmt: skip
    """y [b, t, d]; neighbours in the grid are neighbours in memory."""
    i = tl.program_id(0).to(tl.int64)
    ND = tl.cdiv(D, BD)
    b = i // ND // NT
    first = i // ND % NT == 0
    t = (i // ND % NT * BQ + tl.arange(0, BQ)) * R
    o_d = i % ND * BD + tl.arange(0, BD)
    x += b * in_b * UNIT
    tail += b * tail_b
    doc += b * doc_b
    p_y = y + (b * T + t)[:, None] * D + o_d[None, :]
    b_w0, b_w1, b_w2, b_w3, b_bias = parameters(weight, bias, o_d, D, K, HAS_BIAS)
    b_x0 = inputs(x, tail, t, o_d, first, in_t, tail_d, tail_k, T, D, K, UNIT, HAS_TAIL)
    b_x1 = inputs(x, tail, t - 1, o_d, first, in_t, tail_d, tail_k, T, D, K, UNIT, HAS_TAIL)
    b_x2 = inputs(x, tail, t - 2, o_d, first, in_t, tail_d, tail_k, T, D, K, UNIT, HAS_TAIL)
    b_x3 = inputs(x, tail, t - 3, o_d, first, in_t, tail_d, tail_k, T, D, K, UNIT, HAS_TAIL)
    m_1 = continues(doc, t - 1, doc_t, T, HAS_DOC)
    m_2 = continues(doc, t - 2, doc_t, T, HAS_DOC)
    for n in range(tl.minimum(R, T)):
        s = t + n
        b_next = inputs(x, tail, s + 1, o_d, first, in_t, tail_d, tail_k, T, D, K, UNIT, False)
        m_0 = continues(doc, s, doc_t, T, HAS_DOC)
        b_v1 = keep(m_0, b_x1, HAS_DOC)
        b_v2 = keep(m_0 & m_1, b_x2, HAS_DOC)
        b_v3 = keep(m_0 & m_1 & m_2, b_x3, HAS_DOC)
        b_a = b_bias + combine(b_w0, b_w1, b_w2, b_w3, b_x0, b_v1, b_v2, b_v3, K)
        b_y = b_a * tl.sigmoid(b_a)
        tl.store(p_y + n * D, b_y.to(y.dtype.element_ty), mask=(s < T)[:, None] & (o_d < D)[None, :])
        b_x3 = b_x2
        b_x2 = b_x1
        b_x1 = b_x0
        b_x0 = b_next
        m_2 = m_1
        m_1 = m_0


@jit
def conv_backward(
    x, weight, bias, tail, doc, dy, dx, dtail, parts,
    in_b, in_t, tail_b, tail_d, tail_k, doc_b, doc_t, T, NT, D,
    BQ: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, K: tl.constexpr, UNIT: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_DOC: tl.constexpr,
):  # fmt: skip
    """dx [b, t, d], dtail [b, d, k] and parts [b * NT, k + 1, d] of dweight and dbias.

    With a tail, the first R tokens are those before the row.
    """
    i = tl.program_id(0).to(tl.int64)
    ND = tl.cdiv(D, BD)
    i_t = i // ND
    b = i_t // NT
    first = i_t % NT == 0
    t = (i_t % NT * BQ + tl.arange(0, BQ)) * R
    if HAS_TAIL:
        t -= R
    o_d = i % ND * BD + tl.arange(0, BD)
    m_d = (o_d < D)[None, :]
    x += b * in_b * UNIT
    tail += b * tail_b
    doc += b * doc_b
    o_row = (b * T + t)[:, None] * D + o_d[None, :]
    b_w0, b_w1, b_w2, b_w3, b_bias = parameters(weight, bias, o_d, D, K, HAS_BIAS)
    b_x0 = inputs(x, tail, t, o_d, first, in_t, tail_d, tail_k, T, D, K, UNIT, HAS_TAIL)
    b_x1 = inputs(x, tail, t - 1, o_d, first, in_t, tail_d, tail_k, T, D, K, UNIT, HAS_TAIL)
    b_x2 = inputs(x, tail, t - 2, o_d, first, in_t, tail_d, tail_k, T, D, K, UNIT, HAS_TAIL)
    b_x3 = inputs(x, tail, t - 3, o_d, first, in_t, tail_d, tail_k, T, D, K, UNIT, HAS_TAIL)
    m_1 = continues(doc, t - 1, doc_t, T, HAS_DOC)
    m_2 = continues(doc, t - 2, doc_t, T, HAS_DOC)
    b_dy = tl.load(dy + o_row, mask=((t >= 0) & (t < T))[:, None] & m_d, other=0.0).to(tl.float32)
    b_g1 = tl.zeros([BQ, BD], tl.float32)
    b_g2 = tl.zeros([BQ, BD], tl.float32)
    b_g3 = tl.zeros([BQ, BD], tl.float32)
    b_dw0 = tl.zeros([BQ, BD], tl.float32)
    b_dw1 = tl.zeros([BQ, BD], tl.float32)
    b_dw2 = tl.zeros([BQ, BD], tl.float32)
    b_dw3 = tl.zeros([BQ, BD], tl.float32)
    b_db = tl.zeros([BQ, BD], tl.float32)
    for n in range(R + 3):
        s = t + n
        m = ((s + 1 >= 0) & (s + 1 < T))[:, None] & m_d
        b_next = inputs(x, tail, s + 1, o_d, first, in_t, tail_d, tail_k, T, D, K, UNIT, HAS_TAIL)
        b_next_dy = tl.load(dy + o_row + (n + 1) * D, mask=m, other=0.0).to(tl.float32)
        m_0 = continues(doc, s, doc_t, T, HAS_DOC)
        b_v1 = keep(m_0, b_x1, HAS_DOC)
        b_v2 = keep(m_0 & m_1, b_x2, HAS_DOC)
        b_v3 = keep(m_0 & m_1 & m_2, b_x3, HAS_DOC)
        b_a = b_bias + combine(b_w0, b_w1, b_w2, b_w3, b_x0, b_v1, b_v2, b_v3, K)
        b_sigmoid = tl.sigmoid(b_a)
        b_g0 = b_dy * b_sigmoid * (1.0 + b_a * (1.0 - b_sigmoid))
        # the token of three steps ago, which has now been seen by all that see it
        b_u2 = keep(m_2, b_g2, HAS_DOC)
        b_u1 = keep(m_1 & m_2, b_g1, HAS_DOC)
        b_u0 = keep(m_0 & m_1 & m_2, b_g0, HAS_DOC)
        b_dx = combine(b_w0, b_w1, b_w2, b_w3, b_g3, b_u2, b_u1, b_u0, K)
        m = (n >= 3) & (s - 3 < T)
        tl.store(dx + o_row + (n - 3) * D, b_dx.to(dx.dtype.element_ty), mask=(m & (s >= 3))[:, None] & m_d)
        if HAS_TAIL:
            m &= (s < 3) & (s - 3 >= -K)
            if first:
                p_dtail = dtail + (b * D + o_d)[None, :] * K + (s - 3 + K)[:, None]
                tl.store(p_dtail, b_dx.to(dtail.dtype.element_ty), mask=m[:, None] & m_d)
        b_own = tl.where(n < R, b_g0, 0.0)
        b_dw0 += b_own * b_x0
        b_dw1 += b_own * b_v1
        b_dw2 += b_own * b_v2
        b_dw3 += b_own * b_v3
        b_db += b_own
        b_x3 = b_x2
        b_x2 = b_x1
        b_x1 = b_x0
        b_x0 = b_next
        b_dy = b_next_dy
        b_g3 = b_g2
        b_g2 = b_g1
        b_g1 = b_g0
        m_2 = m_1
        m_1 = m_0
    p_parts = parts + i_t * (K + 1) * D + o_d
    tl.store(p_parts + (K - 1) * D, tl.sum(b_dw0, 0), mask=o_d < D)
    tl.store(p_parts + (K - 2) * D, tl.sum(b_dw1, 0), mask=o_d < D)
    if K > 2:
        tl.store(p_parts + (K - 3) * D, tl.sum(b_dw2, 0), mask=o_d < D)
    if K > 3:
        tl.store(p_parts, tl.sum(b_dw3, 0), mask=o_d < D)
    tl.store(p_parts + K * D, tl.sum(b_db, 0), mask=o_d < D)


# ---------------------------------------------------------------------------------------------------------------------
# Launches


def _launch(kernel, x, weight, bias, tail, seq_idx, outputs: tuple[Tensor, ...], tiles: int) -> None:
    """Launch a kernel on `tiles` tiles of tokens a row; what is not there is neither read nor has strides."""
    (batch, time, channels), taps = x.shape, weight.shape[1]
    x = x if x.stride(2) == 1 else x.contiguous()
    weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
    unit = math.gcd(*x.stride()[:2], 8)  # Triton reads 16 bytes at once where it knows that rows begin there
    with torch.cuda.device_of(x):  # Triton launches on the current device
        kernel[(batch * tiles * cdiv(channels, BD),)](
            x, weight, x if bias is None else bias, x if tail is None else tail, x if seq_idx is None else seq_idx,
            *outputs, x.stride(0) // unit, x.stride(1) // unit, *((0, 0, 0) if tail is None else tail.stride()),
            *((0, 0) if seq_idx is None else seq_idx.stride()), time, tiles, channels,
            BQ=BQ, R=R, BD=BD, K=taps, UNIT=unit,
            HAS_BIAS=bias is not None, HAS_TAIL=tail is not None, HAS_DOC=seq_idx is not None, num_warps=NUM_WARPS,
        )  # fmt: skip


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None, seq_idx: Tensor | None) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(conv_forward, x, weight, bias, tail, seq_idx, (y,), cdiv(x.shape[1], BQ * R))
    return y


def _backward(
    x: Tensor, weight: Tensor, bias: Tensor | None, tail: Tensor | None, seq_idx: Tensor | None, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx; what taps and bias get, `[k + 1, d]` float32; and dtail, empty without a tail."""
    (batch, time, channels), taps = x.shape, weight.shape[1]
    tiles = cdiv(time + (R if tail is not None else 0), BQ * R)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dtail = x.new_empty(0) if tail is None else torch.empty(tail.shape, dtype=tail.dtype, device=x.device)
    parts = torch.empty(batch * tiles, taps + 1, channels, dtype=torch.float32, device=x.device)
    _launch(conv_backward, x, weight, bias, tail, seq_idx, (dy.contiguous(), dx, dtail, parts), tiles)
    return dx, parts.sum(0), dtail


# ---------------------------------------------------------------------------------------------------------------------
# Custom ops


def _backward_fake(x, weight, bias, tail, seq_idx, dy):
    parameters = x.new_empty(weight.shape[1] + 1, weight.shape[0], dtype=torch.float32)
    return x.new_empty(x.shape), parameters, x.new_empty(0) if tail is None else tail.new_empty(tail.shape)


_conv_op = torch.library.custom_op(f"{NAMESPACE}::conv", _forward, mutates_args=())
_conv_op.register_fake(lambda x, weight, bias, tail, seq_idx: x.new_empty(x.shape))
_conv_backward_op = torch.library.custom_op(f"{NAMESPACE}::conv_backward", _backward, mutates_args=())
_conv_backward_op.register_fake(_backward_fake)


def _setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _autograd_backward(ctx, dy):
    x, weight, bias, tail, seq_idx = ctx.saved_tensors
    dx, parameters, dtail = _conv_backward_op(x, weight, bias, tail, seq_idx, dy)
    dweight, dbias = parameters[:-1].t().to(weight.dtype), None if bias is None else parameters[-1].to(bias.dtype)
    return dx, dweight, dbias, None if tail is None else dtail, None


_conv_op.register_autograd(_autograd_backward, setup_context=_setup_context)


def causal_conv1d_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """The convolution of `conv.causal_conv1d`, which validates and says what the arguments mean, in Triton.

    Args:
        x: `[b, t, d]`, bfloat16, float16 or float32; products and sums are float32. Any strides, as for all inputs:
            where channels are not beside each other it is copied.
        weight: `[d, k]`, k of `TAPS`; bias: `[d]` or None; initial_state: `[b, d, k]` or None. Each of them has a type
            of its own, which is that of its gradient.
        seq_idx: `[b, t]` integers or None.

    Returns:
        `[b, t, d]` of x's type, contiguous; differentiable once.
    """
    return _conv_op(x, weight, bias, initial_state, seq_idx)
