"""The adjoints of the segments' starts (step 4 of `triton_scan.py`) for Hopper: states as in `hopper_scaled.py`.

With w what is left of the segment's start at a token, the adjoints of its M and Ibar add up

    E += w Z = C (w dy / c) / (I / c)        E_I -= w Z M / I

C (w dy / c) is one more product: C four times over, w dy / c in two parts and divided by four.

A program takes a segment, a head and 64 keys, a warp 16 value rows. What 16 tokens take is copied to shared memory
while those before are worked on, each word by the thread that makes operands of it.
"""

from .hopper_lanes import (
    barrier,
    beyond,
    copy_word,
    from_lane,
    gl,
    high,
    jit,
    load1,
    load1_bits,
    load2_bits,
    load4_bits,
    load_scalar,
    low,
    mma8,
    pack,
    reciprocal,
    shared_base,
    store1,
    store2_global,
    store4,
    twice,
    upper,
    wait_words,
)
from .hopper_scaled import load_block, prior_parts, scaled4, scales, store_keys, store_rows, update

# In shared memory, in bytes: for each of 16 tokens the keys' operands [1024], C [256], for each of four warps the rows'
# operands [512] and w dy / c [64]; then words of each of the 128 threads: 31 that are copied, and
TOKEN = gl.constexpr(3584)
C_AT = gl.constexpr(1024)
ROWS_AT = gl.constexpr(1280)
DY_AT = gl.constexpr(3328)
WORDS_AT = gl.constexpr(57344)
TID = gl.constexpr(15872)  # the thread's number
LAST_C = gl.constexpr(16384)  # c, q and what is left of the segment's start, before the next 16 tokens
LAST_Q = gl.constexpr(16896)
LEFT = gl.constexpr(17408)
RESCALE = gl.constexpr(17920)  # what rescales the state before the token that is the thread's number modulo 16
TIMES = gl.constexpr(18432)  # of thread 0: how often the state is rescaled once; of thread 1: how many tokens do


@jit
def _copy(
    tid, a_words, p_x, p_beta, p_dy, p_B, p_C, p_dt, p_doc, x_t, beta_t, dy_t, B_t, C_t, dt_t,
    start, steps, before, HAS_DOC: gl.constexpr,
):  # fmt: skip
    """Of the 16 tokens from `start`: x, beta and dy of two rows of four tokens, B and C of keys of two, dt, doc."""
    row = (tid >> 5) * 8 + (tid & 7)
    key = (tid >> 3 & 1) * 16 + (tid & 7) // 2
    for i in gl.static_range(4):
        o = gl.minimum(start + ((tid >> 3 & 3) + 4 * i), steps - 1)
        copy_word(a_words + 512 * i, p_x + (o * x_t + row))
        copy_word(a_words + 512 * (i + 4), p_beta + (o * beta_t + row))
        copy_word(a_words + 512 * (i + 8), p_dy + (o * dy_t + row))
    for i in gl.static_range(2):
        o = gl.minimum(start + ((tid >> 4) + 8 * i), steps - 1)
        p_b = p_B + (o * B_t + key)
        p_c = p_C + (o * C_t + key)
        for k in gl.static_range(4):
            copy_word(a_words + 512 * (4 * i + k + 12), p_b + 4 * k)
            copy_word(a_words + 512 * (4 * i + k + 20), p_c + 4 * k)
    o = gl.minimum(start + (tid & 15), steps - 1)
    copy_word(a_words + 512 * 28, p_dt + o * dt_t)
    if HAS_DOC:
        copy_word(a_words + 512 * 29, p_doc + o)
        copy_word(a_words + 512 * 30, p_doc + gl.maximum(o - 1, before))


@jit
def _keys(a_words, odd):
    """One of each pair of four copied words, as float32."""
    shift = 16 - 16 * odd
    return (
        ((load1_bits(a_words) << shift) & -65536).to(gl.float32, bitcast=True),
        ((load1_bits(a_words + 512) << shift) & -65536).to(gl.float32, bitcast=True),
        ((load1_bits(a_words + 1024) << shift) & -65536).to(gl.float32, bitcast=True),
        ((load1_bits(a_words + 1536) << shift) & -65536).to(gl.float32, bitcast=True),
    )


@jit
def _twice4(a_words, odd):
    """One of each pair of four copied words, twice."""
    return (
        twice(load1_bits(a_words), odd).to(gl.float32, bitcast=True),
        twice(load1_bits(a_words + 512), odd).to(gl.float32, bitcast=True),
        twice(load1_bits(a_words + 1024), odd).to(gl.float32, bitcast=True),
        twice(load1_bits(a_words + 1536), odd).to(gl.float32, bitcast=True),
    )


@jit
def _two_parts(v):
    """The first 16 bits of v, rounded, as a pair."""
    rest = beyond(v).to(gl.int32, bitcast=True) + 0x8000
    return upper(v, rest.to(gl.float32, bitcast=True))


@jit
def _store_dy(a_dy, dy, scale):
    """w dy / c of two rows, for a sum of four equal products."""
    store1(a_dy, _two_parts(low(dy) * scale))
    store1(a_dy + 4, _two_parts(high(dy) * scale))


@jit
def _pair(M, I, Cg, E, F, k: gl.constexpr, SHARED: gl.constexpr):
    """E and F = -E_I of one row and two keys, which share a reciprocal or do not."""
    if SHARED:
        r = reciprocal(I[k] * I[k + 2])
        r0 = I[k + 2] * r
        r1 = I[k] * r
    else:
        r0 = reciprocal(I[k])
        r1 = reciprocal(I[k + 2])
    z0 = Cg[k] * r0
    z1 = Cg[k + 2] * r1
    return E[k] + z0, E[k + 2] + z1, F[k] + z0 * (M[k] * r0), F[k + 2] + z1 * (M[k + 2] * r1)


@jit
def _fragment(M, I, C0, C1, dy, E, F, SHARED: gl.constexpr):
    """E and F of two rows and two keys."""
    zero = (C0 * 0).to(gl.float32)
    Cg = mma8(C0, C1, dy, (zero, zero, zero, zero))
    E0, E2, F0, F2 = _pair(M, I, Cg, E, F, 0, SHARED)
    E1, E3, F1, F3 = _pair(M, I, Cg, E, F, 1, SHARED)
    return (E0, E1, E2, E3), (F0, F1, F2, F3)


@jit
def _add(a_C, dy, M, I, E, F, SHARED: gl.constexpr):
    """E and F of 32 keys after a token; of the four fragments the first SHARED share reciprocals."""
    C = load4_bits(a_C)
    E0, F0 = _fragment(M[0], I[0], C[0], C[1], dy[0], E[0], F[0], SHARED > 0)
    E1, F1 = _fragment(M[1], I[1], C[0], C[1], dy[1], E[1], F[1], SHARED > 1)
    E2, F2 = _fragment(M[2], I[2], C[2], C[3], dy[0], E[2], F[2], SHARED > 2)
    E3, F3 = _fragment(M[3], I[3], C[2], C[3], dy[1], E[3], F[3], SHARED > 3)
    return (E0, E1, E2, E3), (F0, F1, F2, F3)


@jit
def _token(a_keys, a_C, a_rows, a_dy, M, I, E, F, SHARED: gl.constexpr):
    """A token's update and what it adds to the adjoints."""
    rows = load4_bits(a_rows)
    dy = load2_bits(a_dy)
    M0, I0 = update(a_keys, rows, M[0], I[0])
    M1, I1 = update(a_keys + 512, rows, M[1], I[1])
    E0, F0 = _add(a_C, dy, M0, I0, E[0], F[0], SHARED)
    E1, F1 = _add(a_C + 128, dy, M1, I1, E[1], F[1], SHARED)
    return (M0, M1), (I0, I1), (E0, E1), (F0, F1)


@jit
def _store_key(p, a, b, k: gl.constexpr, scale, prior):
    """Of one key."""
    store2_global(
        p,
        pack(a[k] * scale - prior, b[k] * scale - prior),
        pack(a[k + 1] * scale - prior, b[k + 1] * scale - prior),
    )


@jit
def _store_starts(p, V, scale, prior):
    """V scale - prior of 32 keys as pairs of rows, from the address of the lane's first key."""
    _store_key(p, V[0], V[1], 0, scale, prior)
    _store_key(p + 32, V[0], V[1], 2, scale, prior)
    _store_key(p + 64, V[2], V[3], 0, scale, prior)
    _store_key(p + 96, V[2], V[3], 2, scale, prior)


@jit
def _store_block(p, V):
    """A lane's part of 32 keys of an adjoint [p, n], from the address of the lane's first row and key."""
    for i in gl.static_range(4):
        p_v = p + (i % 2 * 128 + i // 2 * 16)
        gl.store(p_v, V[i][0])
        gl.store(p_v + 256, V[i][1])
        gl.store(p_v + 8, V[i][2])
        gl.store(p_v + 264, V[i][3])


@jit
def segment_adjoints(
    x, dt, beta, A, B, C, prior, dy, doc, segment_states, starts, adjoints,
    x_b, x_t, x_h, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, B_b, B_t, B_g, C_b, C_t, C_g, dy_b, dy_t, dy_h,
    T, TP, H, HPG, NSEG, S, HAS_DOC: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Slot k of adjoints [b, h, NSEG + 1, 2, p, n] = adjoint of segment k's start, from its own tokens.

    x, beta, B, C, dy as int32 pairs, their strides in pairs; segment_states [b, h, NSEG + 1, 2, p, n]. Also M and Ibar
    before every 16th token: starts [b, h, TP / 16, p / 8, 2, n, p % 8] bfloat16 as int32 pairs.
    """
    N: gl.constexpr = 128
    P: gl.constexpr = 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared = gl.allocate_shared_memory(gl.float32, [149, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tid = gl.arange(0, 128, layout=LAYOUT)
    zero_int = tid * 0
    zero = zero_int.to(gl.float32)
    base = shared_base(zero_int)
    a_scalars = shared_base(gl.to_tensor(0)) + WORDS_AT
    a_words = base + (WORDS_AT + tid * 4)
    half = gl.program_id(0)
    i_seg = gl.program_id(1).to(gl.int64)
    i_bh = gl.program_id(2).to(gl.int64)
    b = i_bh // H
    h = i_bh % H
    t0 = i_seg * S
    steps = gl.minimum(S, T - t0).to(gl.int32)
    before = gl.maximum(-1, -t0).to(gl.int32)  # the token before the segment, where there is one
    b_A = gl.load(A + h)
    b_prior = gl.load(prior + h)
    p_x = x + (b * x_b + h * x_h + t0 * x_t)
    p_beta = beta + (b * beta_b + h * beta_h + t0 * beta_t)
    p_dy = dy + (b * dy_b + h * dy_h + t0 * dy_t)
    p_B = B + (b * B_b + (h // HPG) * B_g + t0 * B_t + half * 32)
    p_C = C + (b * C_b + (h // HPG) * C_g + t0 * C_t + half * 32)
    p_dt = dt + (b * dt_b + h * dt_h + t0 * dt_t)
    p_doc = doc + (b * T + t0)
    _copy(
        tid, a_words, p_x, p_beta, p_dy, p_B, p_C, p_dt, p_doc, x_t, beta_t, dy_t, B_t, C_t, dt_t,
        0, steps, before, HAS_DOC,
    )  # fmt: skip

    i_state = (i_bh * (NSEG + 1) + i_seg) * (2 * P * N) + half * 64
    o_state = ((tid >> 5) * 16 + 4 * (tid & 3)) * N + (tid >> 2 & 7)
    p_s = segment_states + i_state + o_state
    M = (load_block(p_s, 8, 0.0), load_block(p_s + 32, 8, 0.0))
    p_s += P * N
    I = (load_block(p_s, 8, b_prior), load_block(p_s + 32, 8, b_prior))
    p_starts = starts + ((i_bh * (TP // 16) + i_seg * (S // 16)) * (P * N) + half * 256)
    zeros = (zero, zero, zero, zero)
    zeros = (zeros, zeros, zeros, zeros)
    E = (zeros, zeros)
    F = (zeros, zeros)
    shared.index(148).store(zero)  # there is no memory without a use of it
    store1(a_words + TID, tid.to(gl.float32, bitcast=True))
    store1(a_words + LAST_C, zero + 1.0)
    store1(a_words + LAST_Q, zero + b_prior)
    store1(a_words + LEFT, zero + 1.0)
    for start in range(0, steps, 16):
        tid = load1_bits(a_words + TID)  # what follows from it takes no register while tokens are added
        warp = tid >> 5
        lane = tid & 31
        g = lane >> 2
        c = lane & 3
        e = lane & 7
        last_c = load1(a_words + LAST_C)
        p = p_starts + (start * (P * N // 16) + (warp * 2 + c // 2) * (8 * N) + c % 2 * 2 + g * 4)
        _store_starts(p, M[0], last_c, 0.0)
        _store_starts(p + 128, M[1], last_c, 0.0)
        _store_starts(p + 4 * N, I[0], last_c, b_prior)
        _store_starts(p + (4 * N + 128), I[1], last_c, b_prior)

        wait_words(zero_int)
        within = start + (lane & 15) < steps
        b_dt = gl.where(within, load1(a_words + 512 * 28), 0.0)
        b_a = gl.exp(-b_A * b_dt)
        if HAS_DOC:
            b_a = gl.where(load1_bits(a_words + 512 * 29) == load1_bits(a_words + 512 * 30), b_a, 0.0)
        last_q = load1(a_words + LAST_Q)
        each, rescale, r, dq, last_c, last_q, kept = scales(b_a, last_c, last_q, b_prior, lane)
        left = load1(a_words + LEFT)
        v_scale = b_dt * r
        dy_scale = gl.where(within, left * kept * r * 0.25, 0.0)
        r = gl.where(within, r, 0.0)
        dq_0, dq_1 = prior_parts(dq, zero)
        store1(a_words + LAST_C, last_c)
        store1(a_words + LAST_Q, last_q)
        store1(a_words + LEFT, left * from_lane(kept, lane * 0 + 15))
        # Places in blocks of 512 bytes as in `hopper_read_out.py`, in which neither reads nor writes meet in a bank
        o_write = (e * 16, 128 + (e ^ 2) * 16, 256 + (e ^ 4) * 16, 384 + (e ^ 6) * 16)
        w = base + ((tid >> 4) * TOKEN + (tid >> 3 & 1) * 512)  # for each token two blocks of keys
        w_keys = (w + o_write[0], w + o_write[1], w + o_write[2], w + o_write[3])
        w_C = base + (C_AT + (tid >> 4) * TOKEN + (tid & 15) * 16)
        w = base + (ROWS_AT + (lane >> 3) * TOKEN + warp * 512)
        w_rows = (w + o_write[0], w + o_write[1], w + o_write[2], w + o_write[3])
        w_dy = base + (DY_AT + (lane >> 3) * TOKEN + warp * 64 + e * 8)
        store1(a_words + RESCALE, rescale)
        once = gl.where(each | (rescale == 1.0), 0.0, 1.0)
        store1(a_words + TIMES, gl.where(lane == 0, once, gl.where(each, 16.0, 0.0)))
        for i in gl.static_range(2):
            o = i * 8 * TOKEN
            store_keys(
                (w_keys[0] + o, w_keys[1] + o, w_keys[2] + o, w_keys[3] + o),
                _keys(a_words + 512 * (4 * i + 12), e & 1), zero + 1.0,
            )  # fmt: skip
            store4(w_C + o, _twice4(a_words + 512 * (4 * i + 20), e & 1))
        for i in gl.static_range(4):
            t = (lane >> 3) + 4 * i
            o = i * 4 * TOKEN
            store_rows(
                (w_rows[0] + o, w_rows[1] + o, w_rows[2] + o, w_rows[3] + o),
                (load1_bits(a_words + 512 * i), load1_bits(a_words + 512 * (i + 4))),
                from_lane(v_scale, t), from_lane(r, t), from_lane(dq_0, t), from_lane(dq_1, t), zero,
            )  # fmt: skip
            _store_dy(w_dy + o, load1_bits(a_words + 512 * (i + 8)), from_lane(dy_scale, t))
        _copy(
            tid, a_words, p_x, p_beta, p_dy, p_B, p_C, p_dt, p_doc, x_t, beta_t, dy_t, B_t, C_t, dt_t,
            gl.minimum(start + 16, steps - 1), steps, before, HAS_DOC,
        )  # fmt: skip
        barrier()
        o_read = c * 128 + (g ^ (2 * c)) * 16
        a_keys = base + o_read
        a_C = base + (C_AT + g * 16)
        a_rows = base + (ROWS_AT + warp * 512 + o_read)
        a_dy = base + (DY_AT + warp * 64 + g * 8)
        n_each = load_scalar(a_scalars + (TIMES + 4)).to(gl.int32)
        for i_t in range(n_each):
            factor = load_scalar(a_scalars + RESCALE + 4 * i_t)
            M = (scaled4(M[0], factor), scaled4(M[1], factor))
            I = (scaled4(I[0], factor), scaled4(I[1], factor))
            o = i_t * TOKEN
            M, I, E, F = _token(a_keys + o, a_C + o, a_rows + o, a_dy + o, M, I, E, F, SHARED)
        for _ in range(load_scalar(a_scalars + TIMES).to(gl.int32)):
            factor = load_scalar(a_scalars + RESCALE)
            M = (scaled4(M[0], factor), scaled4(M[1], factor))
            I = (scaled4(I[0], factor), scaled4(I[1], factor))
        for o in range(0, (16 - n_each) * TOKEN, TOKEN):
            M, I, E, F = _token(a_keys + o, a_C + o, a_rows + o, a_dy + o, M, I, E, F, SHARED)
        barrier()
    wait_words(zero_int)  # no copy lands in shared memory after the program's end
    p_e = adjoints + i_state + o_state
    _store_block(p_e, E[0])
    _store_block(p_e + 32, E[1])
    p_e += P * N
    F = (scaled4(F[0], -1.0), scaled4(F[1], -1.0))
    _store_block(p_e, F[0])
    _store_block(p_e + 32, F[1])
