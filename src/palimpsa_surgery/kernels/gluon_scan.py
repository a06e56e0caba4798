"""The gradient kernel of `triton_scan.py` (step 5) with explicit register layouts, in Gluon, for P % 16 = 0, N = 128.

Same algebra, same letters. A program holds one head and one segment: 4 warps of 32 keys each, all value rows. Tiles
are `[n = 128, t = 16]` in the layout of `mma.sync` m16n8k16 accumulators, chosen so that no tile ever moves between
lanes: an accumulator is bit for bit the first operand of the next product (M = Bᵀ A, then W = Z Dᵀ), and the second
operands, 16 × 16 and the same for all warps, are built where they are needed from D and one value row. Only sums
over n cross lanes, once for each row. Adjoints and starting states of the rows lie in global memory, private to the
program, and stay in L2; each row's are loaded one row ahead.
"""

try:
    import triton.experimental.gluon.language as gl
    from triton.experimental import gluon
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

    jit = gluon.jit
    # names differ between Triton 3.6 to 3.8 and 3.9
    _barrier = getattr(gl, "thread_barrier", None) or gl.barrier
    _copy_to_shared = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
    AVAILABLE = True
except (ImportError, AttributeError):  # no triton, or a version whose Gluon differs: the portable kernels run
    from types import SimpleNamespace

    gl, AVAILABLE = SimpleNamespace(constexpr=None), False

    def jit(function):
        """Leave the kernels as plain functions."""
        return function


# The dimensions that these kernels are built for, those of every released Mamba2: 4 warps of 32 keys, and adjoints
# of 64 rows that leave room for two programs in a multiprocessor's shared memory.
HEAD_DIM, STATE_SIZE = 64, 128
NUM_WARPS = 4


if AVAILABLE and hasattr(gl.shared_memory_descriptor, "reinterpret"):  # Triton 3.9

    @jit
    def _view(shared, shape: gl.constexpr, layout: gl.constexpr):
        return shared.reinterpret(gl.float32, shape, layout)

else:

    @jit
    def _view(shared, shape: gl.constexpr, layout: gl.constexpr):
        return shared._reinterpret(gl.float32, shape, layout)


@jit
def _reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@jit
def _lane_xor_16(x):
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 16, 0x1f, 0xffffffff;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@jit
def _lane_xor_8(x):
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 8, 0x1f, 0xffffffff;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@jit
def _lane_xor_4(x):
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 4, 0x1f, 0xffffffff;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
    )


@jit
def _lane_sums(x, NW: gl.constexpr):
    """[128 n, 16 t] to [NW warps, 8 lane rows, 16 t]: sums over the n that a lane holds."""
    x = gl.reshape(x, [8 // NW, NW, 2, 8, 16])  # n = 16 (NW a + warp) + 8 b + lane row
    x = gl.reshape(gl.permute(x, (1, 3, 4, 0, 2)), [NW, 8, 16, 16 // NW])
    return gl.sum(x, 3)


@jit
def _columns(x, NW: gl.constexpr, LF: gl.constexpr):
    """[NW, 8, 16 t] to the four registers of a lane, each [NW, 8, 4]: t = 2 c + par + 8 hi as x[hi][par]."""
    x = gl.reshape(x, [NW, 8, 2, 4, 2])
    even, odd = gl.split(x)
    e0, e1 = gl.split(gl.permute(even, (0, 1, 3, 2)))
    o0, o1 = gl.split(gl.permute(odd, (0, 1, 3, 2)))
    return (
        gl.convert_layout(e0, LF, assert_trivial=True),
        gl.convert_layout(o0, LF, assert_trivial=True),
        gl.convert_layout(e1, LF, assert_trivial=True),
        gl.convert_layout(o1, LF, assert_trivial=True),
    )


@jit
def _exchange(a, b, upper):
    """The two halves of a butterfly step: what a lane keeps and what it gives away."""
    return gl.where(upper, b, a), gl.where(upper, a, b)


@jit
def _sum_over_lanes(a, b, g, NW: gl.constexpr, LF: gl.constexpr):
    """Sum a and b [NW, 8, 16 t] over the lane rows g; row g gets t = 2 c + (g & 1) + 4 (g & 2) of b if g & 4 else a."""
    a00, a01, a10, a11 = _columns(a, NW, LF)
    b00, b01, b10, b11 = _columns(b, NW, LF)
    up = (g & 4) != 0
    k00, s00 = _exchange(a00, b00, up)
    k01, s01 = _exchange(a01, b01, up)
    k10, s10 = _exchange(a10, b10, up)
    k11, s11 = _exchange(a11, b11, up)
    k00 += _lane_xor_16(s00)
    k01 += _lane_xor_16(s01)
    k10 += _lane_xor_16(s10)
    k11 += _lane_xor_16(s11)
    up = (g & 2) != 0
    k0, s0 = _exchange(k00, k10, up)
    k1, s1 = _exchange(k01, k11, up)
    k0 += _lane_xor_8(s0)
    k1 += _lane_xor_8(s1)
    k, s = _exchange(k0, k1, (g & 1) != 0)
    return k + _lane_xor_4(s)


@jit
def _first_column(x, LX: gl.constexpr):
    """[128, 16] to [128, 4] with column 0 in the first lane of four (the others hold columns 2, 4, 6)."""
    x = gl.reshape(x, [128, 2, 4, 2])
    even, _ = gl.split(x)
    first, _ = gl.split(gl.permute(even, (0, 2, 1)))
    return gl.convert_layout(first, LX, assert_trivial=True)


@jit
def _row_by_lane(x, LG: gl.constexpr):
    """[128 n, 4 c] to [lane, its four n]."""
    x = gl.permute(gl.reshape(x, [2, 4, 2, 8, 4]), (1, 3, 4, 0, 2))
    return gl.convert_layout(gl.reshape(x, [128, 4]), LG)


@jit
def _rows_by_lane(x, LGP: gl.constexpr):
    """[128 n, 16 p] to [lane row and p, its four n]."""
    x = gl.permute(gl.reshape(x, [2, 4, 2, 8, 16]), (1, 3, 4, 0, 2))
    return gl.convert_layout(gl.reshape(x, [512, 4]), LGP)


@jit
def _keys(p_B, t, T, B_t, NW: gl.constexpr, mma: gl.constexpr):
    """B or C [t, n] of 16 tokens as [128 n, 16 t] in the accumulators' layout, zero past the end."""
    LB: gl.constexpr = gl.BlockedLayout([1, 16 // NW * 2], [NW // 2, 64 // NW], [NW, 1], [1, 0])
    o_t = t + gl.expand_dims(gl.arange(0, 16, layout=gl.SliceLayout(1, LB)), 1)
    o_n = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, LB)), 0)
    b_B = gl.load(p_B + o_t * B_t + o_n, mask=o_t < T, other=0.0)
    return gl.convert_layout(gl.permute(b_B, (1, 0)), mma)


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
    x, dt, beta, A, B, C, prior, doc, states, y,
    x_b, x_t, x_h, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, B_b, B_t, B_g, C_b, C_t, C_g,
    T, H, HPG, P, NSEG, S,
    BP: gl.constexpr, R: gl.constexpr, KC: gl.constexpr, HAS_DOC: gl.constexpr,
):  # fmt: skip
    """Step 3: `_read_out` with R value rows and KC of 64 keys a lane; two keys share a reciprocal.

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
        b_v = gl.expand_dims(n_x.to(gl.float32) * n_dt, 1)
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
        b_y = gl.sum((b_Ma * b_Ca * b_Ib + b_Mb * b_Cb * b_Ia) * _reciprocal(b_Ia * b_Ib), 1)
        gl.store(p_y, b_y.to(y.dtype.element_ty))
        p_y += H * P


@jit
def segment_adjoints(
    x, dt, beta, A, B, C, prior, dy, doc, states, adjoints,
    x_b, x_t, x_h, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, B_b, B_t, B_g, C_b, C_t, C_g, dy_b, dy_t, dy_h,
    T, H, HPG, P, NSEG, S,
    BP: gl.constexpr, R: gl.constexpr, KC: gl.constexpr, HAS_DOC: gl.constexpr,
):  # fmt: skip
    """Step 4: `_segment_adjoints` with R value rows and KC keys a lane, the next token's rows loaded ahead."""
    N: gl.constexpr = 128
    KL: gl.constexpr = N // KC
    LM: gl.constexpr = gl.BlockedLayout([R, KC], [32 // KL, KL], [1, 1], [1, 0])
    i_p = gl.program_id(0)
    i_seg = gl.program_id(1).to(gl.int64)
    i_bh = gl.program_id(2).to(gl.int64)
    b = i_bh // H
    h = i_bh % H
    t0 = i_seg * S
    o_n = gl.arange(0, N, layout=gl.SliceLayout(0, LM))
    o_p = i_p * BP + gl.arange(0, BP, layout=gl.SliceLayout(1, LM))
    b_A = gl.load(A + h)
    b_prior = gl.load(prior + h)
    p_x = x + b * x_b + h * x_h + t0 * x_t + o_p
    p_beta = beta + b * beta_b + h * beta_h + t0 * beta_t + o_p
    p_dy = dy + b * dy_b + h * dy_h + t0 * dy_t + o_p
    p_B = B + b * B_b + (h // HPG) * B_g + t0 * B_t + o_n
    p_C = C + b * C_b + (h // HPG) * C_g + t0 * C_t + o_n
    p_dt = dt + b * dt_b + h * dt_h + t0 * dt_t
    p_doc = doc + b * T + t0
    o_s = (i_bh * (NSEG + 1) + i_seg) * 2 * P * N + gl.expand_dims(o_p, 1) * N + gl.expand_dims(o_n, 0)
    b_M = gl.load(states + o_s)
    b_I = gl.load(states + P * N + o_s) + b_prior
    b_E = gl.zeros([BP, N], gl.float32, LM)
    b_EI = gl.zeros([BP, N], gl.float32, LM)
    before = gl.to_tensor(0)
    if HAS_DOC:
        before = gl.load(doc + b * T + gl.maximum(t0 - 1, 0))
    b_w = 1.0
    n_dt = gl.load(p_dt)
    n_x = gl.load(p_x)
    n_u = gl.load(p_beta)
    n_dy = gl.load(p_dy)
    n_B = gl.load(p_B)
    n_C = gl.load(p_C)
    steps = gl.minimum(S, T - t0).to(gl.int32)
    for t in range(steps):
        b_a, before = _decay(b_A, n_dt, p_doc, t, before, HAS_DOC)
        b_w *= b_a  # decay since the segment's start
        b_v = gl.expand_dims(n_x.to(gl.float32) * n_dt, 1)
        b_u = gl.expand_dims(n_u.to(gl.float32), 1)
        b_dy = gl.expand_dims(n_dy.to(gl.float32) * b_w, 1)
        b_B = gl.expand_dims(n_B.to(gl.float32), 0)
        b_C = gl.expand_dims(n_C.to(gl.float32), 0)
        step = (t + 1 < steps).to(gl.int32)
        p_x += x_t * step
        p_beta += beta_t * step
        p_dy += dy_t * step
        p_B += B_t * step
        p_C += C_t * step
        p_dt += dt_t * step
        n_dt = gl.load(p_dt)
        n_x = gl.load(p_x)
        n_u = gl.load(p_beta)
        n_dy = gl.load(p_dy)
        n_B = gl.load(p_B)
        n_C = gl.load(p_C)
        b_M = b_a * b_M + b_v * b_B
        b_I = (b_a * b_I + (b_prior - b_a * b_prior)) + b_u * (b_B * b_B)
        b_inverse = _reciprocal(b_I)
        b_Z = b_dy * (b_C * b_inverse)
        b_E += b_Z
        b_EI -= b_Z * (b_M * b_inverse)
    gl.store(adjoints + o_s, b_E)
    gl.store(adjoints + P * N + o_s, b_EI)


@jit
def segment_gradients(
    x, v, beta, dy, log_alpha, dt, A, B, C, prior, doc, states, adjoints, starts, ends, parts,
    dx, dbeta, ddt, dB, dC, dA, dprior,
    x_b, x_t, x_h, dt_b, dt_t, dt_h, B_b, B_t, B_g, C_b, C_t, C_g, g_b, g_t, g_h, ddt_b, ddt_t, ddt_h,
    T, TP, H, HPG, NSEG, TILES,
    S: gl.constexpr, P: gl.constexpr, NW: gl.constexpr, HAS_DOC: gl.constexpr,
):  # fmt: skip
    """All gradients of one segment and one head at a time, sub-chunk by sub-chunk from the last.

    v = dt x, beta and dy are float32 [b, h, p, TP], log_alpha is [b, h, TP], doc [b, TP], TP = NSEG S, padded with
    zeros (doc: with its last value). Slot k + 1 of adjoints is the adjoint after segment k. starts
    [programs, S / 16, 2, p, n], ends [programs, 2, p, n] and parts [programs, p, NW, 32] are scratch: the programs
    share the TILES = b h NSEG segments out among them. x is in its own strides, dx and dbeta in strides g_*. dB, dC
    [b, h, TP, n], dA and dprior [b, h, NSEG] are partial results.
    """
    N: gl.constexpr = 128
    L: gl.constexpr = 16
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [NW, 1], [16, 8])
    LA: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    LBO: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    LN: gl.constexpr = gl.SliceLayout(1, mma)
    LT: gl.constexpr = gl.SliceLayout(0, mma)
    LK: gl.constexpr = gl.SliceLayout(1, LBO)
    LC: gl.constexpr = gl.SliceLayout(0, LBO)
    LF: gl.constexpr = gl.DistributedLinearLayout(
        [], [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [[1, 0, 0], [2, 0, 0]], [], [NW, 8, 4]
    )
    LX: gl.constexpr = gl.DistributedLinearLayout(
        [[8, 0], [64, 0]], [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [N, 4]
    )
    LP: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [NW, 1], [1, 0])  # [p, t]
    LO: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, NW], [0, 1])  # [p, t], p contiguous
    # "Lane order": rows of 128 n with the four n of a lane (0, 8, 64, 72) side by side, for 16-byte accesses
    SN: gl.constexpr = gl.SharedLinearLayout([[8], [64], [1], [2], [4], [16], [32]])
    SR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LR: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [NW, 1], [1, 0])  # [row, place in lane order]
    LG: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [NW, 1], [1, 0])  # [lane, its n] of one row
    LGP: gl.constexpr = gl.DistributedLinearLayout(  # [lane row and p, its n] of 16 rows
        [[0, 1], [0, 2], [1, 0], [8, 0]],
        [[2, 0], [4, 0], [16, 0], [32, 0], [64, 0]],
        [[128, 0], [256, 0]],
        [],
        [512, 4],
    )
    # The same for the t of a lane (0, 1, 8, 9)
    ST: gl.constexpr = gl.SharedLinearLayout([[1], [8], [2], [4]])
    SPT: gl.constexpr = gl.SharedLinearLayout(
        [[0, 1], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [8, 0], [16, 0], [32, 0]]
    )
    s_E = gl.allocate_shared_memory(gl.float32, [2 * P, N], SN)
    s_start = gl.allocate_shared_memory(gl.float32, [64, N], SN)
    s_rows = gl.allocate_shared_memory(gl.float32, [3, P, L], SPT)
    s_E_tiles = _view(s_E, [2 * P // 32, 32, N], SR)
    s_start_tiles = _view(s_start, [2, 32, N], SR)
    s_rows_t = _view(s_rows, [3 * P, L], ST)

    o_n = gl.arange(0, N, layout=LN)
    o_t = gl.arange(0, L, layout=LT)
    o_k = gl.arange(0, L, layout=LK)
    o_c = gl.arange(0, L, layout=LC)
    kk = gl.expand_dims(o_k, 1)
    cc = gl.expand_dims(o_c, 0)
    g3 = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LF))), 0), 2)
    w3 = gl.expand_dims(gl.expand_dims(gl.arange(0, NW, layout=gl.SliceLayout(1, gl.SliceLayout(2, LF))), 1), 2)
    c3 = gl.expand_dims(gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, LF))), 0), 1)
    g3 = g3 + 0 * (w3 + c3)
    o_part = (w3 * 8 + g3) * 4 + c3
    o_x = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(1, LX)), 1)
    first_lane = (gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, LX)), 0) + 0 * o_x) == 0
    o_x = o_x + gl.zeros([N, 4], gl.int32, LX)
    nn = gl.expand_dims(o_n, 1)
    tt = gl.expand_dims(o_t, 0)
    pp = gl.expand_dims(gl.arange(0, P, layout=gl.SliceLayout(1, LP)), 1)
    pt = gl.arange(0, L, layout=gl.SliceLayout(0, LP))
    ptt = gl.expand_dims(pt, 0)
    o_sum = pp * (NW * 32) + ((ptt // 8) * 2 + ptt % 2) * 4 + (ptt % 8) // 2
    op = gl.expand_dims(gl.arange(0, P, layout=gl.SliceLayout(1, LO)), 1)
    ot = gl.expand_dims(gl.arange(0, L, layout=gl.SliceLayout(0, LO)), 0)
    o_s = tt * N + nn
    e_row = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(1, LR)), 1) * N
    e_place = gl.expand_dims(gl.arange(0, N, layout=gl.SliceLayout(0, LR)), 0)
    o_e = e_row + e_place
    # from a place in lane order to its n
    e_n = (e_place & 1) * 8 + (e_place & 2) * 32 + ((e_place >> 2) & 7) + ((e_place >> 5) & 3) * 16
    o_natural = e_row + e_n
    g_lane = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, LG)), 1)
    g_r = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, LG)), 0)
    o_lane = (g_lane // 4) * 4 + g_r
    first_of_four = (g_lane % 4 + 0 * g_r) == 0
    gp = gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(1, LGP)), 1)
    gp_r = gl.expand_dims(gl.arange(0, 4, layout=gl.SliceLayout(0, LGP)), 0)
    o_lanes = (gp % 16) * N + (gp // 16) * 4 + gp_r
    zero = gl.zeros([N, L], gl.float32, mma)
    program = gl.program_id(0).to(gl.int64)
    p_part = parts + program * P * NW * 32
    p_E = ends + program * 2 * P * N
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        i_seg = (tile % NSEG).to(gl.int64)
        i_bh = (tile // NSEG).to(gl.int64)
        b = i_bh // H
        h = i_bh % H
        b_A = gl.load(A + h)
        b_prior = gl.load(prior + h)
        t0 = i_seg * S
        p_B = B + b * B_b + (h // HPG) * B_g
        p_C = C + b * C_b + (h // HPG) * C_g
        p_doc = doc + b * TP
        p_log = log_alpha + i_bh * TP
        p_v = v + i_bh * P * TP
        p_beta = beta + i_bh * P * TP
        p_dy = dy + i_bh * P * TP
        p_seg = states + (i_bh * (NSEG + 1) + i_seg) * 2 * P * N
        p_end = adjoints + (i_bh * (NSEG + 1) + i_seg + 1) * 2 * P * N

        n_sub = gl.cdiv(gl.minimum(S, T - t0), L)
        # Adjoints after the segment, into lane order; with the state there, Σ_pn (E_M M + E_I Ibar)
        e_phi = gl.zeros([32, N], gl.float32, LR)
        for q in gl.static_range(2 * P // 32):
            b_e = gl.load(p_end + q * 32 * N + o_natural)
            gl.store(p_E + q * 32 * N + o_e, b_e)
            e_phi += b_e * gl.load(p_seg + (2 * P + q * 32) * N + o_natural)
        phi_end = gl.sum(gl.sum(e_phi, 1), 0)
        # States at the sub-chunks' starts, in [n, p] tiles of 16 rows
        m0 = gl.load(p_seg + o_s)
        m1 = gl.load(p_seg + 16 * N + o_s)
        m2 = gl.load(p_seg + 32 * N + o_s)
        m3 = gl.load(p_seg + 48 * N + o_s)
        i0 = gl.load(p_seg + P * N + o_s)
        i1 = gl.load(p_seg + (P + 16) * N + o_s)
        i2 = gl.load(p_seg + (P + 32) * N + o_s)
        i3 = gl.load(p_seg + (P + 48) * N + o_s)
        b_before = 0
        if HAS_DOC:
            b_before = gl.load(p_doc + gl.maximum(t0 - 1, 0))
        for j in range(n_sub):
            p_start = starts + (program * (S // L) + j) * 2 * P * N
            gl.store(p_start + o_lanes, _rows_by_lane(m0, LGP))
            gl.store(p_start + 16 * N + o_lanes, _rows_by_lane(m1, LGP))
            gl.store(p_start + 32 * N + o_lanes, _rows_by_lane(m2, LGP))
            gl.store(p_start + 48 * N + o_lanes, _rows_by_lane(m3, LGP))
            gl.store(p_start + P * N + o_lanes, _rows_by_lane(i0, LGP))
            gl.store(p_start + (P + 16) * N + o_lanes, _rows_by_lane(i1, LGP))
            gl.store(p_start + (P + 32) * N + o_lanes, _rows_by_lane(i2, LGP))
            gl.store(p_start + (P + 48) * N + o_lanes, _rows_by_lane(i3, LGP))
            s = t0 + j * L
            k_w = gl.zeros([L], gl.float32, LK)
            k_all = 0.0
            for r in gl.static_range(L):
                k_r = gl.load(p_log + s + r)
                k_w += gl.where(o_k < r, k_r, 0.0)
                k_all += k_r
            k_w = gl.exp(k_w)
            k_keep = gl.exp(k_all + gl.zeros([1, L], gl.float32, mma))
            if HAS_DOC:
                b_last = gl.load(p_doc + s + L - 1)
                k_w = gl.where(gl.load(p_doc + s + o_k) == b_last, k_w, 0.0)
                k_keep = gl.where(b_before == b_last, k_keep, 0.0)
                b_before = b_last
            k_w = gl.expand_dims(k_w, 1)
            k_B = _keys(p_B, s, T, B_t, NW, mma)
            k_Bf = k_B.to(gl.float32)
            k_B2 = gl.convert_layout((k_Bf * k_Bf).to(gl.bfloat16), LA)
            k_B = gl.convert_layout(k_B, LA)
            o_kc = cc * TP + s + kk
            m0 = mma_v2(k_B, (gl.load(p_v + o_kc) * k_w).to(gl.bfloat16), m0 * k_keep)
            m1 = mma_v2(k_B, (gl.load(p_v + 16 * TP + o_kc) * k_w).to(gl.bfloat16), m1 * k_keep)
            m2 = mma_v2(k_B, (gl.load(p_v + 32 * TP + o_kc) * k_w).to(gl.bfloat16), m2 * k_keep)
            m3 = mma_v2(k_B, (gl.load(p_v + 48 * TP + o_kc) * k_w).to(gl.bfloat16), m3 * k_keep)
            i0 = mma_v2(k_B2, (gl.load(p_beta + o_kc) * k_w).to(gl.bfloat16), i0 * k_keep)
            i1 = mma_v2(k_B2, (gl.load(p_beta + 16 * TP + o_kc) * k_w).to(gl.bfloat16), i1 * k_keep)
            i2 = mma_v2(k_B2, (gl.load(p_beta + 32 * TP + o_kc) * k_w).to(gl.bfloat16), i2 * k_keep)
            i3 = mma_v2(k_B2, (gl.load(p_beta + 48 * TP + o_kc) * k_w).to(gl.bfloat16), i3 * k_keep)
        _barrier()

        b_dprior = gl.zeros([L], gl.float32, gl.SliceLayout(0, LP))
        b_dA = gl.zeros([L], gl.float32, gl.SliceLayout(0, LP))
        for i in range(n_sub):
            j = n_sub - 1 - i
            ts = t0 + j * L
            b_before = 0
            if HAS_DOC:
                b_before = gl.load(p_doc + gl.maximum(ts - 1, 0))

            p_start = starts + (program * (S // L) + j) * 2 * P * N
            for q in gl.static_range(2 * P // 32):
                _copy_to_shared(s_E_tiles.index(q), p_E + q * 32 * N + o_e)
            _copy_to_shared(s_start_tiles.index(0), p_start + o_e)
            _copy_to_shared(s_start_tiles.index(1), p_start + P * N + o_e)
            async_copy.commit_group()
            o_row = pp * TP + ts + ptt
            b_rows = gl.load(p_v + o_row)
            b_rows_u = gl.load(p_beta + o_row)
            b_rows_dy = gl.load(p_dy + o_row)
            s_rows.index(0).store(b_rows)
            s_rows.index(1).store(b_rows_u)
            s_rows.index(2).store(b_rows_dy)

            # Decays: D [s, t] as an operand [k, c], and the same with tokens and keys exchanged for the adjoints
            b_D = gl.zeros([L, L], gl.float32, LBO)
            b_DT = gl.zeros([L, L], gl.float32, LBO)
            b_in = gl.zeros([L], gl.float32, LT)
            b_out = gl.zeros([L], gl.float32, LT)
            for r in gl.static_range(L):
                b_r = gl.load(p_log + ts + r)
                b_D += gl.where((kk < r) & (cc >= r), b_r, 0.0)
                b_DT += gl.where((cc < r) & (kk >= r), b_r, 0.0)
                b_in += gl.where(o_t >= r, b_r, 0.0)
                b_out += gl.where(o_t < r, b_r, 0.0)
            b_D = gl.where(cc >= kk, gl.exp(b_D), 0.0)
            b_DT = gl.where(kk >= cc, gl.exp(b_DT), 0.0)
            b_in = gl.exp(b_in)
            b_out = gl.exp(b_out)
            b_first = gl.exp(gl.load(p_log + ts + gl.zeros([N, 4], gl.int32, LX)))
            if HAS_DOC:
                same = gl.expand_dims(gl.load(p_doc + ts + o_k), 1) == gl.expand_dims(gl.load(p_doc + ts + o_c), 0)
                b_D = gl.where(same, b_D, 0.0)
                b_DT = gl.where(same, b_DT, 0.0)
                b_doc = gl.load(p_doc + ts + o_t)
                b_in = gl.where(b_doc == b_before, b_in, 0.0)
                b_out = gl.where(b_doc == gl.load(p_doc + ts + L - 1), b_out, 0.0)
                b_first = gl.where(gl.load(p_doc + ts) == b_before, b_first, 0.0)
            b_DT = b_DT.to(gl.bfloat16)
            b_in = gl.expand_dims(b_in, 0)
            b_out = gl.expand_dims(b_out, 0)
            b_B = _keys(p_B, ts, T, B_t, NW, mma)
            b_C = _keys(p_C, ts, T, C_t, NW, mma).to(gl.float32)
            b_Bf = b_B.to(gl.float32)
            b_B2f = b_Bf * b_Bf
            b_B2 = gl.convert_layout(b_B2f.to(gl.bfloat16), LA)
            b_B = gl.convert_layout(b_B, LA)

            b_dC = zero
            b_dB = zero
            b_dB2 = zero
            b_z = _lane_sums(zero, NW)
            b_phi = gl.zeros([N, 4], gl.float32, LX)
            for p0 in range(0, P, 32):
                if p0 > 0:
                    _barrier()
                    _copy_to_shared(s_start_tiles.index(0), p_start + p0 * N + o_e)
                    _copy_to_shared(s_start_tiles.index(1), p_start + (P + p0) * N + o_e)
                    async_copy.commit_group()
                async_copy.wait_group(0)
                _barrier()  # before the loop, so that none is needed in it
                for row in range(32):
                    p = p0 + row
                    b_v = s_rows_t.index(p).load(LT)
                    b_u = s_rows_t.index(P + p).load(LT)
                    b_dy = gl.expand_dims(s_rows_t.index(2 * P + p).load(LT), 0)
                    b_M0 = s_start.index(row).load(LN)
                    b_I0 = s_start.index(32 + row).load(LN)
                    b_E = s_E.index(p).load(LN)
                    b_EI = s_E.index(P + p).load(LN)

                    k_v = gl.expand_dims(gl.convert_layout(b_v, LK, assert_trivial=True), 1)
                    k_u = gl.expand_dims(gl.convert_layout(b_u, LK, assert_trivial=True), 1)
                    b_v = gl.expand_dims(b_v, 0)
                    b_u = gl.expand_dims(b_u, 0)
                    b_M = mma_v2(b_B, (b_D * k_v).to(gl.bfloat16), gl.expand_dims(b_M0, 1) * b_in)
                    b_I = mma_v2(b_B2, (b_D * k_u).to(gl.bfloat16), gl.expand_dims(b_I0, 1) * b_in + b_prior)
                    b_inverse = _reciprocal(b_I)
                    b_Z = b_dy * (b_C * b_inverse)
                    b_mu = b_M * b_inverse
                    b_dC += b_dy * b_mu
                    b_ZI = b_Z * b_mu  # minus the adjoint: the sign is applied to the sums
                    b_z += _lane_sums(b_ZI, NW)
                    b_W = mma_v2(gl.convert_layout(b_Z.to(gl.bfloat16), LA), b_DT, gl.expand_dims(b_E, 1) * b_out)
                    b_WI = mma_v2(gl.convert_layout(b_ZI.to(gl.bfloat16), LA), b_DT, -gl.expand_dims(b_EI, 1) * b_out)
                    b_dB += b_v * b_W
                    b_dB2 += b_u * b_WI
                    b_sums = _sum_over_lanes(
                        _lane_sums(b_Bf * b_W, NW), _lane_sums(b_Bf * (b_Bf * b_WI), NW), g3, NW, LF
                    )
                    gl.store(p_part + p * (NW * 32) + o_part, b_sums)
                    x_E = _first_column(b_W, LX) * b_first
                    x_EI = -_first_column(b_WI, LX) * b_first
                    x_M0 = gl.expand_dims(gl.convert_layout(b_M0, gl.SliceLayout(1, LX), assert_trivial=True), 1)
                    x_I0 = gl.expand_dims(gl.convert_layout(b_I0, gl.SliceLayout(1, LX), assert_trivial=True), 1)
                    b_phi += x_E * x_M0 + x_EI * x_I0
                    gl.store(p_E + p * N + o_lane, _row_by_lane(x_E, LG), mask=first_of_four)
                    gl.store(p_E + (P + p) * N + o_lane, _row_by_lane(x_EI, LG), mask=first_of_four)
            _barrier()

            o_out = (i_bh * TP + ts + tt) * N + nn
            gl.store(dC + o_out, b_dC)
            gl.store(dB + o_out, b_dB - 2.0 * b_Bf * b_dB2)

            # The rows' sums: over warps, then dx, dbeta, ddt
            b_dv = gl.zeros([P, L], gl.float32, LP)
            b_du = gl.zeros([P, L], gl.float32, LP)
            for w in gl.static_range(NW):
                b_dv += gl.load(p_part + w * 32 + o_sum)
                b_du -= gl.load(p_part + w * 32 + 16 + o_sum)
            # v as the products rounded it, so that each token's own term cancels in q
            b_vr = gl.load(p_v + pp * TP + ts + ptt).to(gl.bfloat16).to(gl.float32)
            b_ur = gl.load(p_beta + pp * TP + ts + ptt).to(gl.bfloat16).to(gl.float32)
            b_u_sum = gl.sum(b_dv * b_vr + b_du * b_ur, 0)
            z_t = gl.sum(gl.sum(b_z, 1), 0)
            b_zs = -gl.convert_layout(z_t, gl.SliceLayout(0, LP))
            b_d = -b_prior * b_zs - b_u_sum
            b_phi_sum = gl.sum(gl.sum(gl.where(first_lane, b_phi, 0.0), 1), 0)
            # q[t] = q[first] minus the sum of b_d over the earlier tokens since the last reset, where q is zero. A
            # reset is a document's start or a token that keeps nothing (q there would be rounding error).
            LQ: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [NW, 1], [1, 0])
            qs = gl.arange(0, L, layout=gl.SliceLayout(1, LQ))
            qt = gl.arange(0, L, layout=gl.SliceLayout(0, LQ))
            resets_s = gl.zeros([L], gl.int32, gl.SliceLayout(1, LQ))
            resets = gl.zeros([L], gl.int32, gl.SliceLayout(0, LQ))
            for r in gl.static_range(L):
                reset = gl.load(p_log + ts + r) < -20.0
                if HAS_DOC:
                    reset = reset | (gl.load(p_doc + ts + r) != gl.load(p_doc + gl.maximum(ts + r - 1, 0)))
                resets_s += gl.where(qs >= r, reset.to(gl.int32), 0)
                resets += gl.where(qt >= r, reset.to(gl.int32), 0)
            earlier = (gl.expand_dims(qs, 1) < gl.expand_dims(qt, 0)) & (
                gl.expand_dims(resets_s, 1) == gl.expand_dims(resets, 0)
            )
            b_ds = gl.expand_dims(gl.convert_layout(b_d, gl.SliceLayout(1, LQ)), 1)
            b_q = gl.where(resets == 0, b_phi_sum, 0.0) - gl.sum(gl.where(earlier, b_ds, 0.0), 0)
            # Without a reset q must arrive at the next sub-chunk's q[first]: spread what rounding leaves over it
            miss = gl.where(gl.sum(resets, 0) == 0, b_phi_sum - gl.sum(b_d, 0) - phi_end, 0.0)
            b_q -= miss * (qt.to(gl.float32) / L)
            b_q = gl.where(gl.load(p_log + ts + qt) < -20.0, 0.0, b_q)
            if HAS_DOC:
                b_q = gl.where(gl.load(p_doc + ts + qt) == gl.load(p_doc + gl.maximum(ts + qt - 1, 0)), b_q, 0.0)
            phi_end = b_phi_sum
            m_q = ts + qt < T
            q_dt = gl.load(dt + b * dt_b + (ts + qt) * dt_t + h * dt_h, mask=m_q, other=0.0)
            b_dA -= q_dt * b_q
            b_dprior += b_zs

            b_dv = gl.convert_layout(b_dv, LO)
            b_du = gl.convert_layout(b_du, LO)
            m_o = ts + ot < T
            b_x = gl.load(x + b * x_b + (ts + ot) * x_t + h * x_h + op, mask=m_o, other=0.0).to(gl.float32)
            b_dt = gl.load(dt + b * dt_b + (ts + ot) * dt_t + h * dt_h, mask=m_o, other=0.0)
            b_ddt = gl.convert_layout(gl.sum(b_dv * b_x, 0), gl.SliceLayout(0, LQ)) - b_A * b_q
            gl.store(ddt + b * ddt_b + (ts + qt) * ddt_t + h * ddt_h, b_ddt, mask=m_q)
            o_g = b * g_b + (ts + ot) * g_t + h * g_h + op
            gl.store(dx + o_g, (b_dv * b_dt).to(dx.dtype.element_ty), mask=m_o)
            gl.store(dbeta + o_g, b_du.to(dbeta.dtype.element_ty), mask=m_o)
            _barrier()
        gl.store(dA + i_bh * NSEG + i_seg, gl.sum(b_dA, 0))
        gl.store(dprior + i_bh * NSEG + i_seg, gl.sum(b_dprior, 0))
        _barrier()  # starts and parts are used again
