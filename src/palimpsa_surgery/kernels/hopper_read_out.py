"""The read-out of `triton_scan.py` (step 3) for Hopper: states as in `hopper_scaled.py`, read out after each token.

A program takes a segment and a head, a warp 16 value rows and all keys. y errs by 1e-6 to 4e-6 before it is rounded: a
product cuts its sum off instead of rounding it.
"""

from .hopper_lanes import (
    barrier,
    from_lane,
    gl,
    high,
    jit,
    load4,
    load4_bits,
    load_scalar,
    low,
    pack,
    reciprocal,
    shared_base,
    store1,
    store4,
)
from .hopper_scaled import load_block, prior_parts, scaled4, scales, store_keys, store_rows, update

# In shared memory, in bytes: first the keys' operands [16 tokens, 2048], then C [16, 512], for each of four warps the
# rows' operands [16, 512], in whose place a token's sums over a lane's keys are left, and scalars.
C_AT = gl.constexpr(32768)
ROWS_AT = gl.constexpr(40960)
SCALARS_AT = gl.constexpr(73728)


@jit
def _keys_and_rows(p_x, p_beta, p_B, p_C, x_t, beta_t, B_t, C_t, start, steps, warp, lane):
    """Of the four tokens from `start`: B and C of a warp's token and a lane's four keys, x and beta of two rows."""
    o = gl.minimum(start + warp, steps - 1)
    p_b = p_B + (o * B_t + 2 * lane)
    p_c = p_C + (o * C_t + 2 * lane)
    keys = (gl.load(p_b), gl.load(p_b + 1), gl.load(p_c), gl.load(p_c + 1))
    o = gl.minimum(start + lane // 8, steps - 1)
    o_p = warp * 8 + lane % 8
    return keys, (gl.load(p_x + (o * x_t + o_p)), gl.load(p_beta + (o * beta_t + o_p)))


@jit
def _operands(
    p_x, p_beta, p_B, p_C, p_dt, p_doc, x_t, beta_t, B_t, C_t, dt_t,
    start, steps, before, warp, lane, HAS_DOC: gl.constexpr,
):  # fmt: skip
    """Of the 16 tokens from `start`: dt and 1 or, where a document begins, 0, one a lane; a lane's keys and rows."""
    o = gl.minimum(start + lane % 16, steps - 1)
    b_dt = gl.where(start + lane % 16 < steps, gl.load(p_dt + o * dt_t), 0.0)
    keep = (lane * 0).to(gl.float32) + 1.0
    if HAS_DOC:
        keep = gl.where(gl.load(p_doc + o) == gl.load(p_doc + gl.maximum(o - 1, before)), 1.0, 0.0)
    keys_0, rows_0 = _keys_and_rows(p_x, p_beta, p_B, p_C, x_t, beta_t, B_t, C_t, start, steps, warp, lane)
    keys_1, rows_1 = _keys_and_rows(p_x, p_beta, p_B, p_C, x_t, beta_t, B_t, C_t, start + 4, steps, warp, lane)
    keys_2, rows_2 = _keys_and_rows(p_x, p_beta, p_B, p_C, x_t, beta_t, B_t, C_t, start + 8, steps, warp, lane)
    keys_3, rows_3 = _keys_and_rows(p_x, p_beta, p_B, p_C, x_t, beta_t, B_t, C_t, start + 12, steps, warp, lane)
    return b_dt, keep, (keys_0, keys_1, keys_2, keys_3), (rows_0, rows_1, rows_2, rows_3)


@jit
def _pair(y, M, I, k: gl.constexpr, C0, C1):
    """y plus the read-out of two keys, which share a reciprocal."""
    return y + (M[k] * C0 * I[k + 2] + M[k + 2] * C1 * I[k]) * reciprocal(I[k] * I[k + 2])


@jit
def _read(a_C, M, I, y):
    """y of a lane's four rows plus the read-out of its four of 32 keys."""
    C = load4(a_C)
    return (
        _pair(_pair(y[0], M[0], I[0], 0, C[0], C[1]), M[2], I[2], 0, C[2], C[3]),
        _pair(_pair(y[1], M[1], I[1], 0, C[0], C[1]), M[3], I[3], 0, C[2], C[3]),
        _pair(_pair(y[2], M[0], I[0], 1, C[0], C[1]), M[2], I[2], 1, C[2], C[3]),
        _pair(_pair(y[3], M[1], I[1], 1, C[0], C[1]), M[3], I[3], 1, C[2], C[3]),
    )


@jit
def _token(a_keys, a_C, a_rows, M, I, zero):
    """A token's update and read-out; its sums over a lane's keys are left in place of the rows' operands."""
    rows = load4_bits(a_rows)
    y = (zero, zero, zero, zero)
    M0, I0 = update(a_keys, rows, M[0], I[0])
    M1, I1 = update(a_keys + 512, rows, M[1], I[1])
    y = _read(a_C, M0, I0, y)
    M2, I2 = update(a_keys + 1024, rows, M[2], I[2])
    y = _read(a_C + 128, M1, I1, y)
    M3, I3 = update(a_keys + 1536, rows, M[3], I[3])
    y = _read(a_C + 256, M2, I2, y)
    y = _read(a_C + 384, M3, I3, y)
    store4(a_rows, y)
    return (M0, M1, M2, M3), (I0, I1, I2, I3)


@jit
def _two_tokens(a_keys, a_C, a_rows, M, I, zero):
    """`_token` twice, where the second's update begins before the first is read out."""
    rows = load4_bits(a_rows)
    y = (zero, zero, zero, zero)
    M0, I0 = update(a_keys, rows, M[0], I[0])
    M1, I1 = update(a_keys + 512, rows, M[1], I[1])
    y = _read(a_C, M0, I0, y)
    M2, I2 = update(a_keys + 1024, rows, M[2], I[2])
    y = _read(a_C + 128, M1, I1, y)
    M3, I3 = update(a_keys + 1536, rows, M[3], I[3])
    y = _read(a_C + 256, M2, I2, y)
    rows = load4_bits(a_rows + 512)
    M0, I0 = update(a_keys + 2048, rows, M0, I0)
    y = _read(a_C + 384, M3, I3, y)
    M1, I1 = update(a_keys + 2560, rows, M1, I1)
    z = _read(a_C + 512, M0, I0, (zero, zero, zero, zero))
    store4(a_rows, y)
    M2, I2 = update(a_keys + 3072, rows, M2, I2)
    z = _read(a_C + 640, M1, I1, z)
    M3, I3 = update(a_keys + 3584, rows, M3, I3)
    z = _read(a_C + 768, M2, I2, z)
    z = _read(a_C + 896, M3, I3, z)
    store4(a_rows + 512, z)
    return (M0, M1, M2, M3), (I0, I1, I2, I3)


@jit
def _rescaled(V, factor):
    return (scaled4(V[0], factor), scaled4(V[1], factor), scaled4(V[2], factor), scaled4(V[3], factor))


@jit
def _start(p, initial):
    """All keys of a state [p, n], from the address of the lane's first row and key."""
    return (
        load_block(p, initial),
        load_block(p + 32, initial),
        load_block(p + 64, initial),
        load_block(p + 96, initial),
    )


@jit
def read_out(
    x, dt, beta, A, B, C, prior, skip, doc, states, y,
    x_b, x_t, x_h, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, B_b, B_t, B_g, C_b, C_t, C_g,
    T, H, HPG, NSEG, S, HAS_DOC: gl.constexpr, HAS_SKIP: gl.constexpr,
):  # fmt: skip
    """Step 3, `triton_forward.read_out`; x, beta, B, C and y are pairs, and their strides are in pairs."""
    N: gl.constexpr = 128
    P: gl.constexpr = 64
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared = gl.allocate_shared_memory(gl.float32, [147, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tid = gl.arange(0, 128, layout=LAYOUT)
    warp = tid // 32
    lane = tid % 32
    g = lane // 4
    c = lane % 4
    zero = (tid * 0).to(gl.float32)
    shared.index(144).store(zero)  # what is not used is not allocated
    base = shared_base(tid * 0)
    a_scalars = shared_base(gl.to_tensor(0)) + SCALARS_AT
    i_bh = gl.program_id(1).to(gl.int64)
    b = i_bh // H
    h = i_bh % H
    t0 = gl.program_id(0).to(gl.int64) * S
    steps = gl.minimum(S, T - t0).to(gl.int32)
    b_A = gl.load(A + h)
    b_prior = gl.load(prior + h)
    b_skip = gl.to_tensor(0.0)
    if HAS_SKIP:
        b_skip = gl.load(skip + h)
    p_x = x + (b * x_b + h * x_h + t0 * x_t)
    p_beta = beta + (b * beta_b + h * beta_h + t0 * beta_t)
    p_B = B + (b * B_b + (h // HPG) * B_g + t0 * B_t)
    p_C = C + (b * C_b + (h // HPG) * C_g + t0 * C_t)
    p_dt = dt + (b * dt_b + h * dt_h + t0 * dt_t)
    p_doc = doc + (b * T + t0)
    p_y = y + ((b * T + t0) * H + h) * (P // 2) + warp * 8 + 2 * c
    before = gl.maximum(-1, -t0).to(gl.int32)  # the token before the segment, where there is one

    # Blocks of 512 bytes hold 16 for each lane, in an order in which neither reads nor writes meet in a bank: `o_read`
    # is a lane's own place, `o_write` are the places that it prepares, of g = lane % 8 for c = 0 to 3.
    o_read = c * 128 + (g ^ (2 * c)) * 16
    o_write = (
        (lane % 8) * 16,
        128 + ((lane % 8) ^ 2) * 16,
        256 + ((lane % 8) ^ 4) * 16,
        384 + ((lane % 8) ^ 6) * 16,
    )
    a_keys = base + o_read
    a_C = base + C_AT + g * 16
    a_rows = base + ROWS_AT + warp * 8192 + o_read
    w_keys = base + warp * 2048 + lane // 8 * 512
    w_C = base + C_AT + warp * 512 + lane * 16
    w_rows = base + ROWS_AT + warp * 8192 + lane // 8 * 512
    a_sums = base + ROWS_AT + warp * 8192 + lane * 128  # of a token and four rows, from eight lanes

    p_s = states + (i_bh * (NSEG + 1) + gl.program_id(0)) * (2 * P * N) + ((warp * 16 + 4 * c) * N + 4 * g)
    M = _start(p_s, 0.0)
    I = _start(p_s + P * N, b_prior)
    b_c = zero + 1.0
    b_q = zero + b_prior
    ahead = _operands(
        p_x, p_beta, p_B, p_C, p_dt, p_doc, x_t, beta_t, B_t, C_t, dt_t, 0, steps, before, warp, lane, HAS_DOC
    )
    for start in range(0, steps, 16):
        b_dt, keep, keys, rows = ahead
        each, rescale, r, dq, b_c, b_q = scales(gl.exp(-b_A * b_dt) * keep, b_c, b_q, b_prior, lane)
        v_scale = b_dt * r
        r = gl.where(start + lane % 16 < steps, r, 0.0)
        dq_0, dq_1 = prior_parts(dq, zero)
        a = base + SCALARS_AT + tid * 4
        store1(a, rescale)
        store1(a + 512, gl.where(each, 16.0, 0.0))
        store1(a + 1024, gl.where(each | (rescale == 1.0), 0.0, 1.0))
        for i in gl.static_range(4):
            a = w_keys + i * 8192
            b0, b1, c0, c1 = keys[i]
            store_keys(
                (a + o_write[0], a + o_write[1], a + o_write[2], a + o_write[3]),
                (low(b0), high(b0), low(b1), high(b1)), zero + 1.0,
            )  # fmt: skip
            store4(w_C + i * 2048, (low(c0), high(c0), low(c1), high(c1)))
            a = w_rows + i * 2048
            t = lane // 8 + 4 * i
            store_rows(
                (a + o_write[0], a + o_write[1], a + o_write[2], a + o_write[3]), rows[i],
                from_lane(v_scale, t), from_lane(r, t), from_lane(dq_0, t), from_lane(dq_1, t), zero,
            )  # fmt: skip
        ahead = _operands(
            p_x, p_beta, p_B, p_C, p_dt, p_doc, x_t, beta_t, B_t, C_t, dt_t,
            gl.minimum(start + 16, steps - 1), steps, before, warp, lane, HAS_DOC,
        )  # fmt: skip
        barrier()
        n_each = load_scalar(a_scalars + 512).to(gl.int32)
        for i_t in range(n_each):
            factor = load_scalar(a_scalars + 4 * i_t)
            M = _rescaled(M, factor)
            I = _rescaled(I, factor)
            M, I = _token(a_keys + i_t * 2048, a_C + i_t * 512, a_rows + i_t * 512, M, I, zero)
        for _ in range(load_scalar(a_scalars + 1024).to(gl.int32)):  # of a branch, ptxas makes 128 idle instructions
            factor = load_scalar(a_scalars)
            M = _rescaled(M, factor)
            I = _rescaled(I, factor)
        for i_t in range(n_each, 16, 2):
            M, I = _two_tokens(a_keys + i_t * 2048, a_C + i_t * 512, a_rows + i_t * 512, M, I, zero)
        barrier()
        for i in gl.static_range(2):
            a = a_sums + i * 4096
            b_y = (zero, zero, zero, zero)
            for k in gl.static_range(8):
                v = load4(a + (k ^ (lane % 8)) * 16)
                b_y = (b_y[0] + v[0], b_y[1] + v[1], b_y[2] + v[2], b_y[3] + v[3])
            t = start + g + 8 * i
            if HAS_SKIP:
                p = p_x + (gl.minimum(t, steps - 1) * x_t + warp * 8 + 2 * c)
                x0 = gl.load(p)
                x1 = gl.load(p + 1)
                b_y = (
                    b_y[0] + b_skip * low(x0),
                    b_y[1] + b_skip * high(x0),
                    b_y[2] + b_skip * low(x1),
                    b_y[3] + b_skip * high(x1),
                )
            p = p_y + t * (H * (P // 2))
            gl.store(p, pack(b_y[0], b_y[1]), mask=t < steps)
            gl.store(p + 1, pack(b_y[2], b_y[3]), mask=t < steps)
        barrier()
