"""The kernels of the forward pass of `triton_scan.py`, in plain Triton: steps 1 to 3."""

from .triton_jit import jit, tl


@jit
def reciprocal(x, FAST: tl.constexpr):
    """1 / x; FAST: by the GPU's approximation."""
    if FAST:  # one instruction, 1 ulp
        r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        r = 1.0 / x
    return r


@jit
def segment_states(
    x, dt, beta, A, B, doc, states, decay, largest,
    x_b, x_t, x_h, x_p, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, beta_p, B_b, B_t, B_g,
    T, H, HPG, P, N, NSEG, S,
    BT: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr, HAS_DOC: tl.constexpr, HAS_LARGEST: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Slot k + 1 of states [b, h, NSEG + 1, 2, p, n] = what segment k adds; decay [b, h, NSEG] = what it keeps.

    HAS_LARGEST, of tiles that hold whole states: largest [2, b, h, NSEG S], the most that tokens write to an element,
    max_p x max_n B to M / dt and max_p beta max_n B² to Ibar.
    """
    # heads lie side by side in memory, so programs that run together take the same tokens of many heads
    NBN = tl.cdiv(N, BN)
    tiles = tl.cdiv(P, BP) * NBN
    i_tile = tl.program_id(0) % tiles
    i_p = i_tile // NBN
    i_n = i_tile % NBN
    i_bh = (tl.program_id(0) // tiles).to(tl.int64)
    i_seg = tl.program_id(1).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    o_t = tl.arange(0, BT)
    o_p = i_p * BP + tl.arange(0, BP)
    o_n = i_n * BN + tl.arange(0, BN)
    m_p = o_p < P
    m_n = o_n < N
    b_A = tl.load(A + h)
    t0 = i_seg * S
    time = tl.minimum(S, T - t0).to(tl.int32)
    end = t0 + time - 1  # tokens are taken from the last to the first
    p_x = x + b * x_b + h * x_h + end * x_t
    p_beta = beta + b * beta_b + h * beta_h + end * beta_t
    p_B = B + b * B_b + (h // HPG) * B_g + end * B_t
    p_dt = dt + b * dt_b + h * dt_h + end * dt_t
    p_doc = doc + b * T + end
    o_x = o_p[:, None] * x_p - o_t[None, :] * x_t
    o_beta = o_p[:, None] * beta_p - o_t[None, :] * beta_t
    o_B = o_n[None, :] - o_t[:, None] * B_t
    b_M = tl.zeros([BP, BN], tl.float32)
    b_I = tl.zeros([BP, BN], tl.float32)
    b_sum = 0.0  # log decay from the tokens still to come to the segment's end
    b_last = 0
    if HAS_DOC:
        b_last = tl.load(p_doc)
    for start in range(0, time, BT):
        m_t = start + o_t < time
        b_dt = tl.load(p_dt - o_t * dt_t, mask=m_t, other=0.0)  # [BT]
        # decay from token to the segment's end, over the later tokens alone: the token's own may be larger by far
        b_later = tl.load(p_dt - (o_t - 1) * dt_t, mask=m_t & (o_t > 0), other=0.0)
        b_w = tl.exp(tl.cumsum(-b_A * b_later, 0) + b_sum)
        b_sum -= b_A * tl.sum(b_dt, 0)
        if HAS_DOC:
            b_w = tl.where(tl.load(p_doc - o_t, mask=m_t, other=-1) == b_last, b_w, 0.0)
            p_doc -= BT
        b_x = tl.load(p_x + o_x, mask=m_p[:, None] & m_t[None, :], other=0.0)  # [BP, BT]
        b_beta = tl.load(p_beta + o_beta, mask=m_p[:, None] & m_t[None, :], other=0.0)
        b_B = tl.load(p_B + o_B, mask=m_t[:, None] & m_n[None, :], other=0.0)  # [BT, BN]
        b_Bf = b_B.to(tl.float32)
        if HAS_LARGEST:
            p_largest = largest + i_bh * NSEG * S + end - start - o_t
            b_most = tl.max(tl.abs(b_Bf), 1)
            tl.store(p_largest, tl.max(tl.abs(b_x.to(tl.float32)), 0) * b_most, mask=m_t)
            p_largest += tl.num_programs(0).to(tl.int64) // tiles * NSEG * S
            tl.store(p_largest, tl.max(tl.abs(b_beta.to(tl.float32)), 0) * b_most * b_most, mask=m_t)
        b_v = (b_x.to(tl.float32) * (b_dt * b_w)[None, :]).to(DOT)
        b_u = (b_beta.to(tl.float32) * b_w[None, :]).to(DOT)
        b_M = tl.dot(b_v, b_B.to(DOT), acc=b_M, input_precision=PRECISION)
        b_I = tl.dot(b_u, (b_Bf * b_Bf).to(DOT), acc=b_I, input_precision=PRECISION)
        p_x -= BT * x_t
        p_beta -= BT * beta_t
        p_B -= BT * B_t
        p_dt -= BT * dt_t
    p_s = states + (i_bh * (NSEG + 1) + i_seg + 1) * 2 * P * N + o_p[:, None] * N + o_n[None, :]
    m_s = m_p[:, None] & m_n[None, :]
    tl.store(p_s, b_M, mask=m_s)
    tl.store(p_s + P * N, b_I, mask=m_s)
    if i_tile == 0:
        b_keep = tl.exp(b_sum)
        if HAS_DOC:
            b_keep = tl.where(tl.load(doc + b * T + tl.maximum(t0 - 1, 0)) == b_last, b_keep, 0.0)
        tl.store(decay + i_bh * NSEG + i_seg, b_keep)


@jit
def pass_states(
    states, decay, NSEG, SIZE, BLOCK: tl.constexpr, AHEAD: tl.constexpr, REVERSE: tl.constexpr, ZERO: tl.constexpr
):
    """In place over slots of states [b, h, NSEG + 1, SIZE]: s[k + 1] += decay[k] s[k]; reversed, k and k + 1 swap.

    ZERO: begin with zero, written too, instead of what the first slot holds.
    """
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i_bh = tl.program_id(1).to(tl.int64)
    m = o < SIZE
    p = states + i_bh * (NSEG + 1) * SIZE + o
    p_decay = decay + i_bh * NSEG
    last = i_bh * 0 + NSEG - 1
    step = SIZE
    sign = 1
    if REVERSE:
        p += (last + 1) * SIZE
        p_decay += last
        step = -SIZE
        sign = -1
    if ZERO:
        b_s = tl.zeros([BLOCK], tl.float32)
        tl.store(p, b_s, mask=m)
    else:
        b_s = tl.load(p, mask=m, other=0.0)
    for k in range(0, NSEG, AHEAD):
        slots = ()  # loads in flight: the loop waits for memory, not for arithmetic
        for i in tl.static_range(AHEAD):
            slots += (tl.load(p + (i + 1) * step, mask=m & (o * 0 + k + i <= last), other=0.0),)
        for i in tl.static_range(AHEAD):
            b_s = slots[i] + tl.load(p_decay + sign * tl.minimum(k + i, last)) * b_s
            tl.store(p + (i + 1) * step, b_s, mask=m & (o * 0 + k + i <= last))
        p += AHEAD * step


@jit
def read_out(
    x, dt, beta, A, B, C, prior, skip, doc, states, y, variance,
    x_b, x_t, x_h, x_p, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, beta_p, B_b, B_t, B_g, C_b, C_t, C_g,
    T, H, HPG, P, N, NSEG, S,
    BP: tl.constexpr, BN: tl.constexpr, HAS_DOC: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_VAR: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """y, with skip * x, and variance [b, t, h, p] of one segment, from the state at its start; BN = N rounded up."""
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
    b_skip = 0.0
    if HAS_SKIP:
        b_skip = tl.load(skip + h)
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
        b_x = tl.load(p_x, mask=m_p, other=0.0).to(tl.float32)
        b_v = b_x * b_dt
        b_u = tl.load(p_beta, mask=m_p, other=0.0).to(tl.float32)
        b_B = tl.load(p_B, mask=m_n, other=0.0).to(tl.float32)
        b_C = tl.load(p_C, mask=m_n, other=0.0).to(tl.float32)
        b_M = b_a * b_M + b_v[:, None] * b_B[None, :]
        # the prior does not decay
        b_I = (b_a * b_I + (1.0 - b_a) * b_prior) + b_u[:, None] * (b_B * b_B)[None, :]
        b_r = b_C[None, :] * reciprocal(b_I, FAST)
        b_y = tl.sum(b_M * b_r, 1)
        if HAS_SKIP:
            b_y += b_skip * b_x
        tl.store(p_y, b_y.to(y.dtype.element_ty), mask=m_p)
        if HAS_VAR:
            tl.store(p_var, tl.sum(b_C[None, :] * b_r, 1), mask=m_p)
            p_var += H * P
        p_x += x_t
        p_beta += beta_t
        p_B += B_t
        p_C += C_t
        p_dt += dt_t
        p_y += H * P
