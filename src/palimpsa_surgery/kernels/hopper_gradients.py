"""The gradients that a segment's own tokens cause (step 5 of `triton_scan.py`'s backward pass) for Hopper.

Time runs backwards through blocks of 16 tokens, one block of which the state at its end is known. With c the product of
the decays since the block's first token, M / c and I / c do not decay, so a token that is done takes back what it wrote:

    M / c -= v B        I / c -= u B² + dq        with v = dt x / c, u = beta / c, dq by how much I_prior / c has grown

and so do c E and c E_I, the adjoints from this token on, to which a token adds C dy (c / I) and -C dy (c / I) (M / I).
Everything is float32 and no element is moved: a lane has eight value rows and four keys of M, I, E and E_I, and leaves
its sums over them in shared memory, where those of four tokens are added up at a time.

What was taken back is lost where the state has grown by more than float32 can hold beside it (`GROWTH`). Then each
token is a block of its own, and its state is worked out from the start of the 16.

The gradient of log alpha at a block's first token is what flows through there, E · alpha M + E_I · alpha Ibar; from a
token to the next it changes by v · dv + u · dbeta, less what the prior receives.
"""

from .hopper_lanes import (
    any_of_block,
    barrier,
    beyond,
    copy_async,
    from_lane,
    gl,
    high,
    jit,
    load1,
    load2_bits,
    load4,
    load4_bits,
    load_global4,
    low,
    mma16,
    pack,
    prefetch,
    reciprocal,
    shared_base,
    store1,
    store2_bits,
    store4,
    store_global2_if,
    store_global4,
    upper,
    wait_async,
    warp_barrier,
)

HEAD_DIM, STATE_SIZE = 64, 128  # what the kernel is written for
NUM_WARPS = 4  # of 16 keys each
HALVES = 2  # programs for all keys
GROWTH = gl.constexpr(4096.0)  # I / c over 16 tokens, and 1 / c

# Shared memory, in bytes. A token's sums over a lane's elements [4 warps, 6, 32 lanes, 4]: d v and d beta of rows 0 to 3
# and 4 to 7, dC and dB. Sums over a warp's keys of the first four [17 tokens, 4 warps, 32, 4], and of -Z_I over a lane's
# elements [16, 128]. Operands of 16 tokens: rows [2, 16, (dy, v, u), 64], keys [16, warp, (C, B, B²), 16], x and beta in
# pairs of tokens, as first operands lie [2, 4, 8, 4, 4]. What was copied for the next 16, in the order in which threads
# take it [5, 128, 4 words]. Parts of what d log alpha changes by [16, 32].
ROW_SUMS_AT = gl.constexpr(12288)
PRIORS_AT = gl.constexpr(47104)
ROWS_AT = gl.constexpr(55296)
KEYS_AT = gl.constexpr(79872)
PAIRS_AT = gl.constexpr(92160)
RAW_AT = gl.constexpr(96256)
CHANGES_AT = gl.constexpr(106496)
FLOWS_AT = gl.constexpr(108544)  # [16, 4 warps]
IDLE_AT = gl.constexpr(108800)  # a word for each thread that has nothing to say
# Of all the segment's tokens [256]: dt / c, 1 / c, dq, alpha and dt
SCALES_AT = gl.constexpr(109312)
SIZES_AT = gl.constexpr(114432)  # where the 16 tokens are split, of each four of them: tokens that are a block
WORDS = gl.constexpr(224)  # rows of 128 words
MOST_TOKENS = 256


@jit
def _element(M, I, E, J, C, B, S, dy, v, u, dq):
    """One element: what it was before the token, adjoints with the token (J = -E_I), M / I and -Z_I / dy."""
    r = reciprocal(I)
    m = M * r
    z = C * r
    w = z * m
    return M - v * B, I - u * S - dq, E + dy * z, J + dy * w, m, w


@jit
def _row(M, I, E, J, C, B, S, dy, v, u, dq, sums):
    """A row's four keys; adds to `sums`: dC, dB by M and by I for each key, and -Z_I; d v and d beta."""
    M0, I0, E0, J0, m0, w0 = _element(M[0], I[0], E[0], J[0], C[0], B[0], S[0], dy, v, u, dq)
    M1, I1, E1, J1, m1, w1 = _element(M[1], I[1], E[1], J[1], C[1], B[1], S[1], dy, v, u, dq)
    M2, I2, E2, J2, m2, w2 = _element(M[2], I[2], E[2], J[2], C[2], B[2], S[2], dy, v, u, dq)
    M3, I3, E3, J3, m3, w3 = _element(M[3], I[3], E[3], J[3], C[3], B[3], S[3], dy, v, u, dq)
    dC, dB, G, zs = sums
    dC = (dC[0] + dy * m0, dC[1] + dy * m1, dC[2] + dy * m2, dC[3] + dy * m3)
    dB = (dB[0] + E0 * v, dB[1] + E1 * v, dB[2] + E2 * v, dB[3] + E3 * v)
    G = (G[0] + J0 * u, G[1] + J1 * u, G[2] + J2 * u, G[3] + J3 * u)
    zs = zs + dy * ((w0 + w1) + (w2 + w3))
    dv = E0 * B[0] + E1 * B[1] + E2 * B[2] + E3 * B[3]
    du = J0 * S[0] + J1 * S[1] + J2 * S[2] + J3 * S[3]
    return (M0, M1, M2, M3), (I0, I1, I2, I3), (E0, E1, E2, E3), (J0, J1, J2, J3), (dC, dB, G, zs), dv, du


@jit
def _add4(a, b):
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])


@jit
def _times4(a, factor):
    return (a[0] * factor, a[1] * factor, a[2] * factor, a[3] * factor)


@jit
def _load_row_sums(a_sums, lane):
    """A token's d v or d beta of four rows, from the four lanes that have parts of it."""
    a = a_sums + lane // 8 * 512 + lane % 8 * 64
    turn = lane % 8 // 2
    return (
        load4(a + turn * 16),
        load4(a + (turn + 1) % 4 * 16),
        load4(a + (turn + 2) % 4 * 16),
        load4(a + (turn + 3) % 4 * 16),
    )


@jit
def _load_key_sums(a_sums, lane):
    """A token's dC or dB of four keys, from four of the eight lanes that have parts of it; lane ^ 8 has the others."""
    q = lane // 4 % 2
    a = a_sums + 2048 + q * 512 + lane // 8 % 2 * 256 + lane % 4 * 16
    return (load4(a + q * 64), load4(a + (1 + q) * 64), load4(a + (2 + q) % 4 * 64), load4(a + (3 + q) % 4 * 64))


@jit
def _once_known(address, value, nothing):
    """The address, once the value is known: keeps loads from being scheduled all at once. `nothing` is zero."""
    return address | (value.to(gl.int32, bitcast=True) & nothing)


@jit
def _total(parts):
    return _add4(_add4(parts[0], parts[1]), _add4(parts[2], parts[3]))


@jit
def _put_key_sums(parts, pointer, present, lane):
    total = _total(parts)
    other = lane ^ 8
    total = (
        total[0] + from_lane(total[0], other),
        total[1] + from_lane(total[1], other),
        total[2] + from_lane(total[2], other),
        total[3] + from_lane(total[3], other),
    )
    store_global2_if(pointer, pack(total[0], total[1]), pack(total[2], total[3]), present)


@jit
def _load_rows(a_rows):
    """dy, v and u of four rows."""
    return load4(a_rows), load4(a_rows + 256), load4(a_rows + 512)


@jit
def _half(M, I, E, J, C, B, S, dq, sums, rows, half: gl.constexpr):
    """Rows 0 to 3 or 4 to 7 of a lane's eight."""
    dy, v, u = rows
    M_new = ()
    I_new = ()
    E_new = ()
    J_new = ()
    dv = ()
    du = ()
    for i in gl.static_range(4):
        M_j, I_j, E_j, J_j, sums, dv_j, du_j = _row(
            M[4 * half + i], I[4 * half + i], E[4 * half + i], J[4 * half + i], C, B, S, dy[i], v[i], u[i], dq, sums
        )
        M_new += (M_j,)
        I_new += (I_j,)
        E_new += (E_j,)
        J_new += (J_j,)
        dv += (dv_j,)
        du += (du_j,)
    return M_new, I_new, E_new, J_new, sums, dv, du


@jit
def _token(M, I, E, J, t, base, a_rows, a_keys, a_scales, p_keys, warp, lane, nothing):
    """Token t. While it is worked on, what lanes left of token t + 1 is summed over the warp."""
    a_sums = base + warp * 3072
    a_rows = a_rows + t * 768
    a_out = a_sums + lane * 16
    zero = (lane * 0).to(gl.float32)
    zeros = (zero, zero, zero, zero)
    sums = (zeros, zeros, zeros, zero)
    warp_barrier()
    C = load4(a_keys + t * 768)
    rows = _load_rows(a_rows)
    B = load4(a_keys + t * 768 + 64)
    S = load4(a_keys + t * 768 + 128)
    dq = load1(a_scales + 2048 + t * 4)
    M0, I0, E0, J0, sums, dv, du = _half(M, I, E, J, C, B, S, dq, sums, rows, 0)
    row_sums = _load_row_sums(_once_known(a_sums, J0[2][0], nothing), lane)
    key_sums = _load_key_sums(_once_known(a_sums, J0[3][3], nothing), lane)
    warp_barrier()
    store4(base + ROW_SUMS_AT + (t + 1) * 2048 + warp * 512 + lane * 16, _total(row_sums))
    store4(a_out, dv)
    store4(a_out + 1024, du)
    rows = _load_rows(a_rows + 16)
    M1, I1, E1, J1, sums, dv, du = _half(M, I, E, J, C, B, S, dq, sums, rows, 1)
    _put_key_sums(key_sums, p_keys + (t + 1) * 64, lane * 0 + t < 15, lane)
    store4(a_out + 512, dv)
    store4(a_out + 1536, du)
    dC, dB, G, z = sums
    store4(a_out + 2048, dC)
    # G is that of -E_I
    dB = (
        dB[0] - (B[0] + B[0]) * G[0],
        dB[1] - (B[1] + B[1]) * G[1],
        dB[2] - (B[2] + B[2]) * G[2],
        dB[3] - (B[3] + B[3]) * G[3],
    )
    store4(a_out + 2560, dB)
    store1(_once_known(base + PRIORS_AT + t * 512 + warp * 128 + lane * 4, z, nothing), z)
    return M0 + M1, I0 + I1, E0 + E1, J0 + J1


@jit
def _last_token(base, p_keys, warp, lane):
    """What is left of token 0."""
    warp_barrier()
    a_sums = base + warp * 3072
    store4(base + ROW_SUMS_AT + warp * 512 + lane * 16, _total(_load_row_sums(a_sums, lane)))
    _put_key_sums(_load_key_sums(a_sums, lane), p_keys, lane * 0 == 0, lane)


@jit
def _times_all(V, factor):
    """A state's or adjoint's 32 elements times a factor."""
    scaled = ()
    for j in gl.static_range(8):
        scaled += (_times4(V[j], factor),)
    return scaled


@jit
def _three_parts(a, b):
    """Two float32 as three pairs of bfloat16, whose sum is all of them."""
    a1 = beyond(a)
    b1 = beyond(b)
    a2 = beyond(a1)
    b2 = beyond(b1)
    return (
        upper(a, b).to(gl.int32, bitcast=True),
        upper(a1, b1).to(gl.int32, bitcast=True),
        upper(a2, b2).to(gl.int32, bitcast=True),
    )


@jit
def _written(a_pairs, a_keys, scales):
    """What 16 tokens write, scaled: eight tiles of 16 rows x 8 keys, as products of pairs of tokens with three parts.

    `scales` of tokens 2 c, 2 c + 1, 2 c + 8 and 2 c + 9. Of tile 2 i + u a lane has rows 2 i and 2 i + 1 of its eight and keys 2 u
    and 2 u + 1 of its four.
    """
    s0, s1, s8, s9 = scales
    zero = (a_keys * 0).to(gl.float32)
    tiles = ()
    parts = ()
    for u in gl.static_range(2):
        a = a_keys + 8 * u
        parts += (
            (
                _three_parts(load1(a) * s0, load1(a + 768) * s1),
                _three_parts(load1(a + 6144) * s8, load1(a + 6912) * s9),
            ),
        )
    for i in gl.static_range(4):
        a0, a1, a2, a3 = load4_bits(a_pairs + 16 * i)
        for u in gl.static_range(2):
            first, second = parts[u]
            tile = mma16(a0, a1, a2, a3, first[2], second[2], (zero, zero, zero, zero))
            tile = mma16(a0, a1, a2, a3, first[1], second[1], tile)
            tiles += (mma16(a0, a1, a2, a3, first[0], second[0], tile),)
    return tiles


@jit
def _from_tiles(tiles, j: gl.constexpr):
    """A lane's row j of tiles as of `_written`."""
    i: gl.constexpr = j // 2 * 2
    k: gl.constexpr = j % 2 * 2
    return (tiles[i][k], tiles[i][k + 1], tiles[i + 1][k], tiles[i + 1][k + 1])


@jit
def _load_start(pointer):
    """A lane's eight rows of four keys of M, then of Ibar, as they lie: pairs of bfloat16 [2, n, 8 rows]."""
    keys = ()
    for i in gl.static_range(4):
        keys += (load_global4(pointer + 4 * i),)
    for i in gl.static_range(4):
        keys += (load_global4(pointer + (512 + 4 * i)),)
    return keys


@jit
def _rows_of(k0, k1, k2, k3):
    """Four keys of eight rows as rows."""
    rows = ()
    for i in gl.static_range(4):
        rows += (
            (low(k0[i]), low(k1[i]), low(k2[i]), low(k3[i])),
            (high(k0[i]), high(k1[i]), high(k2[i]), high(k3[i])),
        )
    return rows


@jit
def _state(start, a_pairs, a_keys, v_scales, u_scales, kept, prior, prior_end):
    """M and I after a token: `kept` of the start's, plus what was written; how far I has outgrown its start.

    `prior` and `prior_end`: of I_prior at the start and now.
    """
    old = _rows_of(start[0], start[1], start[2], start[3])
    tiles = _written(a_pairs, a_keys, v_scales)
    M = ()
    for j in gl.static_range(8):
        M += (_add4(_times4(old[j], kept), _from_tiles(tiles, j)),)
    old = _rows_of(start[4], start[5], start[6], start[7])
    tiles = _written(a_pairs + 2048, a_keys + 64, u_scales)
    grown = prior_end - prior
    zero = grown * 0.0
    worst = (zero, zero, zero, zero)
    I = ()
    for j in gl.static_range(8):
        new = _from_tiles(tiles, j)
        row = ()
        still = ()
        for k in gl.static_range(4):
            before = old[j][k] * kept + prior
            added = new[k] + grown
            still += (gl.maximum(worst[k], added - GROWTH * before),)
            row += (before + added,)
        worst = still
        I += (row,)
    return M, I, gl.maximum(gl.maximum(worst[0], worst[1]), gl.maximum(worst[2], worst[3]))


@jit
def _flow(M, I, E, J, prior):
    """What flows through a block's first token: E · alpha M + E_I · alpha Ibar, of a lane's elements."""
    zero = prior * 0.0
    flow = (zero, zero, zero, zero)
    for j in gl.static_range(8):
        more = ()
        for k in gl.static_range(4):
            more += (flow[k] + M[j][k] * E[j][k] - (I[j][k] - prior) * J[j][k],)
        flow = more
    return (flow[0] + flow[1]) + (flow[2] + flow[3])


@jit
def _sum_of_warp(v, lane):
    for i in gl.static_range(5):
        v = v + from_lane(v, lane ^ (1 << i))
    return v


@jit
def _leave(a_word, a_own, v, lane):
    """One word a warp: lane 0 writes it, the others each a word of their own."""
    store1(gl.where(lane == 0, a_word, a_own), v)


@jit
def _add_up(base, a_rows, a_scales, warp, lane, prior, p_rows, TP, dprior):
    """Sums over warps, of four tokens by each: d v and d beta to where they go; returns dprior with -Z_I."""
    s = lane // 8  # d v of rows 0 to 3 and 4 to 7 of eight, and d beta
    g = lane % 8
    sign = gl.where(s < 2, 1.0, -1.0)
    for i in gl.static_range(4):
        t = 4 * i + warp
        a = base + ROW_SUMS_AT + t * 2048 + lane * 16
        total = _add4(_add4(load4(a), load4(a + 512)), _add4(load4(a + 1024), load4(a + 1536)))
        total = _times4(total, sign)
        operand = load4(a_rows + 256 + t * 768 + s // 2 * 256 + g * 32 + s % 2 * 16)
        r = load1(a_scales + 1024 + t * 4)
        z = load4(base + PRIORS_AT + t * 512 + lane * 16)
        z = r * ((z[0] + z[1]) + (z[2] + z[3]))
        change = total[0] * operand[0] + total[1] * operand[1] + total[2] * operand[2] + total[3] * operand[3]
        store1(base + CHANGES_AT + t * 128 + lane * 4, change - prior * z)
        store_global4(p_rows + ((s // 2 * 2 * TP + t) * 64 + g * 8 + s % 2 * 4), _times4(total, r))
        dprior = dprior + z
    return dprior


@jit
def _copy_block(base, tid, p_x, p_beta, p_dy, p_B, p_C, x_t, beta_t, dy_t, B_t, C_t, start, steps):
    """Begin to copy what 16 tokens bring: two tokens' four rows, and eight keys of one, a thread."""
    a = base + RAW_AT + tid * 16
    t0 = gl.minimum(start + tid // 16 * 2, steps - 1)
    t1 = gl.minimum(start + tid // 16 * 2 + 1, steps - 1)
    o = tid % 16 * 2
    copy_async(a, p_x + (t0 * x_t + o), 8)
    copy_async(a + 8, p_x + (t1 * x_t + o), 8)
    copy_async(a + 2048, p_beta + (t0 * beta_t + o), 8)
    copy_async(a + 2056, p_beta + (t1 * beta_t + o), 8)
    copy_async(a + 4096, p_dy + (t0 * dy_t + o), 8)
    copy_async(a + 4104, p_dy + (t1 * dy_t + o), 8)
    t0 = gl.minimum(start + tid // 8, steps - 1)
    o = tid % 8 * 4
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
    """v and u of 16 tokens, from x and beta as `_copy_block` brings them."""
    pair = tid // 16 * 2
    a = a_rows + pair * 768 + tid % 16 * 16
    a_pair = a_scales + pair * 4
    _put_rows(a + 256, x, load1(a_pair), load1(a_pair + 4))
    _put_rows(a + 512, u, load1(a_pair + 1024), load1(a_pair + 1028))


@jit
def _place_of_pairs(base, tid):
    return base + PAIRS_AT + tid // 16 % 4 * 512 + tid % 16 * 32 + tid // 64 * 8


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
def _put_block(base, a_rows, a_scales, tid, left):
    """Operands of 16 tokens, of which the first `left` are the sequence's, from where they were copied."""
    wait_async(tid * 0)
    a = base + RAW_AT + tid * 16
    pair = tid // 16 * 2
    x = _unless_past(load4_bits(a), pair, left)
    u = _unless_past(load4_bits(a + 2048), pair, left)
    dy = _unless_past(load4_bits(a + 4096), pair, left)
    one = (tid * 0).to(gl.float32) + 1.0
    _put_rows(a_rows + pair * 768 + tid % 16 * 16, dy, one, one)
    _put_scaled(a_rows, a_scales, tid, x, u)
    a_put = _place_of_pairs(base, tid)
    _put_pairs(a_put, x)
    _put_pairs(a_put + 2048, u)
    _put_keys(base, tid)


@jit
def _put_eight(a, raw):
    """Eight keys of a token, as float32."""
    store4(a, (low(raw[0]), high(raw[0]), low(raw[1]), high(raw[1])))
    store4(a + 16, (low(raw[2]), high(raw[2]), low(raw[3]), high(raw[3])))


@jit
def _put_keys(base, tid):
    """C, B and B² of 16 tokens."""
    a = base + RAW_AT + tid * 16
    a_keys = base + KEYS_AT + tid // 8 * 768 + tid % 8 // 2 * 192 + tid % 2 * 32
    b = load4_bits(a + 6144)
    _put_eight(a_keys, load4_bits(a + 8192))
    _put_eight(a_keys + 64, b)
    store4(a_keys + 128, (low(b[0]) * low(b[0]), high(b[0]) * high(b[0]), low(b[1]) * low(b[1]), high(b[1]) * high(b[1])))
    store4(a_keys + 144, (low(b[2]) * low(b[2]), high(b[2]) * high(b[2]), low(b[3]) * low(b[3]), high(b[3]) * high(b[3])))


@jit
def _put_scales(base, p_dt, p_doc, dt_t, A, prior, steps, before, tid, n_tokens, HAS_DOC: gl.constexpr):
    """What only dt decides, of all the segment's tokens: one a thread, and 16 threads a block."""
    lane = tid % 32
    t = tid % 16
    for i in range(gl.cdiv(n_tokens, 128)):
        token = i * 128 + tid
        o = gl.minimum(token, steps - 1)
        dt = gl.where(token < steps, gl.load(p_dt + o * dt_t), 0.0)
        alpha = gl.exp(-A * dt)
        if HAS_DOC:
            goes_on = gl.load(p_doc + o) == gl.load(p_doc + gl.maximum(o - 1, before))
            alpha = gl.where(goes_on | (token >= steps), alpha, 0.0)
        kept = gl.where(t == 0, 1.0, alpha)
        for k in gl.static_range(4):
            kept = gl.where(t >= 1 << k, kept * from_lane(kept, lane - (1 << k)), kept)
        r = reciprocal(kept)
        a = base + SCALES_AT + token * 4
        store1(a, dt * r)
        store1(a + 1024, r)
        store1(a + 2048, gl.where(t == 0, 0.0, prior * (r - from_lane(r, lane - 1))))
        store1(a + 3072, alpha)
        store1(a + 4096, dt)


@jit
def _put_fours(base, a_scales, prior, tid):
    """The block's scales where four tokens are a block."""
    t = tid % 16
    lane = tid % 32
    dt = load1(a_scales + 4096 + t * 4)
    kept = gl.where(t % 4 == 0, 1.0, load1(a_scales + 3072 + t * 4))
    for k in gl.static_range(2):
        kept = gl.where(t % 4 >= 1 << k, kept * from_lane(kept, lane - (1 << k)), kept)
    r = reciprocal(kept)
    dq = gl.where(t % 4 == 0, 0.0, prior * (r - from_lane(r, lane - 1)))
    _put_scales_if(base, a_scales, tid, tid < 16, dt * r, r, dq)


@jit
def _put_ones(base, a_scales, first, tid):
    """The scales of four tokens of which each is a block."""
    t = tid % 16
    dt = load1(a_scales + 4096 + t * 4)
    _put_scales_if(base, a_scales, tid, (tid < 16) & (t // 4 == first // 4), dt, dt * 0.0 + 1.0, dt * 0.0)


@jit
def _put_scales_if(base, a_scales, tid, condition, v_scale, u_scale, dq):
    """Three scales of a thread's token, if the condition holds."""
    a = gl.where(condition, a_scales + tid % 16 * 4, base + IDLE_AT + tid * 4)
    store1(a, v_scale)
    store1(gl.where(condition, a + 1024, a), u_scale)
    store1(gl.where(condition, a + 2048, a), dq)


@jit
def _scales_of(a_scales, t, first, last, lane, c):
    """For the state after the token `last` of a block from `first` on: scales of four tokens' v and u, and what is kept.

    What is kept, and the scales of tokens before the block, are decays to its first token.
    """
    later = gl.where(t <= first, load1(a_scales + 3072 + t * 4), 1.0)
    for i in gl.static_range(4):
        later = gl.where(t < 16 - (1 << i), later * from_lane(later, lane + (1 << i)), later)
    kept = from_lane(later, lane * 0)
    later = gl.where(t == 15, 1.0, from_lane(later, lane + 1))
    u = gl.where(t < first, later, gl.where(t <= last, load1(a_scales + 1024 + t * 4), 0.0))
    v = u * load1(a_scales + 4096 + t * 4)
    return _of_column(v, c), _of_column(u, c), kept


@jit
def _of_column(v, c):
    """Of one value for each token, a lane each, those of tokens 2 c, 2 c + 1, 2 c + 8 and 2 c + 9."""
    return from_lane(v, 2 * c), from_lane(v, 2 * c + 1), from_lane(v, 2 * c + 8), from_lane(v, 2 * c + 9)


@jit
def _flows_of(base, split, lane):
    """d log alpha of 16 tokens, one a lane: what flows through the first token of its block, and the changes since."""
    t = lane % 16
    change = (lane * 0).to(gl.float32)
    for i in gl.static_range(4):
        v = load4(base + CHANGES_AT + t * 128 + (lane // 16 * 4 + i + t) % 8 * 16)
        change = change + ((v[0] + v[1]) + (v[2] + v[3]))
    change = change + from_lane(change, lane ^ 16)
    fours = load1(base + SIZES_AT + t // 4 * 4) > 1.0
    first = gl.where(split, gl.where(fours, t // 4 * 4, t), 0)
    change = gl.where(t > first, from_lane(change, lane - 1), 0.0)
    for i in gl.static_range(4):
        change = change + gl.where(t - (1 << i) > first, from_lane(change, lane - (1 << i)), 0.0)
    v = load4(base + FLOWS_AT + first * 16)
    return (v[0] + v[1]) + (v[2] + v[3]) + change


@jit
def _put_state(p, V, sign, N: gl.constexpr):
    """A lane's elements to [p, n]."""
    for j in gl.static_range(8):
        store_global4(p + j * N, _times4(V[j], sign))


@jit
def segment_gradients(
    x, dt, beta, A, B, C, prior, doc, dy, starts, adjoints, rows, keys, flows, dprior,
    x_b, x_t, x_h, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, B_b, B_t, B_g, C_b, C_t, C_g, dy_b, dy_t, dy_h,
    T, TP, H, HPG, NSEG, S, HAS_DOC: gl.constexpr,
):  # fmt: skip
    """All gradients of one segment, one head and 64 keys that its own tokens cause.

    x, beta, B, C and dy are int32 pairs, and their strides are in pairs; starts [b, h, TP / 16, p / 8, 2, n, p % 8]
    bfloat16, as pairs too. Slot k of adjoints [b, h, NSEG + 1, 2, p, n] becomes the adjoint of segment k's start.
    Partial results of each half of the keys: rows [b, h, 2, 2, TP, p], d v and d beta; flows [2, b, h, TP], d log alpha;
    dprior [2, b, h, NSEG, 4]. keys [2, b, h, TP, n], dB and dC, as pairs of bfloat16.
    """
    N: gl.constexpr = 128
    P: gl.constexpr = 64
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared = gl.allocate_shared_memory(gl.float32, [WORDS, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tid = gl.arange(0, 128, layout=L)
    lane = tid % 32
    warp = tid // 32
    g = lane // 4
    c = lane % 4
    zero_int = tid * 0
    zero = zero_int.to(gl.float32)
    shared.index(0).store(zero)  # what is not used is not allocated; this waits for all threads
    base = shared_base(zero_int)
    half = gl.program_id(0) % 2
    i_seg = (gl.program_id(0) // 2).to(gl.int64)
    i_bh = gl.program_id(1).to(gl.int64)
    n_bh = gl.num_programs(1).to(gl.int64)
    b = i_bh // H
    h = i_bh % H
    t0 = i_seg * S
    steps = gl.minimum(S, T - t0).to(gl.int32)
    b_A = gl.load(A + h)
    b_prior = gl.load(prior + h)
    chunk = i_bh * (TP // 16) + i_seg * (S // 16)  # the segment's first block
    p_x = x + (b * x_b + h * x_h + t0 * x_t)
    p_beta = beta + (b * beta_b + h * beta_h + t0 * beta_t)
    p_dy = dy + (b * dy_b + h * dy_h + t0 * dy_t)
    p_B = B + (b * B_b + (h // HPG) * B_g + t0 * B_t + half * 32)
    p_C = C + (b * C_b + (h // HPG) * C_g + t0 * C_t + half * 32)
    p_dt = dt + (b * dt_b + h * dt_h + t0 * dt_t)
    p_doc = doc + (b * T + t0)
    before = gl.maximum(-1, -t0).to(gl.int32)  # the token before the segment, where there is one
    p_rows = rows + ((i_bh * 4 + half) * TP + t0) * P
    p_keys = keys + ((i_bh * TP + t0) * (N // 2) + half * 32)
    p_flows = flows + ((half * n_bh + i_bh) * TP + t0)
    # a lane has rows 8 g to 8 g + 7 and keys 16 warp + 4 c to 16 warp + 4 c + 3 of the half
    o_key = warp * 16 + c * 4
    p_outs = p_keys + (gl.where(lane // 4 % 2 == 0, n_bh * TP * (N // 2), 0) + o_key // 2)  # dC or dB
    p_starts = starts + (chunk * (P * N) + half * 256)
    o_start = g * (8 * N) + o_key * 4
    a_keys = base + KEYS_AT + warp * 192 + c * 16
    a_pairs = base + PAIRS_AT + c * 512 + g * 64
    k_g = g // 2 * 4 + g % 2  # of a tile's column g; two keys further, the other tile's
    a_tile = base + (KEYS_AT + 64) + 2 * c * 768 + warp * 192 + k_g * 4
    a_idle = base + IDLE_AT + tid * 4
    a_flow = base + FLOWS_AT + warp * 4

    nothing = T >> 31  # zero, which the compiler cannot know
    n_blocks = gl.cdiv(steps, 16)
    zeros = (zero, zero, zero, zero)
    E = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    J = E
    dprior_sum = zero
    alpha_after = zero  # of the token after the block
    split = zero > 0.0  # whether the 16 tokens were more than one block
    start = (n_blocks - 1) * 16
    _copy_block(base, tid, p_x, p_beta, p_dy, p_B, p_C, x_t, beta_t, dy_t, B_t, C_t, start, steps)
    ahead = _load_start(p_starts + (start // 16 * (P * N) + o_start))
    _put_scales(base, p_dt, p_doc, dt_t, b_A, b_prior, steps, before, tid, n_blocks * 16, HAS_DOC)
    barrier()
    _put_block(base, base + ROWS_AT, base + SCALES_AT + start * 4, tid, steps - start)
    previous = gl.maximum(start - 16, 0)
    _copy_block(base, tid, p_x, p_beta, p_dy, p_B, p_C, x_t, beta_t, dy_t, B_t, C_t, previous, steps)
    barrier()
    t = lane % 16
    for i_block in range(n_blocks):
        start = (n_blocks - 1 - i_block) * 16
        previous = gl.maximum(start - 16, 0)
        a_scales = base + SCALES_AT + start * 4
        a_rows = base + ROWS_AT + i_block % 2 * 12288
        flow = _flows_of(base, split, lane)  # of the block after this one
        gl.store(p_flows + (start + 16 + t), flow, mask=(tid < 16) & (zero_int + i_block > 0))
        first = load1(a_scales + 3072)
        r_end = load1(a_scales + 1084)
        a_c = a_scales + c * 8
        v_scales = (load1(a_c), load1(a_c + 4), load1(a_c + 32), load1(a_c + 36))
        u_scales = (load1(a_c + 1024), load1(a_c + 1028), load1(a_c + 1056), load1(a_c + 1060))
        M, I, worst = _state(ahead, a_pairs, a_tile, v_scales, u_scales, first, b_prior + zero, b_prior * r_end)
        store1(a_idle, gl.where((r_end <= GROWTH) & (worst <= 0.0), 0.0, 1.0))
        outgrown = any_of_block(shared_base(gl.to_tensor(0)) + IDLE_AT)
        split = zero_int + outgrown != 0
        p_previous = p_starts + (previous // 16 * (P * N) + o_start)
        prefetch(p_previous)
        prefetch(p_previous + 512)
        # one block of 16 tokens
        scale = gl.where(split, 1.0, alpha_after * reciprocal(r_end))
        E = _times_all(E, scale)
        J = _times_all(J, scale)
        for i_token in range(16 - 16 * outgrown):
            M, I, E, J = _token(
                M, I, E, J, 15 - i_token, base, a_rows + g * 32, a_keys, a_scales, p_outs + start * (N // 2), warp, lane, nothing
            )
        flow = _flow(M, I, E, J, b_prior)
        # blocks of four tokens
        for _ in range(outgrown):
            _put_fours(base, a_scales, b_prior, tid)
            barrier()
            a_put = _place_of_pairs(base, tid)
            _put_scaled(a_rows, a_scales, tid, _from_pairs(a_put), _from_pairs(a_put + 2048))
            barrier()
        for i_four in range(4 * outgrown):
            last = 15 - 4 * i_four
            p_start = p_starts + (start // 16 * (P * N) + o_start)
            v_scales, u_scales, kept = _scales_of(a_scales, t, last - 3, last, lane, c)
            r_end = load1(a_scales + 1024 + last * 4)
            M_4, I_4, worst = _state(
                _load_start(p_start), a_pairs, a_tile, v_scales, u_scales, kept, b_prior + zero, b_prior * r_end
            )
            store1(a_idle, gl.where((r_end <= GROWTH) & (worst <= 0.0), 0.0, 1.0))
            single = any_of_block(shared_base(gl.to_tensor(0)) + IDLE_AT)
            a_size = gl.where(tid == 0, base + SIZES_AT + (3 - i_four) * 4, a_idle)
            store1(a_size, zero + (4 - 3 * single).to(gl.float32))
            after = gl.where(zero_int + last == 15, alpha_after, load1(a_scales + 3076 + gl.minimum(last, 14) * 4))
            scale = gl.where(zero_int + single == 0, after * reciprocal(r_end), 1.0)
            E = _times_all(E, scale)
            J = _times_all(J, scale)
            for i_token in range(4 - 4 * single):
                M_4, I_4, E, J = _token(
                    M_4, I_4, E, J, last - i_token, base, a_rows + g * 32, a_keys, a_scales,
                    p_outs + start * (N // 2), warp, lane, nothing,
                )  # fmt: skip
            through = _sum_of_warp(_flow(M_4, I_4, E, J, b_prior), lane)
            _leave(gl.where(zero_int + single == 0, a_flow + (last - 3) * 16, a_idle), a_idle, through, lane)
            # or each of them a block
            for _ in range(single):
                _put_ones(base, a_scales, last, tid)
                barrier()
                a_put = _place_of_pairs(base, tid)
                _put_scaled(a_rows, a_scales, tid, _from_pairs(a_put), _from_pairs(a_put + 2048))
                barrier()
            for i_token in range(4 * single):
                t_k = last - i_token
                v_scales, u_scales, kept = _scales_of(a_scales, t, t_k, t_k, lane, c)
                M_1, I_1, worst = _state(
                    _load_start(p_start), a_pairs, a_tile, v_scales, u_scales, kept, b_prior + zero, b_prior + zero
                )
                scale = gl.where(zero_int + t_k == 15, alpha_after, load1(a_scales + 3076 + gl.minimum(t_k, 14) * 4))
                E = _times_all(E, scale)
                J = _times_all(J, scale)
                M_1, I_1, E, J = _token(
                    M_1, I_1, E, J, t_k, base, a_rows + g * 32, a_keys, a_scales,
                    p_outs + start * (N // 2), warp, lane, nothing,
                )  # fmt: skip
                through = _sum_of_warp(_flow(M_1, I_1, E, J, b_prior), lane)
                _leave(a_flow + t_k * 16, a_idle, through, lane)
        ahead = _load_start(p_previous)
        flow = _sum_of_warp(flow, lane)
        _last_token(base, p_outs + start * (N // 2), warp, lane)
        _leave(gl.where(split, a_idle, a_flow), a_idle, flow, lane)
        barrier()
        dprior_sum = _add_up(base, a_rows, a_scales, warp, lane, b_prior, p_rows + start * P, TP, dprior_sum)
        _put_block(
            base, base + ROWS_AT + (i_block + 1) % 2 * 12288, base + SCALES_AT + previous * 4, tid, steps - previous
        )
        before_that = gl.maximum(start - 32, 0)
        _copy_block(base, tid, p_x, p_beta, p_dy, p_B, p_C, x_t, beta_t, dy_t, B_t, C_t, before_that, steps)
        alpha_after = first
        barrier()
    gl.store(p_flows + t, _flows_of(base, split, lane), mask=tid < 16)
    wait_async(zero_int)  # no copy lands in shared memory after the program's end
    dprior_sum = _sum_of_warp(dprior_sum, lane)
    p_dprior = dprior + (((half * n_bh + i_bh) * NSEG + i_seg) * 4 + warp)
    gl.store(p_dprior, -dprior_sum, mask=lane == 0)
    p_e = adjoints + ((i_bh * (NSEG + 1) + i_seg) * 2 * P * N + half * 64 + g * 8 * N + o_key)
    _put_state(p_e, E, alpha_after, N)
    _put_state(p_e + P * N, J, -alpha_after, N)
