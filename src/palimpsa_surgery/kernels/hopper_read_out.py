"""The read-out of `triton_scan.py` (step 3) for Hopper, in Gluon: the same loop with explicit register layouts."""

from .hopper_lanes import gl, jit, reciprocal


@jit
def _decay(b_A, b_dt, p_doc, t, before, HAS_DOC: gl.constexpr):
    """alpha of a token, zero where a document begins, and the token's document."""
    b_a = gl.exp(-b_A * b_dt)
    b_doc = before
    if HAS_DOC:
        b_doc = gl.load(p_doc + t)
        b_a = gl.where(b_doc == before, b_a, 0.0)
    return b_a, b_doc


@jit
def read_out(
    x, dt, beta, A, B, C, prior, skip, doc, states, y,
    x_b, x_t, x_h, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, B_b, B_t, B_g, C_b, C_t, C_g,
    T, H, HPG, P, NSEG, S,
    BP: gl.constexpr, R: gl.constexpr, KC: gl.constexpr, HAS_DOC: gl.constexpr, HAS_SKIP: gl.constexpr,
):  # fmt: skip
    """Step 3: `triton_forward.read_out` with R value rows and KC of 64 keys a lane; two keys share a reciprocal.

    The next token's rows are loaded ahead.
    """
    N: gl.constexpr = 128
    W: gl.constexpr = 64
    KL: gl.constexpr = W // KC
    LM: gl.constexpr = gl.BlockedLayout([R, KC], [32 // KL, KL], [1, 1], [1, 0])
    i_p = gl.program_id(0)
    i_seg = gl.program_id(1).to(gl.int64)
    i_bh = gl.program_id(2).to(gl.int64)
    b = i_bh // H
    h = i_bh % H
    t0 = i_seg * S
    o_n = gl.arange(0, W, layout=gl.SliceLayout(0, LM))
    o_p = i_p * BP + gl.arange(0, BP, layout=gl.SliceLayout(1, LM))
    b_A = gl.load(A + h)
    b_prior = gl.load(prior + h)
    b_skip = gl.to_tensor(0.0)
    if HAS_SKIP:
        b_skip = gl.load(skip + h)
    p_x = x + b * x_b + h * x_h + t0 * x_t + o_p
    p_beta = beta + b * beta_b + h * beta_h + t0 * beta_t + o_p
    p_B = B + b * B_b + (h // HPG) * B_g + t0 * B_t + o_n
    p_C = C + b * C_b + (h // HPG) * C_g + t0 * C_t + o_n
    p_dt = dt + b * dt_b + h * dt_h + t0 * dt_t
    p_y = y + ((b * T + t0) * H + h) * P + o_p
    p_doc = doc + b * T + t0
    p_s = (states + (i_bh * (NSEG + 1) + i_seg) * 2 * P * N) + gl.expand_dims(o_p, 1) * N + gl.expand_dims(o_n, 0)
    b_Ma = gl.load(p_s)
    b_Mb = gl.load(p_s + W)
    b_Ia = gl.load(p_s + P * N) + b_prior
    b_Ib = gl.load(p_s + P * N + W) + b_prior
    before = gl.to_tensor(0)
    if HAS_DOC:
        before = gl.load(doc + b * T + gl.maximum(t0 - 1, 0))
    n_dt = gl.load(p_dt)
    n_x = gl.load(p_x)
    n_u = gl.load(p_beta)
    n_Ba = gl.load(p_B)
    n_Ca = gl.load(p_C)
    n_Bb = gl.load(p_B + W)
    n_Cb = gl.load(p_C + W)
    steps = gl.minimum(S, T - t0).to(gl.int32)
    for t in range(steps):
        b_a, before = _decay(b_A, n_dt, p_doc, t, before, HAS_DOC)
        b_x = n_x.to(gl.float32)
        b_v = gl.expand_dims(b_x * n_dt, 1)
        b_u = gl.expand_dims(n_u.to(gl.float32), 1)
        b_Ba = gl.expand_dims(n_Ba.to(gl.float32), 0)
        b_Ca = gl.expand_dims(n_Ca.to(gl.float32), 0)
        b_Bb = gl.expand_dims(n_Bb.to(gl.float32), 0)
        b_Cb = gl.expand_dims(n_Cb.to(gl.float32), 0)
        step = (t + 1 < steps).to(gl.int32)
        p_x += x_t * step
        p_beta += beta_t * step
        p_B += B_t * step
        p_C += C_t * step
        p_dt += dt_t * step
        n_dt = gl.load(p_dt)
        n_x = gl.load(p_x)
        n_u = gl.load(p_beta)
        n_Ba = gl.load(p_B)
        n_Ca = gl.load(p_C)
        n_Bb = gl.load(p_B + W)
        n_Cb = gl.load(p_C + W)
        b_c = b_prior - b_a * b_prior  # the prior does not decay
        b_Ma = b_a * b_Ma + b_v * b_Ba
        b_Ia = (b_a * b_Ia + b_c) + b_u * (b_Ba * b_Ba)
        b_Mb = b_a * b_Mb + b_v * b_Bb
        b_Ib = (b_a * b_Ib + b_c) + b_u * (b_Bb * b_Bb)
        b_y = gl.sum((b_Ma * b_Ca * b_Ib + b_Mb * b_Cb * b_Ia) * reciprocal(b_Ia * b_Ib), 1)
        if HAS_SKIP:
            b_y += b_skip * b_x
        gl.store(p_y, b_y.to(y.dtype.element_ty))
        p_y += H * P
