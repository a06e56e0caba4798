"""The gradients that a segment's own tokens cause (step 5 of `triton_scan.py`'s backward pass) for Hopper.

Time runs backwards through blocks of 16 tokens. A block begins from its state after the last of them, which products
make from the state before the first. With c the product of the decays since the block's first token, M / c and I / c do
not decay, so a token that is done takes back what it wrote,

    M / c -= v B        I / c -= u B² + dq        with v = dt x / c, u = beta / c, dq by how much I_prior / c has grown

and adds C dy (c / I) to c E and -C dy (c / I) (M / I) to c E_I, which do not decay either. All of it is float32, and no
element is moved: a lane has eight value rows and four keys of M, I, E and E_I, and leaves its sums over them in shared
memory (`hopper_token.py`); what a block's tokens bring lies there too (`hopper_block.py`).

Where I has outgrown its start, or c has fallen, by more than `GROWTH`, float32 would not give the start back. Then four
tokens are a block, or one, and the state after each is made from the start of the 16. (M divides nothing, and may
outgrow its start 10^5-fold until the tokens before err by 3e-4.)

The gradient of log alpha at a block's first token is what flows through there, E · alpha M + E_I · alpha Ibar; from a
token to the next it grows by v · dv + u · dbeta, less what the prior receives. (It would be zero after the segment, but
states at the starts are rounded, and what is missed there would stay where little is left of larger numbers.)
"""

from .hopper_block import (
    IDLE_AT,
    KEYS_AT,
    PAIRS_AT,
    ROWS_AT,
    SCALES_AT,
    WORDS,
    copy_block,
    put_block,
    put_fours,
    put_ones,
    put_scales,
    rescale,
    scales_of,
)
from .hopper_lanes import (
    any_of_block,
    barrier,
    beyond,
    gl,
    high,
    jit,
    load1,
    load4_bits,
    load_global4,
    low,
    mma16,
    prefetch,
    reciprocal,
    scaled,
    shared_base,
    store1,
    store_global4,
    upper,
    wait_async,
)
from .hopper_token import add4, add_up, last_token, sum_of_warp, token

HEAD_DIM, STATE_SIZE = 64, 128  # what the kernel is written for
NUM_WARPS = 4  # of 16 keys each
HALVES = 2  # programs for all keys
GROWTH = gl.constexpr(4096.0)  # I / c over 16 tokens, and 1 / c


@jit
def _times_all(V, factor):
    """A state's or adjoint's 32 elements times a factor."""
    rows = ()
    for j in gl.static_range(8):
        rows += (scaled(V[j], factor),)
    return rows


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
    """What 16 tokens write, scaled: eight tiles of 16 rows × 8 keys, products of x or beta, bfloat16, with three parts.

    `scales` of tokens 2 c, 2 c + 1, 2 c + 8 and 2 c + 9. Of tile 2 i + u a lane has rows 2 i and 2 i + 1 of its eight
    and keys 2 u and 2 u + 1 of its four.
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
    """M and I after a token: `kept` of the start's, and what was written; more than zero where I has outgrown `GROWTH`.

    `prior` and `prior_end`: I_prior / c of the block's first token and of this one.
    """
    old = _rows_of(start[0], start[1], start[2], start[3])
    tiles = _written(a_pairs, a_keys, v_scales)
    M = ()
    for j in gl.static_range(8):
        M += (add4(scaled(old[j], kept), _from_tiles(tiles, j)),)
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
def _outgrown(a_idle, r_end, worst):
    """1 for all threads if one of them has an element that has grown too much, or 1 / c has, otherwise 0."""
    store1(a_idle, gl.where((r_end <= GROWTH) & (worst <= 0.0), 0.0, 1.0))
    return any_of_block(shared_base(gl.to_tensor(0)) + IDLE_AT)


@jit
def _flow(M, I, E, J, prior, lane):
    """What flows through a block's first token, of a warp's elements: E · alpha M + E_I · alpha Ibar."""
    zero = prior * 0.0
    flow = (zero, zero, zero, zero)
    for j in gl.static_range(8):
        more = ()
        for k in gl.static_range(4):
            more += (flow[k] + M[j][k] * E[j][k] - (I[j][k] - prior) * J[j][k],)
        flow = more
    return sum_of_warp((flow[0] + flow[1]) + (flow[2] + flow[3]), lane)


@jit
def _put_state(p, V, sign, N: gl.constexpr):
    """A lane's elements to [p, n]."""
    for j in gl.static_range(8):
        store_global4(p + j * N, scaled(V[j], sign))


@jit
def segment_gradients(
    x, dt, beta, A, B, C, prior, doc, dy, starts, adjoints, rows, keys, changes, flows, dprior,
    x_b, x_t, x_h, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, B_b, B_t, B_g, C_b, C_t, C_g, dy_b, dy_t, dy_h,
    T, TP, H, HPG, NSEG, S, HAS_DOC: gl.constexpr,
):  # fmt: skip
    """All gradients of one segment, one head and 64 keys that its own tokens cause.

    x, beta, B, C and dy are int32 pairs, and their strides are in pairs; starts [b, h, TP / 16, p / 8, 2, n, p % 8]
    bfloat16, as pairs too. Slot k of adjoints [b, h, NSEG + 1, 2, p, n] becomes the adjoint of segment k's start.
    Of each half of the keys: rows [b, h, 2, 2, TP, p], d v and d beta; flows [2, b, h, TP, 4], d log alpha of a block's
    first token in parts, of which the first is NaN for others; changes [2, b, h, TP], by how much it grows from a token
    to the next; dprior [2, b, h, NSEG, 4]. keys [2, b, h, TP, n]: dB and dC, as pairs of bfloat16.
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
    p_changes = changes + ((half * n_bh + i_bh) * TP + t0)
    p_flows = flows + ((half * n_bh + i_bh) * TP + t0) * 4
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

    nothing = T >> 31  # zero, which the compiler cannot know
    n_blocks = gl.cdiv(steps, 16)
    zeros = (zero, zero, zero, zero)
    E = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    J = E
    dprior_sum = zero
    alpha_after = zero  # of the token after the block
    start = (n_blocks - 1) * 16
    copy_block(base, tid, p_x, p_beta, p_dy, p_B, p_C, x_t, beta_t, dy_t, B_t, C_t, start, steps)
    ahead = _load_start(p_starts + (start // 16 * (P * N) + o_start))
    put_scales(base, p_dt, p_doc, dt_t, b_A, b_prior, steps, before, tid, n_blocks * 16, HAS_DOC)
    barrier()
    put_block(base, base + ROWS_AT, base + SCALES_AT + start * 4, tid, steps - start)
    previous = gl.maximum(start - 16, 0)
    copy_block(base, tid, p_x, p_beta, p_dy, p_B, p_C, x_t, beta_t, dy_t, B_t, C_t, previous, steps)
    barrier()
    t = lane % 16
    for i_block in range(n_blocks):
        start = (n_blocks - 1 - i_block) * 16
        previous = gl.maximum(start - 16, 0)
        a_scales = base + SCALES_AT + start * 4
        a_rows = base + ROWS_AT + i_block % 2 * 12288
        first = load1(a_scales + 3072)
        r_end = load1(a_scales + 1084)
        a_c = a_scales + c * 8
        v_scales = (load1(a_c), load1(a_c + 4), load1(a_c + 32), load1(a_c + 36))
        u_scales = (load1(a_c + 1024), load1(a_c + 1028), load1(a_c + 1056), load1(a_c + 1060))
        M, I, worst = _state(ahead, a_pairs, a_tile, v_scales, u_scales, first, b_prior + zero, b_prior * r_end)
        outgrown = _outgrown(a_idle, r_end, worst)
        p_previous = p_starts + (previous // 16 * (P * N) + o_start)
        prefetch(p_previous)
        prefetch(p_previous + 512)
        gl.store(p_flows + (start + t) * 4, zero + float("nan"), mask=tid < 16)
        # one block of 16 tokens
        scale = gl.where(zero_int + outgrown == 0, alpha_after * reciprocal(r_end), 1.0)
        E = _times_all(E, scale)
        J = _times_all(J, scale)
        for i_token in range(16 - 16 * outgrown):
            M, I, E, J = token(
                M, I, E, J, 15 - i_token, base, a_rows + g * 32, a_keys, a_scales,
                p_outs + start * (N // 2), warp, lane, nothing,
            )  # fmt: skip
        flow = _flow(M, I, E, J, b_prior + zero, lane)
        gl.store(p_flows + (start * 4 + warp), flow, mask=lane == outgrown * 32)
        # blocks of four tokens
        for _ in range(outgrown):
            put_fours(base, a_scales, b_prior, tid)
            rescale(base, a_rows, a_scales, tid)
        for i_four in range(4 * outgrown):
            last = 15 - 4 * i_four
            p_start = p_starts + (start // 16 * (P * N) + o_start)
            v_scales, u_scales, kept = scales_of(a_scales, t, last - 3, last, lane, c)
            r_end = load1(a_scales + 1024 + last * 4)
            M_4, I_4, worst = _state(
                _load_start(p_start), a_pairs, a_tile, v_scales, u_scales, kept, b_prior + zero, b_prior * r_end
            )
            single = _outgrown(a_idle, r_end, worst)
            after = gl.where(zero_int + last == 15, alpha_after, load1(a_scales + 3076 + gl.minimum(last, 14) * 4))
            scale = gl.where(zero_int + single == 0, after * reciprocal(r_end), 1.0)
            E = _times_all(E, scale)
            J = _times_all(J, scale)
            for i_token in range(4 - 4 * single):
                M_4, I_4, E, J = token(
                    M_4, I_4, E, J, last - i_token, base, a_rows + g * 32, a_keys, a_scales,
                    p_outs + start * (N // 2), warp, lane, nothing,
                )  # fmt: skip
            flow = _flow(M_4, I_4, E, J, b_prior + zero, lane)
            gl.store(p_flows + ((start + last - 3) * 4 + warp), flow, mask=lane == single * 32)
            # or each of them a block
            for _ in range(single):
                put_ones(base, a_scales, last, tid)
                rescale(base, a_rows, a_scales, tid)
            for i_token in range(4 * single):
                t_k = last - i_token
                v_scales, u_scales, kept = scales_of(a_scales, t, t_k, t_k, lane, c)
                M_1, I_1, worst = _state(
                    _load_start(p_start), a_pairs, a_tile, v_scales, u_scales, kept, b_prior + zero, b_prior + zero
                )
                scale = gl.where(zero_int + t_k == 15, alpha_after, load1(a_scales + 3076 + gl.minimum(t_k, 14) * 4))
                E = _times_all(E, scale)
                J = _times_all(J, scale)
                M_1, I_1, E, J = token(
                    M_1, I_1, E, J, t_k, base, a_rows + g * 32, a_keys, a_scales,
                    p_outs + start * (N // 2), warp, lane, nothing,
                )  # fmt: skip
                flow = _flow(M_1, I_1, E, J, b_prior + zero, lane)
                gl.store(p_flows + ((start + t_k) * 4 + warp), flow, mask=lane == 0)
        ahead = _load_start(p_previous)
        last_token(base, p_outs + start * (N // 2), warp, lane)
        barrier()
        dprior_sum = add_up(
            base, a_rows, a_scales, warp, lane, b_prior, p_rows + start * P, p_changes + start, TP, dprior_sum
        )
        put_block(
            base, base + ROWS_AT + (i_block + 1) % 2 * 12288, base + SCALES_AT + previous * 4, tid, steps - previous
        )
        before_that = gl.maximum(start - 32, 0)
        copy_block(base, tid, p_x, p_beta, p_dy, p_B, p_C, x_t, beta_t, dy_t, B_t, C_t, before_that, steps)
        alpha_after = first
        barrier()
    wait_async(zero_int)  # no copy lands in shared memory after the program's end
    dprior_sum = sum_of_warp(dprior_sum, lane)
    p_dprior = dprior + (((half * n_bh + i_bh) * NSEG + i_seg) * 4 + warp)
    gl.store(p_dprior, -dprior_sum, mask=lane == 0)
    p_e = adjoints + ((i_bh * (NSEG + 1) + i_seg) * 2 * P * N + half * 64 + g * 8 * N + o_key)
    _put_state(p_e, E, alpha_after, N)
    _put_state(p_e + P * N, J, -alpha_after, N)
