"""The gradient kernel of `triton_scan.py` (step 5) for Hopper: one register of a lane at a time, in Gluon.

Every tensor here is [128]: one 32-bit register of each thread of 4 warps; a pair of bfloat16 is an int32. What moves
between lanes does so by name (`_mma16`, `_transpose`, shared memory by address), so the layouts of `mma.sync` are in
the comments: g = lane // 4, c = lane % 4; accumulators and first operands hold rows g, g + 8 and columns 2c, 2c + 1
(+ 8), second operands rows 2c, 2c + 1 (+ 8) and column g.

A program takes one head and one segment, sub-chunks of 16 tokens from last to first, in each all value rows p, eight
at a time; a warp has 32 keys n. With D[s, t] the decay from s to t, for one row, as [n, t] accumulators (16 a lane):

    M  = Bᵀ (D ∘ v)   + M_start e_in,      I = I_prior + (B²)ᵀ (D ∘ beta) + Ibar_start e_in      (v = dt x)
    R  = M / I,  Z = C dy / I,  Z R        (direct adjoints of M and, negated, of Ibar; rounded to bfloat16)
    Q  = B Zᵀ,   Q_R = B² (Z R)ᵀ           [s, t]: all sums over keys are products, of the transposed Z
    d v[s] = Σ_t D Q,  d beta[s] = -Σ_t D Q_R,  dBᵀ += Z (D ∘ v)ᵀ,  G += Z R (-D ∘ beta)ᵀ,  dC += dy R
    E  = e_in[last] E + Z e_in             the adjoint of the starting state, eight rows a tile

and dB + 2 B G in the end. What E, the adjoint after the sub-chunk, adds to d v, d beta, dB and G are products of
eight rows. The gradient of log alpha[j] is the sum over all spans from s < j (or the start) to t >= j (or the end) of
what flows along them: `spans` gets the terms of each span, summed over rows; nothing is subtracted.
"""

from .hopper_lanes import (
    barrier,
    copy_async,
    gl,
    high,
    jit,
    load1,
    load1_bits,
    load4,
    load4_bits,
    low,
    mma16,
    mma8,
    operand,
    pack,
    reciprocal,
    scaled,
    shared_base,
    square4,
    states,
    store1,
    store4,
    times,
    transpose,
    transpose_operand,
    wait_async,
)

# Sizes that the kernel is built for, those of every released Mamba2.
HEAD_DIM, STATE_SIZE = 64, 128
NUM_WARPS = 4
ROW_WORDS = 64  # 32-bit words of a row's operands in a sub-chunk, see `prepare_rows`
SPAN_WORDS = 14  # of each lane, see `segment_gradients`
# Shared memory, bytes: adjoints of 64 rows, and two groups each of rows' operands,
# partial results and states at the sub-chunk's start; I_prior
_ROWS: gl.constexpr = gl.constexpr(64 * 1024)
_PARTS: gl.constexpr = gl.constexpr(68 * 1024)
_STARTS: gl.constexpr = gl.constexpr(76 * 1024)
_PRIORS: gl.constexpr = gl.constexpr(84 * 1024)
# and of each lane C and what registers are too few for: four words at a time, 2 KiB apart
_QUERIES: gl.constexpr = gl.constexpr(84 * 1024 + 512)
_DECAYS: gl.constexpr = gl.constexpr(92 * 1024 + 512)
_SUMS: gl.constexpr = gl.constexpr(100 * 1024 + 512)


@jit
def _read_adjoint(M, I, C, dy0, dy1, dC, EXACT: gl.constexpr):
    """R, Z and Z R of a fragment [16 keys, 8 tokens]; the pairs of rows g and g + 8 of Z and Z R, and dC."""
    r0 = reciprocal(I[0])
    r1 = reciprocal(I[1])
    r2 = reciprocal(I[2])
    r3 = reciprocal(I[3])
    m0 = M[0] * r0
    m1 = M[1] * r1
    m2 = M[2] * r2
    m3 = M[3] * r3
    z0 = (C[0] * r0) * dy0
    z1 = (C[1] * r1) * dy1
    z2 = (C[2] * r2) * dy0
    z3 = (C[3] * r3) * dy1
    dC = (dC[0] + dy0 * m0, dC[1] + dy1 * m1, dC[2] + dy0 * m2, dC[3] + dy1 * m3)
    a = pack(z0, z1)
    b = pack(z2, z3)
    if EXACT:
        ya = pack(z0 * m0, z1 * m1)
        yb = pack(z2 * m2, z3 * m3)
    else:
        ya = times(a, pack(m0, m1))
        yb = times(b, pack(m2, m3))
    return a, b, ya, yb, dC


@jit
def _sum_rows(address, p_dx, p_dbeta, offset, dt, mask):
    """Sum a group's d v and d beta over the warps and write dx and dbeta; d v."""
    dv = load1(address)
    du = load1(address + 512)
    for w in gl.static_range(1, 4):
        dv += load1(address + w * 1024)
        du += load1(address + w * 1024 + 512)
    gl.store(p_dx + offset, (dv * dt).to(gl.bfloat16), mask=mask)
    gl.store(p_dbeta + offset, du.to(gl.bfloat16), mask=mask)
    return dv


@jit
def _lane_xor(x, distance):
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, distance], gl.float32, is_pure=True, pack=1
    )


@jit
def _store_keys(p, v0, v1, N: gl.constexpr):
    """A fragment [16 keys, 16 tokens] to [t, n]."""
    gl.store(p, v0[0])
    gl.store(p + N, v0[1])
    gl.store(p + 8, v0[2])
    gl.store(p + N + 8, v0[3])
    gl.store(p + 8 * N, v1[0])
    gl.store(p + 9 * N, v1[1])
    gl.store(p + 8 * N + 8, v1[2])
    gl.store(p + 9 * N + 8, v1[3])


@jit
def segment_gradients(
    x, dt, B, C, prior, rows, decays, starts, adjoints, dx, dbeta, dvx, dB, dC, spans,
    x_b, x_t, x_h, dt_b, dt_t, dt_h, B_b, B_t, B_g, C_b, C_t, C_g, g_b, g_t, g_h,
    T, TP, H, HPG, NSEG, S,
    UNROLL: gl.constexpr, EXACT: gl.constexpr,
):  # fmt: skip
    """All gradients of one segment and one head, but those of dt, A and I_prior that `spans` still holds.

    B, C as int32 pairs of keys, their strides in pairs. rows [b, h, TP / 16, p, 64 words], decays
    [b, h, TP / 16, 272] from `prepare_rows`; starts [b, h, TP / 16, p / 8, 2, n, p % 8] bfloat16 as int32 pairs;
    slot k + 1 of adjoints [b, h, NSEG + 1, 2, p, n] is the adjoint after segment k. dx and dbeta have strides g_*.
    Partial results: dB, dC [b, h, TP, n]; dvx [b, h, TP] = Σ_p x d(dt x); spans [b, h, TP / 16, 4 warps, 14, 32
    lanes]: what flows from s to t, tokens (g, 2c), (g, 2c + 1), (g, 2c + 8), (g, 2c + 9), (g + 8, 2c + 8),
    (g + 8, 2c + 9); from the start to 2c, 2c + 1, 2c + 8, 2c + 9; from g and g + 8 to the end; from the start to the
    end; and the gradient of I_prior.
    """
    N: gl.constexpr = 128
    P: gl.constexpr = 64
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared = gl.allocate_shared_memory(gl.float32, [205, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tid = gl.arange(0, 128, layout=L)
    lane = tid % 32
    warp = tid // 32
    g = lane // 4
    c = lane % 4
    zero_int = tid * 0
    zero = zero_int.to(gl.float32)
    zeros = (zero, zero, zero, zero)
    ones = zero_int + 0x3F803F80
    i_seg = gl.program_id(0).to(gl.int64)
    i_bh = gl.program_id(1).to(gl.int64)
    b = i_bh // H
    h = i_bh % H
    t0 = i_seg * S
    n_sub = gl.cdiv(gl.minimum(S, T - t0), 16).to(gl.int32)
    shared.index(168).store(gl.load(prior + h) + zero)  # I_prior, to be loaded as four registers at a time
    base = shared_base(zero_int)
    a_prior = base + _PRIORS
    a_E = base + warp * 1024 + lane * 16
    a_rows = base + _ROWS + g * 16
    a_pairs = base + _ROWS + 128 + c * 16
    a_dy = base + _ROWS + 192 + c * 16
    a_ends = base + _ROWS + c * 512 + g * 16
    a_copy = base + _ROWS + tid * 16
    a_part = base + _PARTS + warp * 1024 + lane * 4
    # thread s 8 + p sums a group's results: register (s // 8) 2 + p % 2 of lane 4 (s % 8) + p // 2
    r_s = tid // 8
    r_p = tid % 8
    a_sum = base + _PARTS + ((r_s // 8) * 2 + r_p % 2) * 128 + ((r_s % 8) * 4 + r_p // 2) * 4

    chunk = i_bh * (TP // 16) + i_seg * (S // 16)  # the segment's first sub-chunk
    # addresses as scalars, which take no lane's register
    p_rows = rows + chunk * (P * 64)
    p_starts = starts + chunk * (P * N)
    p_B = B + b * B_b + (h // HPG) * B_g
    p_C = C + b * C_b + (h // HPG) * C_g
    p_x = x + b * x_b + h * x_h
    p_dx = dx + b * g_b + h * g_h
    p_dbeta = dbeta + b * g_b + h * g_h
    p_dt = dt + b * dt_b + h * dt_h
    o_keys = (i_bh * TP + t0) * N
    p_end = adjoints + (i_bh * (NSEG + 1) + i_seg + 1) * 2 * P * N + 2 * c * N + warp * 32 + g

    # the adjoint after the segment, [32 keys, 8 rows] fragments; of Ibar, negated
    for q in range(8):
        for k in gl.static_range(2):
            for i in gl.static_range(2):
                p_e = p_end + (q * 8 + k * P) * N + i * 16
                b_e = (gl.load(p_e), gl.load(p_e + N), gl.load(p_e + 8), gl.load(p_e + N + 8))
                if k == 1:
                    b_e = scaled(b_e, -1.0)
                store4(a_E + q * 8192 + k * 4096 + i * 512, b_e)
    a_copy_starts = base + _STARTS + warp * 512 + lane * 16
    copy_async(a_copy, p_rows + (n_sub - 1) * (P * 64) + tid * 4)
    copy_async(a_copy_starts, p_starts + (n_sub - 1) * (P * N) + tid * 4)
    copy_async(a_copy_starts + 2048, p_starts + (n_sub - 1) * (P * N) + 512 + tid * 4)

    for i_sub in range(n_sub):
        j = n_sub - 1 - i_sub
        ts = (t0 + j * 16).to(gl.int32)
        # past the sequence's end dt, x, beta and dy are zero, and B and C those of the last token
        o_g = gl.minimum(g, T - 1 - ts)
        o_g8 = gl.minimum(g + 8, T - 1 - ts)
        p_b = p_B + ts.to(gl.int64) * B_t
        p_c = p_C + ts.to(gl.int64) * C_t
        o_n = warp * 16 + c
        B0 = operand(p_b + (o_g * B_t + o_n), p_b + (o_g8 * B_t + o_n))
        B1 = operand(p_b + (o_g * B_t + o_n + 8), p_b + (o_g8 * B_t + o_n + 8))
        C0 = transpose_operand(operand(p_c + (o_g * C_t + o_n), p_c + (o_g8 * C_t + o_n)))
        C1 = transpose_operand(operand(p_c + (o_g * C_t + o_n + 8), p_c + (o_g8 * C_t + o_n + 8)))
        a_lane = base + _QUERIES + tid * 16
        store4(a_lane, (low(C0[0]), high(C0[0]), low(C0[1]), high(C0[1])))
        store4(a_lane + 2048, (low(C0[2]), high(C0[2]), low(C0[3]), high(C0[3])))
        store4(a_lane + 4096, (low(C1[0]), high(C1[0]), low(C1[1]), high(C1[1])))
        store4(a_lane + 6144, (low(C1[2]), high(C1[2]), low(C1[3]), high(C1[3])))
        BB0 = square4(B0)
        BB1 = square4(B1)
        K0 = transpose_operand(B0)
        K1 = transpose_operand(B1)
        KK0 = square4(K0)
        KK1 = square4(K1)
        p_d = decays + (chunk + j) * 272
        D0 = gl.load(p_d + g * 16 + 2 * c)
        D1 = gl.load(p_d + g * 16 + 2 * c + 1)
        D2 = gl.load(p_d + g * 16 + 2 * c + 8)
        D3 = gl.load(p_d + g * 16 + 2 * c + 9)
        D4 = gl.load(p_d + g * 16 + 2 * c + 136)
        D5 = gl.load(p_d + g * 16 + 2 * c + 137)
        out0 = gl.load(p_d + g * 16 + 15)  # from token g to the sub-chunk's end
        out1 = gl.load(p_d + g * 16 + 143)
        in_c0 = gl.load(p_d + 256 + 2 * c)  # from the sub-chunk's start
        in_c1 = gl.load(p_d + 257 + 2 * c)
        in_c2 = gl.load(p_d + 264 + 2 * c)
        in_c3 = gl.load(p_d + 265 + 2 * c)
        in_g0 = gl.load(p_d + 256 + g)
        in_g1 = gl.load(p_d + 264 + g)
        keep = gl.load(p_d + 271)
        in_g0 = pack(in_g0, in_g0)
        in_g1 = pack(in_g1, in_g1)
        x_c0 = pack(in_c0, in_c1)
        x_c1 = pack(in_c2, in_c3)
        d00 = pack(D0, D1)
        d01 = pack(D2, D3)
        d11 = pack(D4, D5)
        e00 = transpose(d00)
        e01 = transpose(d01)
        e11 = transpose(d11)
        r_dt = gl.load(p_dt + ts.to(gl.int64) * dt_t + r_s * dt_t, mask=ts + r_s < T, other=0.0)
        store4(a_lane + 8192, (D0, D1, D2, D3))
        store4(a_lane + 10240, (D4, D5, keep, r_dt))
        store4(a_lane + 12288, (in_c0, in_c1, in_c2, in_c3))
        store4(a_lane + 14336, (out0, out1, zero, zero))
        store4(a_lane + 16384, zeros)  # sums: d v x, from g and from g + 8 to the end, from the start to the end
        r_x = zero

        dC00 = zeros
        dC01 = zeros
        dC10 = zeros
        dC11 = zeros
        dB00 = zeros
        dB01 = zeros
        dB10 = zeros
        dB11 = zeros
        G00 = zeros
        G01 = zeros
        G10 = zeros
        G11 = zeros
        S0 = zero
        S1 = zero
        S2 = zero
        S3 = zero
        S4 = zero
        S5 = zero
        F0 = zero
        F1 = zero
        F2 = zero
        F3 = zero
        b_prior = zeros
        for q in range(8):
            wait_async(zero_int)
            barrier()
            turn = q % 2
            following = gl.maximum(j * 8 + q + 1 - 16 * ((q + 1) // 8), 0)  # the group of rows that comes next
            copy_async(a_copy + (1 - turn) * 2048, p_rows + following * 512 + tid * 4)
            copy_async(a_copy_starts + (1 - turn) * 4096, p_starts + following * 1024 + tid * 4)
            copy_async(a_copy_starts + (1 - turn) * 4096 + 2048, p_starts + following * 1024 + 512 + tid * 4)
            held = load4(a_lane + 10240)
            sums = load4(a_lane + 16384)
            b_dvx = sums[0]
            m_r = ts + r_s < T
            if q > 0:
                o_row = ts.to(gl.int64) * g_t + (q - 1) * 8
                b_dvx += r_x * _sum_rows(
                    a_sum + (1 - turn) * 4096, p_dx + o_row, p_dbeta + o_row, r_s * g_t + r_p, held[3], m_r
                )
            o_row = ts.to(gl.int64) * x_t + q * 8
            r_x = gl.load(p_x + o_row + (r_s * x_t + r_p), mask=m_r, other=0.0).to(gl.float32)

            # States at the sub-chunk's start, eight rows, [n, p] and [p, n]
            a_s = base + _STARTS + turn * 4096 + warp * 512 + lane * 4
            M0a = load1_bits(a_s)
            M0b = load1_bits(a_s + 128)
            M1a = load1_bits(a_s + 256)
            M1b = load1_bits(a_s + 384)
            I0a = load1_bits(a_s + 2048)
            I0b = load1_bits(a_s + 2176)
            I1a = load1_bits(a_s + 2304)
            I1b = load1_bits(a_s + 2432)
            MT0a = transpose(M0a)
            MT0b = transpose(M0b)
            MT1a = transpose(M1a)
            MT1b = transpose(M1b)
            IT0a = transpose(I0a) ^ -2147450880  # negated
            IT0b = transpose(I0b) ^ -2147450880
            IT1a = transpose(I1a) ^ -2147450880
            IT1b = transpose(I1b) ^ -2147450880
            # The adjoint at the sub-chunk's end
            a_e = a_E + q * 8192
            E0 = load4(a_e)
            E1 = load4(a_e + 512)
            EI0 = load4(a_e + 4096)
            EI1 = load4(a_e + 4608)
            e0a = pack(E0[0], E0[1])
            e0b = pack(E0[2], E0[3])
            e1a = pack(E1[0], E1[1])
            e1b = pack(E1[2], E1[3])
            i0a = pack(EI0[0], EI0[1])
            i0b = pack(EI0[2], EI0[3])
            i1a = pack(EI1[0], EI1[1])
            i1b = pack(EI1[2], EI1[3])
            decay_out = load4(a_lane + 14336)
            va = load4(a_ends + turn * 2048)  # v[g], v[g + 8], -beta[g], -beta[g + 8] of row 2c
            vb = load4(a_ends + turn * 2048 + 256)  # of row 2c + 1
            v_end0 = pack(va[0] * decay_out[0], vb[0] * decay_out[0])
            v_end1 = pack(va[1] * decay_out[1], vb[1] * decay_out[1])
            u_end0 = pack(va[2] * decay_out[0], vb[2] * decay_out[0])
            u_end1 = pack(va[3] * decay_out[1], vb[3] * decay_out[1])
            dB00 = mma8(e0a, e0b, v_end0, dB00)
            dB01 = mma8(e0a, e0b, v_end1, dB01)
            dB10 = mma8(e1a, e1b, v_end0, dB10)
            dB11 = mma8(e1a, e1b, v_end1, dB11)
            G00 = mma8(i0a, i0b, u_end0, G00)
            G01 = mma8(i0a, i0b, u_end1, G01)
            G10 = mma8(i1a, i1b, u_end0, G10)
            G11 = mma8(i1a, i1b, u_end1, G11)
            e0a = transpose(e0a)
            e0b = transpose(e0b)
            e1a = transpose(e1a)
            e1b = transpose(e1b)
            i0a = transpose(i0a)
            i0b = transpose(i0b)
            i1a = transpose(i1a)
            i1b = transpose(i1b)
            dv = mma16(B0[0], B0[1], B0[2], B0[3], e0a, e0b, zeros)
            dv = mma16(B1[0], B1[1], B1[2], B1[3], e1a, e1b, dv)
            du = mma16(BB0[0], BB0[1], BB0[2], BB0[3], i0a, i0b, zeros)
            du = mma16(BB1[0], BB1[1], BB1[2], BB1[3], i1a, i1b, du)
            dv = (dv[0] * decay_out[0], dv[1] * decay_out[0], dv[2] * decay_out[1], dv[3] * decay_out[1])
            du = (du[0] * decay_out[0], du[1] * decay_out[0], du[2] * decay_out[1], du[3] * decay_out[1])
            end0 = sums[1] + ((va[0] * dv[0] + vb[0] * dv[1]) + (va[2] * du[0] + vb[2] * du[1]))
            end1 = sums[2] + ((va[1] * dv[2] + vb[1] * dv[3]) + (va[3] * du[2] + vb[3] * du[3]))
            du = scaled(du, -1.0)
            diagonal = mma16(MT0a, zero_int, MT0b, zero_int, e0a, e0b, zeros)
            diagonal = mma16(MT1a, zero_int, MT1b, zero_int, e1a, e1b, diagonal)
            diagonal = mma16(IT0a, zero_int, IT0b, zero_int, i0a, i0b, diagonal)
            diagonal = mma16(IT1a, zero_int, IT1b, zero_int, i1a, i1b, diagonal)
            through = gl.where(g == 2 * c, diagonal[0], gl.where(g == 2 * c + 1, diagonal[1], 0.0))
            store4(a_lane + 16384, (b_dvx, end0, end1, sums[3] + through))
            E0 = scaled(E0, held[2])
            E1 = scaled(E1, held[2])
            EI0 = scaled(EI0, held[2])
            EI1 = scaled(EI1, held[2])

            for r_first in range(0, 8, UNROLL):
                for r_next in gl.static_range(UNROLL):
                    r = r_first + r_next
                    a_r = turn * 2048 + r * 256
                    vu = load4(a_rows + a_r)  # v[g], v[g + 8], -beta[g], -beta[g + 8]
                    pairs = load4_bits(a_pairs + a_r)  # pairs v[2c], v[2c + 8], beta[2c], beta[2c + 8]
                    dy = load4(a_dy + a_r)  # 2c, 2c + 1, 2c + 8, 2c + 9
                    here = g == r
                    half = gl.where(c * 2 == r, 65535, gl.where(c * 2 + 1 == r, -65536, 0))
                    s_in0 = in_g0 & half
                    s_in1 = in_g1 & half
                    w00 = times(e00, pairs[0])
                    w01 = times(e01, pairs[0])
                    w11 = times(e11, pairs[1])
                    b_M = (M0a, M0b, M1a, M1b)
                    b_M00, b_M01, b_M10, b_M11 = states(K0, K1, b_M, w00, w01, w11, s_in0, s_in1, zeros)
                    priors = load4(a_prior)
                    w00 = times(e00, pairs[2])
                    w01 = times(e01, pairs[2])
                    w11 = times(e11, pairs[3])
                    b_I = (I0a, I0b, I1a, I1b)
                    b_I00, b_I01, b_I10, b_I11 = states(KK0, KK1, b_I, w00, w01, w11, s_in0, s_in1, priors)
                    z00a, z00b, y00a, y00b, dC00 = _read_adjoint(b_M00, b_I00, load4(a_lane), dy[0], dy[1], dC00, EXACT)
                    z01a, z01b, y01a, y01b, dC01 = _read_adjoint(
                        b_M01, b_I01, load4(a_lane + 2048), dy[2], dy[3], dC01, EXACT
                    )
                    z10a, z10b, y10a, y10b, dC10 = _read_adjoint(
                        b_M10, b_I10, load4(a_lane + 4096), dy[0], dy[1], dC10, EXACT
                    )
                    z11a, z11b, y11a, y11b, dC11 = _read_adjoint(
                        b_M11, b_I11, load4(a_lane + 6144), dy[2], dy[3], dC11, EXACT
                    )
                    # over tokens t: dB, G and the adjoint of the start
                    w = pack(vu[0], vu[0])
                    b0 = times(d00, w)
                    b1 = times(d01, w)
                    w = times(d11, pack(vu[1], vu[1]))
                    dB00 = mma16(z00a, z00b, z01a, z01b, b0, b1, dB00)
                    dB01 = mma8(z01a, z01b, w, dB01)
                    dB10 = mma16(z10a, z10b, z11a, z11b, b0, b1, dB10)
                    dB11 = mma8(z11a, z11b, w, dB11)
                    w = pack(vu[2], vu[2])
                    b0 = times(d00, w)
                    b1 = times(d01, w)
                    w = times(d11, pack(vu[3], vu[3]))
                    G00 = mma16(y00a, y00b, y01a, y01b, b0, b1, G00)
                    G01 = mma8(y01a, y01b, w, G01)
                    G10 = mma16(y10a, y10b, y11a, y11b, b0, b1, G10)
                    G11 = mma8(y11a, y11b, w, G11)
                    b0 = gl.where(here, x_c0, 0)
                    b1 = gl.where(here, x_c1, 0)
                    E0 = mma16(z00a, z00b, z01a, z01b, b0, b1, E0)
                    E1 = mma16(z10a, z10b, z11a, z11b, b0, b1, E1)
                    EI0 = mma16(y00a, y00b, y01a, y01b, b0, b1, EI0)
                    EI1 = mma16(y10a, y10b, y11a, y11b, b0, b1, EI1)
                    b_prior = mma16(y00a, y00b, y01a, y01b, ones, ones, b_prior)
                    b_prior = mma16(y10a, y10b, y11a, y11b, ones, ones, b_prior)
                    # over keys: Q [s, t], and the same for the starts, of M in row r and of Ibar in row 8 + r
                    z00a = transpose(z00a)
                    z00b = transpose(z00b)
                    z01a = transpose(z01a)
                    z01b = transpose(z01b)
                    z10a = transpose(z10a)
                    z10b = transpose(z10b)
                    z11a = transpose(z11a)
                    z11b = transpose(z11b)
                    y00a = transpose(y00a)
                    y00b = transpose(y00b)
                    y01a = transpose(y01a)
                    y01b = transpose(y01b)
                    y10a = transpose(y10a)
                    y10b = transpose(y10b)
                    y11a = transpose(y11a)
                    y11b = transpose(y11b)
                    Q0 = mma16(B0[0], B0[1], B0[2], B0[3], z00a, z00b, zeros)
                    Q1 = mma16(B0[0], B0[1], B0[2], B0[3], z01a, z01b, zeros)
                    R0 = mma16(BB0[0], BB0[1], BB0[2], BB0[3], y00a, y00b, zeros)
                    R1 = mma16(BB0[0], BB0[1], BB0[2], BB0[3], y01a, y01b, zeros)
                    Q0 = mma16(B1[0], B1[1], B1[2], B1[3], z10a, z10b, Q0)
                    Q1 = mma16(B1[0], B1[1], B1[2], B1[3], z11a, z11b, Q1)
                    R0 = mma16(BB1[0], BB1[1], BB1[2], BB1[3], y10a, y10b, R0)
                    R1 = mma16(BB1[0], BB1[1], BB1[2], BB1[3], y11a, y11b, R1)
                    from0 = mma16(MT0a, IT0a, MT0b, IT0b, z00a, z00b, zeros)
                    from1 = mma16(MT0a, IT0a, MT0b, IT0b, z01a, z01b, zeros)
                    from2 = mma16(MT0a, IT0a, MT0b, IT0b, y00a, y00b, zeros)
                    from3 = mma16(MT0a, IT0a, MT0b, IT0b, y01a, y01b, zeros)
                    from0 = mma16(MT1a, IT1a, MT1b, IT1b, z10a, z10b, from0)
                    from1 = mma16(MT1a, IT1a, MT1b, IT1b, z11a, z11b, from1)
                    from2 = mma16(MT1a, IT1a, MT1b, IT1b, y10a, y10b, from2)
                    from3 = mma16(MT1a, IT1a, MT1b, IT1b, y11a, y11b, from3)
                    m_here = gl.where(here, 1.0, 0.0)
                    F0 += m_here * from0[0]
                    F1 += m_here * from0[1]
                    F2 += m_here * from1[0]
                    F3 += m_here * from1[1]
                    F0 += m_here * from2[2]
                    F1 += m_here * from2[3]
                    F2 += m_here * from3[2]
                    F3 += m_here * from3[3]
                    S0 += vu[0] * Q0[0]
                    S1 += vu[0] * Q0[1]
                    S2 += vu[0] * Q1[0]
                    S3 += vu[0] * Q1[1]
                    S4 += vu[1] * Q1[2]
                    S5 += vu[1] * Q1[3]
                    S0 += vu[2] * R0[0]
                    S1 += vu[2] * R0[1]
                    S2 += vu[2] * R1[0]
                    S3 += vu[2] * R1[1]
                    S4 += vu[3] * R1[2]
                    S5 += vu[3] * R1[3]
                    # sums over t go to column r
                    d = load4(a_lane + 8192)
                    d_late = load4(a_lane + 10240)
                    b0 = gl.where(here, ones, 0)
                    dv = mma16(
                        pack(d[0] * Q0[0], d[1] * Q0[1]), zero_int, pack(d[2] * Q1[0], d[3] * Q1[1]),
                        pack(d_late[0] * Q1[2], d_late[1] * Q1[3]), b0, b0, dv,
                    )  # fmt: skip
                    b0 = gl.where(here, ones ^ -2147450880, 0)
                    du = mma16(
                        pack(d[0] * R0[0], d[1] * R0[1]), zero_int, pack(d[2] * R1[0], d[3] * R1[1]),
                        pack(d_late[0] * R1[2], d_late[1] * R1[3]), b0, b0, du,
                    )  # fmt: skip

            store4(a_e, E0)
            store4(a_e + 512, E1)
            store4(a_e + 4096, EI0)
            store4(a_e + 4608, EI1)
            a_p = a_part + turn * 4096
            store1(a_p, dv[0])
            store1(a_p + 128, dv[1])
            store1(a_p + 256, dv[2])
            store1(a_p + 384, dv[3])
            store1(a_p + 512, du[0])
            store1(a_p + 640, du[1])
            store1(a_p + 768, du[2])
            store1(a_p + 896, du[3])
        barrier()
        o_row = ts.to(gl.int64) * g_t + 56
        ends = load4(a_lane + 10240)
        sums = load4(a_lane + 16384)
        b_dvx = r_x * _sum_rows(a_sum + 4096, p_dx + o_row, p_dbeta + o_row, r_s * g_t + r_p, ends[3], ts + r_s < T)
        b_dvx += sums[0]
        b_dvx += _lane_xor(b_dvx, zero_int + 1)
        b_dvx += _lane_xor(b_dvx, zero_int + 2)
        b_dvx += _lane_xor(b_dvx, zero_int + 4)
        gl.store(dvx + (i_bh * TP + ts) + r_s, b_dvx, mask=r_p == 0)

        o_tile = 2 * c * N + warp * 32 + g
        p_o = dC + o_keys + j * (16 * N) + o_tile
        _store_keys(p_o, dC00, dC01, N)
        _store_keys(p_o + 16, dC10, dC11, N)
        p_o = dB + o_keys + j * (16 * N) + o_tile
        _store_keys(p_o, _with_square(dB00, K0[0], K0[1], G00), _with_square(dB01, K0[2], K0[3], G01), N)
        _store_keys(p_o + 16, _with_square(dB10, K1[0], K1[1], G10), _with_square(dB11, K1[2], K1[3], G11), N)
        p_o = spans + (chunk + j) * 1792 + (warp * 448 + lane)
        gl.store(p_o + 128, S4 * ends[0])
        gl.store(p_o + 160, S5 * ends[1])
        gl.store(p_o + 320, sums[1])
        gl.store(p_o + 352, sums[2])
        gl.store(p_o + 384, sums[3] * ends[2])
        ends = load4(a_lane + 8192)
        gl.store(p_o, S0 * ends[0])
        gl.store(p_o + 32, S1 * ends[1])
        gl.store(p_o + 64, S2 * ends[2])
        gl.store(p_o + 96, S3 * ends[3])
        ends = load4(a_lane + 12288)
        gl.store(p_o + 192, F0 * ends[0])
        gl.store(p_o + 224, F1 * ends[1])
        gl.store(p_o + 256, F2 * ends[2])
        gl.store(p_o + 288, F3 * ends[3])
        gl.store(p_o + 416, gl.where(c == 0, -(b_prior[0] + b_prior[2]), 0.0))  # the same in all columns


@jit
def _with_square(dB, keys0, keys1, G):
    return (
        dB[0] + 2.0 * low(keys0) * G[0],
        dB[1] + 2.0 * high(keys0) * G[1],
        dB[2] + 2.0 * low(keys1) * G[2],
        dB[3] + 2.0 * high(keys1) * G[3],
    )
