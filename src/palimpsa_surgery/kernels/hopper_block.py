"""What a block's 16 tokens bring to `hopper_gradients.py` and `hopper_states.py`: its place in shared memory, its way.

Shifts and masks stand for divisions: of a number that is not known to be positive, one takes five instructions.
"""

from .hopper_lanes import (
    barrier,
    beyond,
    copy_async,
    cut,
    from_lane,
    gl,
    high,
    jit,
    load1,
    load4_bits,
    load_scalar,
    low,
    pack,
    reciprocal,
    shared_base,
    store1,
    store2_bits,
    store4,
    uniform,
    upper,
    wait_async,
)

# Shared memory of 128 threads, in bytes. First of each of the four warps a token's sums over a lane's elements: d v of
# rows 0 to 3 and 4 to 7 and d beta [4 c, 4, 8 g, 4, and two for the banks], dC and dB [8 g, 2, 4 c, 4, and four]. Then
# those of d v and d beta over a warp's keys [16 tokens, 4, 32, 4], and of -Z_I over a lane's elements [16, 128].
KEY_PARTS_AT = gl.constexpr(2176)
TOKEN_SUMS = gl.constexpr(3712)
ROW_SUMS_AT = gl.constexpr(14848)
PRIORS_AT = gl.constexpr(47616)
# Operands: rows of this block and of the next [2, 16, (dy, v, u), 64], keys [16, 4 warps, (C, B, B²), 16], and of a
# block in parts x and beta in pairs of tokens, as first operands of products lie [2, 4, 32 lanes, 4].
ROWS_AT = gl.constexpr(55808)
KEYS_AT = gl.constexpr(80384)
PAIRS_AT = gl.constexpr(92672)
WRITTEN = gl.constexpr(17408)  # while time runs forwards, in place of the sums: `put_written`'s, of two blocks
# x, beta, dy, B and C as they were copied, in the order in which threads take them [5, 128, 4 words]
RAW_AT = gl.constexpr(96768)
IDLE_AT = gl.constexpr(107008)  # a word for each thread
SCALES_AT = gl.constexpr(107520)  # of all the segment's tokens [256]: dt / c, 1 / c and dq
SPANS_AT = gl.constexpr(110592)  # of its blocks [16]: factors and parts
WORDS = gl.constexpr(217)  # rows of 128 words
MOST_TOKENS = 256  # of a segment


@jit
def _copy_rows(a, tid, p, stride, start, steps):
    """Two tokens' four rows."""
    t0 = start + (tid >> 4) * 2
    o = (tid & 15) * 2
    copy_async(a, p + (gl.minimum(t0, steps - 1) * stride + o), 8)
    copy_async(a + 8, p + (gl.minimum(t0 + 1, steps - 1) * stride + o), 8)


@jit
def _copy_keys(a, tid, p, stride, start, steps):
    """Eight keys of a token."""
    copy_async(a, p + (gl.minimum(start + (tid >> 3), steps - 1) * stride + (tid & 7) * 4), 16)


@jit
def copy_written(base, tid, p_x, p_beta, p_B, x_t, beta_t, B_t, start, steps):
    """Begin to copy x, beta and B, of all keys, of 16 tokens; the second half of the keys takes C's place."""
    a = base + RAW_AT + tid * 16
    _copy_rows(a, tid, p_x, x_t, start, steps)
    _copy_rows(a + 2048, tid, p_beta, beta_t, start, steps)
    _copy_keys(a + 6144, tid, p_B, B_t, start, steps)
    _copy_keys(a + 8192, tid, p_B + 32, B_t, start, steps)


@jit
def copy_block(base, tid, p_x, p_beta, p_dy, p_B, p_C, x_t, beta_t, dy_t, B_t, C_t, start, steps):
    """Begin to copy x, beta, dy, and B and C of half of the keys, of 16 tokens."""
    a = base + RAW_AT + tid * 16
    _copy_rows(a, tid, p_x, x_t, start, steps)
    _copy_rows(a + 2048, tid, p_beta, beta_t, start, steps)
    _copy_rows(a + 4096, tid, p_dy, dy_t, start, steps)
    _copy_keys(a + 6144, tid, p_B, B_t, start, steps)
    _copy_keys(a + 8192, tid, p_C, C_t, start, steps)


@jit
def _rows_of(raw, scale0, scale1):
    """Two tokens' four rows, scaled: of each token a four."""
    return (
        (low(raw[0]) * scale0, high(raw[0]) * scale0, low(raw[1]) * scale0, high(raw[1]) * scale0),
        (low(raw[2]) * scale1, high(raw[2]) * scale1, low(raw[3]) * scale1, high(raw[3]) * scale1),
    )


@jit
def _cut_rows(rows):
    a, b = rows
    return (cut(a[0]), cut(a[1]), cut(a[2]), cut(a[3])), (cut(b[0]), cut(b[1]), cut(b[2]), cut(b[3]))


@jit
def _put_rows(a, rows):
    store4(a, rows[0])
    store4(a + 768, rows[1])


@jit
def _unless_past(raw, t, steps):
    """Two tokens' four rows, zero for tokens after the last."""
    return (
        gl.where(t < steps, raw[0], 0),
        gl.where(t < steps, raw[1], 0),
        gl.where(t + 1 < steps, raw[2], 0),
        gl.where(t + 1 < steps, raw[3], 0),
    )


@jit
def _put_pairs(a, raw):
    """Two tokens' four rows as pairs of the tokens."""
    store2_bits(a, (raw[0] & 65535) | (raw[2] << 16), ((raw[0] >> 16) & 65535) | (raw[2] & -65536))
    store2_bits(a + 512, (raw[1] & 65535) | (raw[3] << 16), ((raw[1] >> 16) & 65535) | (raw[3] & -65536))


@jit
def _put_two_parts(a, rows):
    """The same of numbers that `cut` has cut: first and second halves of their fractions."""
    v, w = rows
    v0 = beyond(v[0])
    v1 = beyond(v[1])
    v2 = beyond(v[2])
    v3 = beyond(v[3])
    w0 = beyond(w[0])
    w1 = beyond(w[1])
    w2 = beyond(w[2])
    w3 = beyond(w[3])
    store2_bits(a, upper(v[0], w[0]).to(gl.int32, bitcast=True), upper(v[1], w[1]).to(gl.int32, bitcast=True))
    store2_bits(a + 512, upper(v[2], w[2]).to(gl.int32, bitcast=True), upper(v[3], w[3]).to(gl.int32, bitcast=True))
    store2_bits(a + 2048, upper(v0, w0).to(gl.int32, bitcast=True), upper(v1, w1).to(gl.int32, bitcast=True))
    store2_bits(a + 2560, upper(v2, w2).to(gl.int32, bitcast=True), upper(v3, w3).to(gl.int32, bitcast=True))


@jit
def _place_of_pairs(tid):
    """First operands of products lie as lanes take them, 512 bytes for each two of the eight rows of a lane.

    The place of a lane is lane ^ (lane >> 3), for the banks. A thread has pairs of four rows of lane 4 g + c.
    """
    g = (tid & 15) >> 1
    lane = g * 4 + ((tid >> 4) & 3)
    return (tid & 1) * 1024 + (lane ^ (g >> 1)) * 16 + (tid >> 6) * 8


@jit
def _put_eight(a, raw):
    """Eight keys of a token, as float32."""
    store4(a, (low(raw[0]), high(raw[0]), low(raw[1]), high(raw[1])))
    store4(a + 16, (low(raw[2]), high(raw[2]), low(raw[3]), high(raw[3])))


@jit
def _squares(raw):
    """Of eight keys, rounded as products take them."""
    return (
        pack(low(raw[0]) * low(raw[0]), high(raw[0]) * high(raw[0])),
        pack(low(raw[1]) * low(raw[1]), high(raw[1]) * high(raw[1])),
        pack(low(raw[2]) * low(raw[2]), high(raw[2]) * high(raw[2])),
        pack(low(raw[3]) * low(raw[3]), high(raw[3]) * high(raw[3])),
    )


@jit
def put_keys(base, tid):
    """C, B and B² of 16 tokens."""
    a = base + RAW_AT + tid * 16
    a_keys = base + KEYS_AT + (tid >> 3) * 768 + ((tid & 7) >> 1) * 192 + (tid & 1) * 32
    b = load4_bits(a + 6144)
    _put_eight(a_keys, load4_bits(a + 8192))
    _put_eight(a_keys + 64, b)
    _put_eight(a_keys + 128, _squares(b))


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
    a_out = a_rows + pair * 768 + (tid & 15) * 16
    a_pair = a_scales + pair * 4
    _put_rows(a_out, _rows_of(dy, one, one))
    _put_rows(a_out + 256, _cut_rows(_rows_of(x, load1(a_pair), load1(a_pair + 4))))
    _put_rows(a_out + 512, _cut_rows(_rows_of(u, load1(a_pair + 1024), load1(a_pair + 1028))))


@jit
def _put_transposable(a, raw):
    """Eight keys of a token where `load_transposed` finds them; of 16, a lane's four lie four apart, by twos."""
    store2_bits(a, raw[0], raw[2])
    store2_bits(a + 16, raw[1], raw[3])


@jit
def put_written(base, a_operands, a_scales, tid, left):
    """What 16 tokens write, as operands of products.

    v and u in two parts each [2, 2, 512 words], and of both halves of the keys B and B² [2, 2, 16, 36 words].
    """
    wait_async(tid * 0)
    a = base + RAW_AT + tid * 16
    pair = (tid >> 4) * 2
    x = _unless_past(load4_bits(a), pair, left)
    u = _unless_past(load4_bits(a + 2048), pair, left)
    b0 = load4_bits(a + 6144)
    b1 = load4_bits(a + 8192)
    a_out = a_operands + _place_of_pairs(tid)
    a_pair = a_scales + pair * 4
    _put_two_parts(a_out, _cut_rows(_rows_of(x, load1(a_pair), load1(a_pair + 4))))
    _put_two_parts(a_out + 4096, _cut_rows(_rows_of(u, load1(a_pair + 1024), load1(a_pair + 1028))))
    a_keys = a_operands + (8192 + (tid >> 3) * 144 + ((tid & 7) >> 1) * 32 + (tid & 1) * 8)
    _put_transposable(a_keys, b0)
    _put_transposable(a_keys + 2304, _squares(b0))
    _put_transposable(a_keys + 4608, b1)
    _put_transposable(a_keys + 6912, _squares(b1))


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
def parts_of(block):
    """Of a block of the segment, from shared memory; of one before the first, its own."""
    address = shared_base(gl.to_tensor(0)) + (SPANS_AT + 64) + gl.maximum(block, 0) * 4
    return uniform(load_scalar(address).to(gl.int32))


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
def put_scaled(base, a_rows, p_x, p_beta, x_t, beta_t, dt, r, start, steps, tid):
    """v and u of a block in parts, dt and r one a lane, and x and beta in pairs of tokens, for products."""
    pair = (tid >> 4) * 2
    x = _unless_past(_two_tokens(p_x, x_t, start, steps, tid), pair, steps - start)
    u = _unless_past(_two_tokens(p_beta, beta_t, start, steps, tid), pair, steps - start)
    v_scale = dt * r
    a = a_rows + pair * 768 + (tid & 15) * 16
    _put_rows(a + 256, _rows_of(x, from_lane(v_scale, pair), from_lane(v_scale, pair + 1)))
    _put_rows(a + 512, _rows_of(u, from_lane(r, pair), from_lane(r, pair + 1)))
    a = base + PAIRS_AT + _place_of_pairs(tid)
    _put_pairs(a, x)
    _put_pairs(a + 2048, u)
    barrier()


@jit
def _two_tokens(p, stride, start, steps, tid):
    """Two words each of two tokens."""
    t0 = start + (tid >> 4) * 2
    p0 = p + (gl.minimum(t0, steps - 1) * stride + (tid & 15) * 2)
    p1 = p + (gl.minimum(t0 + 1, steps - 1) * stride + (tid & 15) * 2)
    return gl.load(p0), gl.load(p0 + 1), gl.load(p1), gl.load(p1 + 1)
