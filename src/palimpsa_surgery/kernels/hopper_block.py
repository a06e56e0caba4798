"""What the 16 tokens of a block bring to `hopper_gradients.py`: where it lies in shared memory, how it gets there."""

from .hopper_lanes import (
    copy_async,
    from_lane,
    gl,
    high,
    jit,
    load1,
    load2_bits,
    low,
    pack,
    reciprocal,
    store1,
    store2,
    store2_bits,
    store4,
    wait_async,
)

# Shared memory of 256 threads, in bytes. First a token's sums over a lane's elements [8 warps, 4, 32 lanes, 4]: d v,
# d beta, dC and dB. Then those over a warp of all the block's tokens: d v and d beta [16, 8 warps, 2, 32 rows], dC and dB
# [16, 2 halves of the rows, 2, 64 keys] and -Z_I, over four lanes [16, 8, 8].
ROW_SUMS_AT = gl.constexpr(16384)
KEY_SUMS_AT = gl.constexpr(49152)
PRIORS_AT = gl.constexpr(65536)
# Operands: rows [16, (dy, v, u), 64], keys [16, 4 warps, (C, B, B²), 16], and x and beta in pairs of tokens, as first
# operands of products lie [2, 4, 8, 4, 4], of a block that outgrows its start.
ROWS_AT = gl.constexpr(69632)
KEYS_AT = gl.constexpr(81920)
PAIRS_AT = gl.constexpr(94208)
# x, beta, dy, B and C as they were copied [5, 16 tokens, 16 times 8 bytes], each by the thread that takes it
RAW_AT = gl.constexpr(98304)
IDLE_AT = gl.constexpr(108544)  # a word for each thread
SCALES_AT = gl.constexpr(109568)  # of all the segment's tokens [256]: dt / c, 1 / c and dq
SPANS_AT = gl.constexpr(112640)  # of its blocks [16]: factors and parts
WORDS = gl.constexpr(111)  # rows of 256 words
MOST_TOKENS = 256  # of a segment


@jit
def copy_block(base, tid, p_x, p_beta, p_dy, p_B, p_C, x_t, beta_t, dy_t, B_t, C_t, start, steps):
    """Begin to copy what 16 tokens bring: four rows and four keys of one token a thread."""
    a = base + RAW_AT + tid * 8
    t = gl.minimum(start + (tid >> 4), steps - 1)
    o = (tid & 15) * 2
    copy_async(a, p_x + (t * x_t + o))
    copy_async(a + 2048, p_beta + (t * beta_t + o))
    copy_async(a + 4096, p_dy + (t * dy_t + o))
    copy_async(a + 6144, p_B + (t * B_t + o))
    copy_async(a + 8192, p_C + (t * C_t + o))


@jit
def _put_four(a, pairs, scale):
    """Four bfloat16 as float32."""
    store4(a, (low(pairs[0]) * scale, high(pairs[0]) * scale, low(pairs[1]) * scale, high(pairs[1]) * scale))


@jit
def _load_pairs(a, there):
    """Zero for tokens after the last."""
    first, second = load2_bits(a)
    return gl.where(there, first, 0), gl.where(there, second, 0)


@jit
def put_block(base, a_scales, tid, left):
    """Operands of 16 tokens, of which the first `left` are the sequence's, as the thread has copied them."""
    wait_async(tid * 0)
    a = base + RAW_AT + tid * 8
    token = (tid >> 4)
    there = token < left
    one = (tid * 0).to(gl.float32) + 1.0
    a_row = base + ROWS_AT + token * 768 + (tid & 15) * 16
    a_scale = a_scales + token * 4
    _put_four(a_row, _load_pairs(a + 4096, there), one)
    _put_four(a_row + 256, _load_pairs(a, there), load1(a_scale))
    _put_four(a_row + 512, _load_pairs(a + 2048, there), load1(a_scale + 1024))
    a_key = base + KEYS_AT + token * 768 + ((tid & 15) >> 2) * 192 + (tid & 3) * 16
    b0, b1 = load2_bits(a + 6144)
    _put_four(a_key, load2_bits(a + 8192), one)
    _put_four(a_key + 64, (b0, b1), one)
    # rounded as the products round them that make the anchors
    squares = (pack(low(b0) * low(b0), high(b0) * high(b0)), pack(low(b1) * low(b1), high(b1) * high(b1)))
    _put_four(a_key + 128, squares, one)


@jit
def put_scales(base, p_dt, p_scales, p_factors, p_parts, dt_t, prior, steps, tid, n_tokens):
    """What the decays decide, of all the segment's tokens, one a thread; and of its blocks."""
    there = tid < n_tokens // 16
    a = gl.where(there, base + SPANS_AT + tid * 4, base + IDLE_AT + tid * 4)
    store1(a, gl.load(p_factors + tid, mask=there, other=0.0))
    store1(gl.where(there, a + 64, a), gl.load(p_parts + tid, mask=there, other=0).to(gl.float32))
    there = tid < n_tokens
    dt = gl.load(p_dt + gl.minimum(tid, steps - 1) * dt_t)
    r = gl.load(p_scales + tid, mask=there, other=1.0)
    r_before = gl.load(p_scales + gl.maximum(tid - 1, 0), mask=there, other=1.0)
    ended = gl.load(p_parts + gl.maximum((tid >> 4) - 1, 0), mask=there, other=0) > 0
    first = (tid == 0) | (((tid & 15) == 0) & ended)
    a = base + SCALES_AT + tid * 4
    store1(a, gl.where(tid < steps, dt, 0.0) * r)
    store1(a + 1024, r)
    store1(a + 2048, gl.where(first, 0.0, prior * (r - r_before)))


@jit
def decays(p_dt, p_doc, dt_t, A, start, steps, before, t, HAS_DOC: gl.constexpr):
    """alpha and dt of a block's tokens; each warp has them all, in lanes t and t + 16."""
    token = start + t
    o = gl.minimum(token, steps - 1)
    dt = gl.where(token < steps, gl.load(p_dt + o * dt_t), 0.0)
    alpha = gl.exp(-A * dt)
    if HAS_DOC:
        goes_on = gl.load(p_doc + o) == gl.load(p_doc + gl.maximum(o - 1, before))
        alpha = gl.where(goes_on | (token >= steps), alpha, 0.0)
    return alpha, dt


@jit
def put_parts(base, a_scales, alpha, dt, parts, prior, tid):
    """The block's scales within parts that begin with the tokens whose bits are set; returns 1 / c."""
    t = (tid & 15)
    lane = (tid & 31)
    first = ((parts >> t) & 1) != 0
    kept = gl.where(first, 1.0, alpha)
    for k in gl.static_range(4):
        begun = (parts >> gl.maximum(t + 1 - (1 << k), 0)) & ((1 << (1 << k)) - 1)  # by the last 2^k tokens
        kept = gl.where((t >= 1 << k) & (begun == 0), kept * from_lane(kept, lane - (1 << k)), kept)
    r = reciprocal(kept)
    dq = gl.where(first, 0.0, prior * (r - from_lane(r, lane - 1)))
    a = gl.where(tid < 16, a_scales + t * 4, base + IDLE_AT + tid * 4)
    store1(a, dt * r)
    store1(gl.where(tid < 16, a + 1024, a), r)
    store1(gl.where(tid < 16, a + 2048, a), dq)
    return r


@jit
def _of_column(v, c):
    """Of one value for each token, a lane each, those of tokens 2 c, 2 c + 1, 2 c + 8 and 2 c + 9."""
    return from_lane(v, 2 * c), from_lane(v, 2 * c + 1), from_lane(v, 2 * c + 8), from_lane(v, 2 * c + 9)


@jit
def scales_of(alpha, dt, r, t, first, last, lane, c):
    """For the state after token `last` of a part from `first` on: scales of x and beta, how much of the start is kept.

    The start is the block's, with the decay of its first token. What is kept, and the scales of tokens before the part,
    are decays to the part's first token.
    """
    later = gl.where((t <= first) & (t > 0), alpha, 1.0)
    for i in gl.static_range(4):
        later = gl.where(t < 16 - (1 << i), later * from_lane(later, lane + (1 << i)), later)
    kept = from_lane(later, lane * 0)
    later = gl.where(t == 15, 1.0, from_lane(later, lane + 1))
    u = gl.where(t < first, later, gl.where(t <= last, r, 0.0))
    return _of_column(u * dt, c), _of_column(u, c), kept


@jit
def put_pairs(base, p_x, p_beta, x_t, beta_t, start, steps, a_scales, tid):
    """x and beta in pairs of tokens, for products, and v and u anew, with other scales: two rows of two tokens a thread."""
    pair = (tid >> 5) * 2
    left = steps - start
    o0 = gl.minimum(start + pair, steps - 1)
    o1 = gl.minimum(start + pair + 1, steps - 1)
    o = (tid & 31)
    a = base + PAIRS_AT + ((tid >> 5) & 3) * 512 + (tid & 31) * 16 + (tid >> 7) * 8
    a_row = base + (ROWS_AT + 256) + pair * 768 + (tid & 31) * 8
    a_scale = a_scales + pair * 4
    for i in gl.static_range(2):
        if i == 0:
            first = gl.load(p_x + (o0 * x_t + o))
            second = gl.load(p_x + (o1 * x_t + o))
        else:
            first = gl.load(p_beta + (o0 * beta_t + o))
            second = gl.load(p_beta + (o1 * beta_t + o))
        first = gl.where(pair < left, first, 0)
        second = gl.where(pair + 1 < left, second, 0)
        store2_bits(a + 2048 * i, (first & 65535) | (second << 16), ((first >> 16) & 65535) | (second & -65536))
        scale0 = load1(a_scale + 1024 * i)
        scale1 = load1(a_scale + (1024 * i + 4))
        store2(a_row + 256 * i, low(first) * scale0, high(first) * scale0)
        store2(a_row + (256 * i + 768), low(second) * scale1, high(second) * scale1)
