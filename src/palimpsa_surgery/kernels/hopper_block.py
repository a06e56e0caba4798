"""What the 16 tokens of a block bring to `hopper_gradients.py`: where it lies in shared memory, how it gets there.

Shifts and masks stand for divisions: of a number that is not known to be positive, one takes five instructions.
"""

from .hopper_lanes import (
    barrier,
    copy_async,
    from_lane,
    gl,
    high,
    jit,
    load1,
    load2_bits,
    load4_bits,
    low,
    pack,
    reciprocal,
    store1,
    store2_bits,
    store4,
    wait_async,
)

# Shared memory of 128 threads, in bytes. First of each of the four warps a token's sums over a lane's elements: d v of
# rows 0 to 3 and 4 to 7 and d beta [4 c, 4, 8 g, 4, and two for the banks], dC and dB [8 g, 2, 4 c, 4, and four]. Then
# those of d v and d beta over a warp's keys [16 tokens, 4, 32, 4], and of -Z_I over a lane's elements [16, 128].
KEY_PARTS_AT = gl.constexpr(2176)
TOKEN_SUMS = gl.constexpr(3712)
ROW_SUMS_AT = gl.constexpr(14848)
PRIORS_AT = gl.constexpr(47616)
# Operands: rows of this block and of the next [2, 16, (dy, v, u), 64], keys [16, 4 warps, (C, B, B²), 16], and x and
# beta in pairs of tokens, as first operands of products lie [2, 4, 8, 4, 4], of a block in parts.
ROWS_AT = gl.constexpr(55808)
KEYS_AT = gl.constexpr(80384)
PAIRS_AT = gl.constexpr(92672)
# x, beta, dy, B and C as they were copied, in the order in which threads take them [5, 128, 4 words]
RAW_AT = gl.constexpr(96768)
IDLE_AT = gl.constexpr(107008)  # a word for each thread
SCALES_AT = gl.constexpr(107520)  # of all the segment's tokens [256]: dt / c, 1 / c and dq
SPANS_AT = gl.constexpr(110592)  # of its blocks [16]: factors and parts
WORDS = gl.constexpr(217)  # rows of 128 words
MOST_TOKENS = 256  # of a segment


@jit
def copy_block(base, tid, p_x, p_beta, p_dy, p_B, p_C, x_t, beta_t, dy_t, B_t, C_t, start, steps):
    """Begin to copy what 16 tokens bring: two tokens' four rows, and eight keys of one, a thread."""
    a = base + RAW_AT + tid * 16
    t0 = gl.minimum(start + (tid >> 4) * 2, steps - 1)
    t1 = gl.minimum(start + (tid >> 4) * 2 + 1, steps - 1)
    o = (tid & 15) * 2
    copy_async(a, p_x + (t0 * x_t + o), 8)
    copy_async(a + 8, p_x + (t1 * x_t + o), 8)
    copy_async(a + 2048, p_beta + (t0 * beta_t + o), 8)
    copy_async(a + 2056, p_beta + (t1 * beta_t + o), 8)
    copy_async(a + 4096, p_dy + (t0 * dy_t + o), 8)
    copy_async(a + 4104, p_dy + (t1 * dy_t + o), 8)
    t0 = gl.minimum(start + (tid >> 3), steps - 1)
    o = (tid & 7) * 4
    copy_async(a + 6144, p_B + (t0 * B_t + o), 16)
    copy_async(a + 8192, p_C + (t0 * C_t + o), 16)


@jit
def _put_rows(a, raw, scale0, scale1):
    """Two tokens' four rows as float32."""
    store4(a, (low(raw[0]) * scale0, high(raw[0]) * scale0, low(raw[1]) * scale0, high(raw[1]) * scale0))
    store4(a + 768, (low(raw[2]) * scale1, high(raw[2]) * scale1, low(raw[3]) * scale1, high(raw[3]) * scale1))


@jit
def _put_pairs(a, raw):
    """Two tokens' four rows as pairs of the tokens."""
    store2_bits(a, (raw[0] & 65535) | (raw[2] << 16), ((raw[0] >> 16) & 65535) | (raw[2] & -65536))
    store2_bits(a + 16, (raw[1] & 65535) | (raw[3] << 16), ((raw[1] >> 16) & 65535) | (raw[3] & -65536))


@jit
def _unless_past(raw, t, steps):
    """Zero for tokens after the last."""
    return (
        gl.where(t < steps, raw[0], 0),
        gl.where(t < steps, raw[1], 0),
        gl.where(t + 1 < steps, raw[2], 0),
        gl.where(t + 1 < steps, raw[3], 0),
    )


@jit
def _put_scaled(a_rows, a_scales, tid, x, u):
    """v and u of 16 tokens, from x and beta as `copy_block` brings them."""
    pair = (tid >> 4) * 2
    a = a_rows + pair * 768 + (tid & 15) * 16
    a_pair = a_scales + pair * 4
    _put_rows(a + 256, x, load1(a_pair), load1(a_pair + 4))
    _put_rows(a + 512, u, load1(a_pair + 1024), load1(a_pair + 1028))


@jit
def _from_pairs(a):
    """What `_put_pairs` has put there."""
    r0, r1 = load2_bits(a)
    r2, r3 = load2_bits(a + 16)
    return (
        (r0 & 65535) | (r1 << 16),
        (r2 & 65535) | (r3 << 16),
        ((r0 >> 16) & 65535) | (r1 & -65536),
        ((r2 >> 16) & 65535) | (r3 & -65536),
    )


@jit
def _put_eight(a, raw):
    """Eight keys of a token, as float32."""
    store4(a, (low(raw[0]), high(raw[0]), low(raw[1]), high(raw[1])))
    store4(a + 16, (low(raw[2]), high(raw[2]), low(raw[3]), high(raw[3])))


@jit
def _squares(a, b):
    """Of four keys, rounded as the products round them that make the anchors."""
    first = pack(low(a) * low(a), high(a) * high(a))
    second = pack(low(b) * low(b), high(b) * high(b))
    return (low(first), high(first), low(second), high(second))


@jit
def put_keys(base, tid):
    """C, B and B² of 16 tokens."""
    a = base + RAW_AT + tid * 16
    a_keys = base + KEYS_AT + (tid >> 3) * 768 + ((tid & 7) >> 1) * 192 + (tid & 1) * 32
    b = load4_bits(a + 6144)
    _put_eight(a_keys, load4_bits(a + 8192))
    _put_eight(a_keys + 64, b)
    store4(a_keys + 128, _squares(b[0], b[1]))
    store4(a_keys + 144, _squares(b[2], b[3]))


@jit
def _place_of_pairs(base, tid):
    return base + PAIRS_AT + ((tid >> 4) & 3) * 512 + (tid & 15) * 32 + (tid >> 6) * 8


@jit
def put_rows(base, a_rows, a_scales, tid, left):
    """dy, v and u of 16 tokens, of which the first `left` are the sequence's, as the thread has copied them."""
    wait_async(tid * 0)
    a = base + RAW_AT + tid * 16
    pair = (tid >> 4) * 2
    x = _unless_past(load4_bits(a), pair, left)
    u = _unless_past(load4_bits(a + 2048), pair, left)
    dy = _unless_past(load4_bits(a + 4096), pair, left)
    one = (tid * 0).to(gl.float32) + 1.0
    _put_rows(a_rows + pair * 768 + (tid & 15) * 16, dy, one, one)
    _put_scaled(a_rows, a_scales, tid, x, u)


@jit
def put_scales(base, p_dt, p_scales, p_factors, p_parts, dt_t, prior, steps, tid, n_tokens):
    """What the decays decide, of all the segment's tokens, one a thread; and of its blocks."""
    there = tid < n_tokens // 16
    a = gl.where(there, base + SPANS_AT + tid * 4, base + IDLE_AT + tid * 4)
    store1(a, gl.load(p_factors + tid, mask=there, other=0.0))
    store1(gl.where(there, a + 64, a), gl.load(p_parts + tid, mask=there, other=0).to(gl.float32))
    for i in range(gl.cdiv(n_tokens, 128)):
        token = i * 128 + tid
        there = token < n_tokens
        dt = gl.load(p_dt + gl.minimum(token, steps - 1) * dt_t)
        r = gl.load(p_scales + token, mask=there, other=1.0)
        r_before = gl.load(p_scales + gl.maximum(token - 1, 0), mask=there, other=1.0)
        ended = gl.load(p_parts + gl.maximum(token // 16 - 1, 0), mask=there, other=0) > 0
        first = (token == 0) | ((token % 16 == 0) & ended)
        a = base + SCALES_AT + token * 4
        store1(a, gl.where(token < steps, dt, 0.0) * r)
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
    t = tid & 15
    lane = tid & 31
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
def put_pairs(base, p_x, p_beta, x_t, beta_t, start, steps, tid):
    """x and beta in pairs of tokens, for products."""
    pair = (tid >> 4) * 2
    t0 = gl.minimum(start + pair, steps - 1)
    t1 = gl.minimum(start + pair + 1, steps - 1)
    o = (tid & 15) * 2
    a = _place_of_pairs(base, tid)
    _put_pairs(a, _unless_past(_two_tokens(p_x + o, t0 * x_t, t1 * x_t), pair, steps - start))
    _put_pairs(a + 2048, _unless_past(_two_tokens(p_beta + o, t0 * beta_t, t1 * beta_t), pair, steps - start))


@jit
def _two_tokens(p, o0, o1):
    """Two words each of two tokens."""
    return gl.load(p + o0), gl.load(p + (o0 + 1)), gl.load(p + o1), gl.load(p + (o1 + 1))


@jit
def rescale(base, a_rows, a_scales, tid):
    """v and u anew, with other scales, and for all to see what `put_pairs` has put."""
    barrier()
    a = _place_of_pairs(base, tid)
    _put_scaled(a_rows, a_scales, tid, _from_pairs(a), _from_pairs(a + 2048))
    barrier()
