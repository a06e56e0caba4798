"""The gradient kernel of `triton_scan.py` (step 5) for Hopper: one register of a lane at a time, in Gluon.

Every tensor here is [128], one 32-bit register of each thread of 4 warps (`hopper_lanes.py` has the letters g and c).

A program takes one head and one segment, sub-chunks of 16 tokens from last to first, in each all value rows p, eight
at a time; a warp has 32 keys n. With D[s, t] the decay from s to t, for one row, as [n, t] accumulators (16 a lane):

    M  = Bᵀ (D ∘ v)   + M_start e_in,      I = I_prior + (B²)ᵀ (D ∘ beta) + Ibar_start e_in      (v = dt x)
    R  = M / I,  Z = C dy / I,  Z R        (direct adjoints of M and, negated, of Ibar; rounded to bfloat16)
    Q  = B Zᵀ,   Q_R = B² (Z R)ᵀ           [s, t]: all sums over keys are products, of the transposed Z
    d v[s] = Σ_t D Q,  d beta[s] = -Σ_t D Q_R,  dBᵀ += Z (D ∘ v)ᵀ,  G += Z R (-D ∘ beta)ᵀ,  dC += dy R
    E  = e_in[last] E + Z e_in             the adjoint of the starting state, eight rows a tile, of Z in TF32

and dB + 2 B G in the end. What E, the adjoint after the sub-chunk, adds to d v, d beta, dB and G are products of
eight rows. The gradient of log alpha[j] is the sum over all spans from s < j (or the start) to t >= j (or the end) of
what flows along them: `spans` gets the terms of each span, summed over rows; nothing is subtracted.

E is zero at the segment's end. What later segments add to the gradients is linear in their adjoint: `hopper_carry.py`.
"""

from .hopper_lanes import (
    barrier,
    copy_async,
    gl,
    high,
    jit,
    keys_and_starts,
    load1,
    load1_bits,
    load4,
    low,
    mma8,
    operand,
    pack,
    scaled,
    shared_base,
    square4,
    store1,
    store4,
    transpose,
    transpose_operand,
    wait_async,
)
from .hopper_rows import (
    DECAYS,
    END_DECAYS,
    LATE_DECAYS,
    SIGNS,
    START_DECAYS,
    SUMS,
    over_keys,
    row_gradients,
    row_states,
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
# and 18 KiB for words of each lane, see `hopper_rows.py`: C and what registers are too few for
_LANES: gl.constexpr = gl.constexpr(84 * 1024 + 512)


@jit
def _sum_rows(address, p_rows, offset):
    """Sum a group's d v and d beta over the warps and write them in place of the rows' operands."""
    dv = load1(address)
    du = load1(address + 512)
    for w in gl.static_range(1, 4):
        dv += load1(address + w * 1024)
        du += load1(address + w * 1024 + 512)
    gl.store(p_rows + offset, dv)
    gl.store(p_rows + 128 + offset, du)


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
def _with_square(dB, keys0, keys1, G):
    """dB + 2 B G of a fragment [keys, s]."""
    return (
        dB[0] + 2.0 * low(keys0) * G[0],
        dB[1] + 2.0 * high(keys0) * G[1],
        dB[2] + 2.0 * low(keys1) * G[2],
        dB[3] + 2.0 * high(keys1) * G[3],
    )


@jit
def _operands(p_B, p_C, p_d, ts, T, B_t, C_t, warp, g, c):
    """What a lane needs of a sub-chunk, as it lies in memory: B and C of 32 keys, decays."""
    # past the sequence's end dt, x, beta and dy are zero, and B and C those of the last token
    o_g = gl.minimum(g, T - 1 - ts)
    o_g8 = gl.minimum(g + 8, T - 1 - ts)
    p_b = p_B + ts.to(gl.int64) * B_t
    p_c = p_C + ts.to(gl.int64) * C_t
    o_n = warp * 16 + c
    B0 = operand(p_b + (o_g * B_t + o_n), p_b + (o_g8 * B_t + o_n))
    B1 = operand(p_b + (o_g * B_t + o_n + 8), p_b + (o_g8 * B_t + o_n + 8))
    C0 = operand(p_c + (o_g * C_t + o_n), p_c + (o_g8 * C_t + o_n))
    C1 = operand(p_c + (o_g * C_t + o_n + 8), p_c + (o_g8 * C_t + o_n + 8))
    p_g = p_d + (g * 16 + 2 * c)
    within = (
        gl.load(p_g), gl.load(p_g + 1), gl.load(p_g + 8), gl.load(p_g + 9), gl.load(p_g + 136), gl.load(p_g + 137),
    )  # fmt: skip
    p_g = p_d + g * 16
    to_end = (gl.load(p_g + 15), gl.load(p_g + 143))  # from tokens g and g + 8
    p_g = p_d + (256 + 2 * c)  # from the sub-chunk's start
    from_start = (gl.load(p_g), gl.load(p_g + 1), gl.load(p_g + 8), gl.load(p_g + 9))
    p_g = p_d + (256 + g)
    from_start_g = (gl.load(p_g), gl.load(p_g + 8))
    return B0, B1, C0, C1, within, to_end, from_start, from_start_g, gl.load(p_d + (271 + 0 * g))


@jit
def segment_gradients(
    B, C, prior, rows, decays, starts, adjoints, dB, dC, spans,
    B_b, B_t, B_g, C_b, C_t, C_g, T, TP, H, HPG, NSEG, S,
):  # fmt: skip
    """All gradients of one segment and one head that its own tokens cause.

    B, C as int32 pairs of keys, their strides in pairs. rows [b, h, TP / 16, p, 64 words], decays
    [b, h, TP / 16, 272] from `prepare_rows`; starts [b, h, TP / 16, p / 8, 2, n, p % 8] bfloat16 as int32 pairs.
    Slot k of adjoints [b, h, NSEG + 1, 2, p, n] becomes the adjoint of segment k's start. Of eight rows' 512 words the
    first become d v [s, p % 8], the 128 after them d beta.
    Partial results: dB, dC [b, h, TP, n]; spans [b, h, TP / 16, 4 warps, 14, 32 lanes]: what flows from s to t, tokens
    (g, 2c), (g, 2c + 1), (g, 2c + 8), (g, 2c + 9), (g + 8, 2c + 8), (g + 8, 2c + 9); from the start to 2c, 2c + 1,
    2c + 8, 2c + 9; from g and g + 8 to the end; from the start to the end; and the gradient of I_prior.
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
    o_keys = (i_bh * TP + t0) * N

    # the adjoint E, [32 keys, 8 rows] fragments, of Ibar negated: from the segment's end, nothing
    for q in range(8):
        for i in gl.static_range(2):
            store4(a_E + q * 8192 + i * 512, zeros)
            store4(a_E + q * 8192 + 4096 + i * 512, zeros)
    a_copy_starts = base + _STARTS + warp * 512 + lane * 16
    copy_async(a_copy, p_rows + (n_sub - 1) * (P * 64) + tid * 4)
    copy_async(a_copy_starts, p_starts + (n_sub - 1) * (P * N) + tid * 4)
    copy_async(a_copy_starts + 2048, p_starts + (n_sub - 1) * (P * N) + 512 + tid * 4)

    p_d = decays + chunk * 272
    last = n_sub - 1
    loaded = _operands(p_B, p_C, p_d + last * 272, (t0 + last * 16).to(gl.int32), T, B_t, C_t, warp, g, c)
    for i_sub in range(n_sub):
        j = n_sub - 1 - i_sub
        B0, B1, C0, C1, within, to_end, from_start, from_start_g, keep = loaded
        C0 = transpose_operand(C0)
        C1 = transpose_operand(C1)
        a_lane = base + _LANES + tid * 16
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
        late_keys = ((B0[1], BB0[1], B0[3], BB0[3]), (B1[1], BB1[1], B1[3], BB1[3]))
        d00 = pack(within[0], within[1])
        d01 = pack(within[2], within[3])
        d11 = pack(within[4], within[5])
        in_g0 = pack(from_start_g[0], from_start_g[0])
        in_g1 = pack(from_start_g[1], from_start_g[1])
        forward = (transpose(d00), transpose(d01), transpose(d11), in_g0, in_g1)
        backward = (d00, d01, d11)
        store4(a_lane + DECAYS, within[0:4])
        store4(a_lane + LATE_DECAYS, (within[4], within[5], keep, zero))
        store4(a_lane + START_DECAYS, from_start)
        store4(a_lane + END_DECAYS, (to_end[0], to_end[1], zero, zero))
        store4(a_lane + SUMS, zeros)  # sums: from g and from g + 8 to the end, from the start to the end

        dC_sum = (zeros, zeros, zeros, zeros)
        dB_sum = (zeros, zeros, zeros, zeros)
        G = (zeros, zeros, zeros, zeros)
        between = (zero, zero, zero, zero, zero, zero)
        begun = zeros
        dprior = zeros
        for q in range(8):
            wait_async(zero_int)
            barrier()
            turn = q % 2
            following = gl.maximum(j * 8 + q + 1 - 16 * ((q + 1) // 8), 0)  # the group of rows that comes next
            copy_async(a_copy + (1 - turn) * 2048, p_rows + following * 512 + tid * 4)
            copy_async(a_copy_starts + (1 - turn) * 4096, p_starts + following * 1024 + tid * 4)
            copy_async(a_copy_starts + (1 - turn) * 4096 + 2048, p_starts + following * 1024 + 512 + tid * 4)
            held = load4(a_lane + LATE_DECAYS)
            sums = load4(a_lane + SUMS)
            if q > 0:
                _sum_rows(a_sum + (1 - turn) * 4096, p_rows + (j * 8 + q - 1) * 512, tid)

            # States at the sub-chunk's start, eight rows, [n, p] and [p, n]
            a_s = base + _STARTS + turn * 4096 + warp * 512 + lane * 4
            b_M = (load1_bits(a_s), load1_bits(a_s + 128), load1_bits(a_s + 256), load1_bits(a_s + 384))
            a_s += 2048
            b_I = (load1_bits(a_s), load1_bits(a_s + 128), load1_bits(a_s + 256), load1_bits(a_s + 384))
            MT = (transpose(b_M[0]), transpose(b_M[1]), transpose(b_M[2]), transpose(b_M[3]))
            IT = (transpose(b_I[0]), transpose(b_I[1]), transpose(b_I[2]), transpose(b_I[3]))
            IT = (IT[0] ^ SIGNS, IT[1] ^ SIGNS, IT[2] ^ SIGNS, IT[3] ^ SIGNS)
            M_of = keys_and_starts(K0, K1, b_M)
            I_of = keys_and_starts(KK0, KK1, b_I)
            of_M = ((B0[0], MT[0], B0[2], MT[1]), (B1[0], MT[2], B1[2], MT[3]))
            of_I = ((BB0[0], IT[0], BB0[2], IT[1]), (BB1[0], IT[2], BB1[2], IT[3]))
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
            decay_out = load4(a_lane + END_DECAYS)
            va = load4(a_ends + turn * 2048)  # v[g], v[g + 8], -beta[g], -beta[g + 8] of row 2c
            vb = load4(a_ends + turn * 2048 + 256)  # of row 2c + 1
            v_end0 = pack(va[0] * decay_out[0], vb[0] * decay_out[0])
            v_end1 = pack(va[1] * decay_out[1], vb[1] * decay_out[1])
            u_end0 = pack(va[2] * decay_out[0], vb[2] * decay_out[0])
            u_end1 = pack(va[3] * decay_out[1], vb[3] * decay_out[1])
            dB_sum = (
                mma8(e0a, e0b, v_end0, dB_sum[0]),
                mma8(e0a, e0b, v_end1, dB_sum[1]),
                mma8(e1a, e1b, v_end0, dB_sum[2]),
                mma8(e1a, e1b, v_end1, dB_sum[3]),
            )
            G = (
                mma8(i0a, i0b, u_end0, G[0]),
                mma8(i0a, i0b, u_end1, G[1]),
                mma8(i1a, i1b, u_end0, G[2]),
                mma8(i1a, i1b, u_end1, G[3]),
            )
            e0a = transpose(e0a)
            e0b = transpose(e0b)
            e1a = transpose(e1a)
            e1b = transpose(e1b)
            i0a = transpose(i0a)
            i0b = transpose(i0b)
            i1a = transpose(i1a)
            i1b = transpose(i1b)
            first_v = over_keys(of_M, e0a, e0b, e1a, e1b, zeros)
            first_u = over_keys(of_I, i0a, i0b, i1a, i1b, zeros)
            late_v = over_keys(late_keys, e0a, e0b, e1a, e1b, zeros)
            late_u = over_keys(late_keys, i0a, i0b, i1a, i1b, zeros)
            dv = (
                first_v[0] * decay_out[0],
                first_v[1] * decay_out[0],
                late_v[0] * decay_out[1],
                late_v[1] * decay_out[1],
            )
            du = (
                first_u[0] * decay_out[0],
                first_u[1] * decay_out[0],
                late_u[2] * decay_out[1],
                late_u[3] * decay_out[1],
            )
            end0 = sums[0] + ((va[0] * dv[0] + vb[0] * dv[1]) + (va[2] * du[0] + vb[2] * du[1]))
            end1 = sums[1] + ((va[1] * dv[2] + vb[1] * dv[3]) + (va[3] * du[2] + vb[3] * du[3]))
            du = scaled(du, -1.0)
            through = gl.where(
                g == 2 * c, first_v[2] + first_u[2], gl.where(g == 2 * c + 1, first_v[3] + first_u[3], 0.0)
            )
            store4(a_lane + SUMS, (end0, end1, sums[2] + through, zero))
            E = (scaled(E0, held[2]), scaled(E1, held[2]), scaled(EI0, held[2]), scaled(EI1, held[2]))
            for r in range(8):
                a_r = turn * 2048 + r * 256
                M, I = row_states(r, a_pairs + a_r, a_prior, c, M_of, I_of, forward)
                dC_sum, dB_sum, G, E, between, begun, dprior, dv, du = row_gradients(
                    r, M, I, a_rows + a_r, a_dy + a_r, a_lane, g, of_M, of_I, late_keys, backward,
                    dC_sum, dB_sum, G, E, between, begun, dprior, dv, du,
                )  # fmt: skip

            store4(a_e, E[0])
            store4(a_e + 512, E[1])
            store4(a_e + 4096, E[2])
            store4(a_e + 4608, E[3])
            a_p = a_part + turn * 4096
            store1(a_p, dv[0])
            store1(a_p + 128, dv[1])
            store1(a_p + 256, dv[2])
            store1(a_p + 384, dv[3])
            store1(a_p + 512, du[0])
            store1(a_p + 640, du[1])
            store1(a_p + 768, du[2])
            store1(a_p + 896, du[3])
        previous = gl.maximum(j - 1, 0)
        ts = (t0 + previous * 16).to(gl.int32)
        loaded = _operands(p_B, p_C, p_d + previous * 272, ts, T, B_t, C_t, warp, g, c)
        barrier()
        _sum_rows(a_sum + 4096, p_rows + (j * 8 + 7) * 512, tid)
        ends = load4(a_lane + LATE_DECAYS)
        sums = load4(a_lane + SUMS)
        o_tile = 2 * c * N + warp * 32 + g
        p_o = dC + o_keys + j * (16 * N) + o_tile
        _store_keys(p_o, dC_sum[0], dC_sum[1], N)
        _store_keys(p_o + 16, dC_sum[2], dC_sum[3], N)
        p_o = dB + o_keys + j * (16 * N) + o_tile
        dB00 = _with_square(dB_sum[0], K0[0], K0[1], G[0])
        dB01 = _with_square(dB_sum[1], K0[2], K0[3], G[1])
        dB10 = _with_square(dB_sum[2], K1[0], K1[1], G[2])
        dB11 = _with_square(dB_sum[3], K1[2], K1[3], G[3])
        _store_keys(p_o, dB00, dB01, N)
        _store_keys(p_o + 16, dB10, dB11, N)
        p_o = spans + (chunk + j) * 1792 + (warp * 448 + lane)
        gl.store(p_o + 128, between[4] * ends[0])
        gl.store(p_o + 160, between[5] * ends[1])
        gl.store(p_o + 320, sums[0])
        gl.store(p_o + 352, sums[1])
        gl.store(p_o + 384, sums[2] * ends[2])
        ends = load4(a_lane + DECAYS)
        gl.store(p_o, between[0] * ends[0])
        gl.store(p_o + 32, between[1] * ends[1])
        gl.store(p_o + 64, between[2] * ends[2])
        gl.store(p_o + 96, between[3] * ends[3])
        ends = load4(a_lane + START_DECAYS)
        gl.store(p_o + 192, begun[0] * ends[0])
        gl.store(p_o + 224, begun[1] * ends[1])
        gl.store(p_o + 256, begun[2] * ends[2])
        gl.store(p_o + 288, begun[3] * ends[3])
        gl.store(p_o + 416, -(dprior[0] + dprior[1] + dprior[2] + dprior[3]))
    wait_async(zero_int)  # no copy lands in shared memory after the program's end
    p_e = adjoints + (i_bh * (NSEG + 1) + i_seg) * 2 * P * N + 2 * c * N + warp * 32 + g
    for q in range(8):
        for k in gl.static_range(2):
            for i in gl.static_range(2):
                e = scaled(load4(a_E + q * 8192 + k * 4096 + i * 512), 1.0 - 2.0 * k)
                p_q = p_e + (q * 8 + k * P) * N + i * 16
                gl.store(p_q, e[0])
                gl.store(p_q + N, e[1])
                gl.store(p_q + 8, e[2])
                gl.store(p_q + N + 8, e[3])
