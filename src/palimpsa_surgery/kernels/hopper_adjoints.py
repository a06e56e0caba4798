"""The adjoints of the segments' starts (step 4 of `triton_scan.py`) for Hopper, by products of 16 tokens.

As in `hopper_gradients.py`, in one warp: a program takes a segment, a head, eight value rows and 32 keys. Sub-chunks
from first to last: the state at the sub-chunk's start is carried, as [n, p] accumulators of the eight rows, and
written for the gradient kernel; M, I and from them Z and Z R of one row after the other; their products with what is
left of them at the segment's start add up to the adjoint.
"""

from .hopper_lanes import (
    barrier,
    copy_async,
    gl,
    high,
    jit,
    keys_and_starts,
    load4,
    load4_bits,
    low,
    mma16,
    operand,
    pack,
    reciprocal,
    scaled,
    shared_base,
    square4,
    times,
    transpose,
    transpose_operand,
    wait_async,
)
from .hopper_rows import row_states


@jit
def _direct_adjoint(M, I, C):
    """Z / dy and Z R / dy of a fragment [16 keys, 8 tokens], in pairs of tokens, of rows g and g + 8."""
    r0 = reciprocal(I[0])
    r1 = reciprocal(I[1])
    r2 = reciprocal(I[2])
    r3 = reciprocal(I[3])
    z0 = C[0] * r0
    z1 = C[1] * r1
    z2 = C[2] * r2
    z3 = C[3] * r3
    y0 = pack(z0 * (M[0] * r0), z1 * (M[1] * r1))
    y1 = pack(z2 * (M[2] * r2), z3 * (M[3] * r3))
    return pack(z0, z1), pack(z2, z3), y0, y1


@jit
def _operands(p_B, p_C, p_d, t0, j, T, B_t, C_t, g, c, warp):
    """B, C and decays of sub-chunk j as they lie in memory."""
    ts = t0 + j * 16
    # past the sequence's end dt, x, beta and dy are zero, and B and C those of the last token
    o_g = gl.minimum(g, T - 1 - ts.to(gl.int32))
    o_g8 = gl.minimum(g + 8, T - 1 - ts.to(gl.int32))
    p_b = p_B + ts * B_t
    p_c = p_C + ts * C_t
    p_d += j * 272
    o_n = warp * 16 + c
    return (
        operand(p_b + (o_g * B_t + o_n), p_b + (o_g8 * B_t + o_n)),
        operand(p_b + (o_g * B_t + o_n + 8), p_b + (o_g8 * B_t + o_n + 8)),
        operand(p_c + (o_g * C_t + o_n), p_c + (o_g8 * C_t + o_n)),
        operand(p_c + (o_g * C_t + o_n + 8), p_c + (o_g8 * C_t + o_n + 8)),
        (
            gl.load(p_d + (g * 16 + 2 * c)),
            gl.load(p_d + (g * 16 + 2 * c + 1)),
            gl.load(p_d + (g * 16 + 2 * c + 8)),
            gl.load(p_d + (g * 16 + 2 * c + 9)),
            gl.load(p_d + (g * 16 + 2 * c + 136)),
            gl.load(p_d + (g * 16 + 2 * c + 137)),
        ),
        (  # from the sub-chunk's start to 2c, 2c + 1, 2c + 8, 2c + 9, g, g + 8
            gl.load(p_d + (256 + 2 * c)),
            gl.load(p_d + (257 + 2 * c)),
            gl.load(p_d + (264 + 2 * c)),
            gl.load(p_d + (265 + 2 * c)),
            gl.load(p_d + (256 + g)),
            gl.load(p_d + (264 + g)),
        ),
        (  # from 2c, 2c + 1, 2c + 8, 2c + 9 to the sub-chunk's end
            gl.load(p_d + (c * 32 + 15)),
            gl.load(p_d + (c * 32 + 31)),
            gl.load(p_d + (c * 32 + 143)),
            gl.load(p_d + (c * 32 + 159)),
        ),
        gl.load(p_d + 271 + g * 0),
    )


@jit
def segment_adjoints(
    B, C, prior, rows, decays, segment_states, starts, adjoints,
    B_b, B_t, B_g, C_b, C_t, C_g,
    T, TP, H, HPG, NSEG, S,
):  # fmt: skip
    """Slot k of adjoints [b, h, NSEG + 1, 2, p, n] = adjoint of segment k's start, from its own tokens.

    B, C as int32 pairs of keys, their strides in pairs. rows [b, h, TP / 16, p, 64 words], decays
    [b, h, TP / 16, 272] from `prepare_rows`; segment_states [b, h, NSEG + 1, 2, p, n]. Also M and Ibar before every
    16th token: starts [b, h, TP / 16, p / 8, 2, n, p % 8] bfloat16 as int32 pairs.
    """
    N: gl.constexpr = 128
    P: gl.constexpr = 64
    L: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    shared = gl.allocate_shared_memory(gl.float32, [17, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    lane = gl.arange(0, 32, layout=L)
    g = lane // 4
    c = lane % 4
    zero_int = lane * 0
    zero = zero_int.to(gl.float32)
    zeros = (zero, zero, zero, zero)
    q = gl.program_id(0) // 4
    warp = gl.program_id(0) % 4
    i_seg = gl.program_id(1).to(gl.int64)
    i_bh = gl.program_id(2).to(gl.int64)
    b = i_bh // H
    h = i_bh % H
    t0 = i_seg * S
    n_sub = gl.cdiv(gl.minimum(S, T - t0), 16).to(gl.int32)
    shared.index(16).store(gl.load(prior + h) + zero)
    base = shared_base(zero_int)
    a_prior = base + 2048
    a_copy = base + lane * 16
    a_pairs = base + c * 16
    a_dy = base + 64 + c * 16

    chunk = i_bh * (TP // 16) + i_seg * (S // 16)  # the segment's first sub-chunk
    # words 32 to 63 of eight rows: 8 × 16 bytes a row
    p_rows = rows + (chunk * P + q * 8 + lane // 8) * 64 + 32 + lane % 8 * 4
    p_starts = starts + chunk * (P * N) + q * 1024
    p_B = B + b * B_b + (h // HPG) * B_g
    p_C = C + b * C_b + (h // HPG) * C_g
    o_state = (i_bh * (NSEG + 1) + i_seg) * 2 * P * N + (q * 8 + 2 * c) * N + warp * 32 + g
    p_m = segment_states + o_state
    M0 = (gl.load(p_m), gl.load(p_m + N), gl.load(p_m + 8), gl.load(p_m + N + 8))
    M1 = (gl.load(p_m + 16), gl.load(p_m + N + 16), gl.load(p_m + 24), gl.load(p_m + N + 24))
    p_m = segment_states + o_state + P * N
    I0 = (gl.load(p_m), gl.load(p_m + N), gl.load(p_m + 8), gl.load(p_m + N + 8))
    I1 = (gl.load(p_m + 16), gl.load(p_m + N + 16), gl.load(p_m + 24), gl.load(p_m + N + 24))
    copy_async(a_copy, p_rows)
    copy_async(a_copy + 512, p_rows + 256)
    E0 = zeros
    E1 = zeros
    EI0 = zeros
    EI1 = zeros
    so_far = zero + 1.0  # decay from the segment's start to the sub-chunk's
    p_d = decays + chunk * 272
    ahead = _operands(p_B, p_C, p_d, t0, n_sub * 0, T, B_t, C_t, g, c, warp)  # loaded a sub-chunk ahead
    for j in range(n_sub):
        B0, B1, C0, C1, d, d_in, d_out, keep = ahead
        K0 = transpose_operand(B0)
        K1 = transpose_operand(B1)
        KK0 = square4(K0)
        KK1 = square4(K1)
        C0 = transpose_operand(C0)
        C1 = transpose_operand(C1)
        C00 = (low(C0[0]), high(C0[0]), low(C0[1]), high(C0[1]))
        C01 = (low(C0[2]), high(C0[2]), low(C0[3]), high(C0[3]))
        C10 = (low(C1[0]), high(C1[0]), low(C1[1]), high(C1[1]))
        C11 = (low(C1[2]), high(C1[2]), low(C1[3]), high(C1[3]))
        out0 = pack(d_out[0], d_out[1])
        out1 = pack(d_out[2], d_out[3])
        x0 = d_in[0] * so_far
        x1 = d_in[1] * so_far
        x2 = d_in[2] * so_far
        x3 = d_in[3] * so_far
        forward = (
            transpose(pack(d[0], d[1])),
            transpose(pack(d[2], d[3])),
            transpose(pack(d[4], d[5])),
            pack(d_in[4], d_in[4]),
            pack(d_in[5], d_in[5]),
        )
        so_far *= keep
        b_M = (pack(M0[0], M0[1]), pack(M0[2], M0[3]), pack(M1[0], M1[1]), pack(M1[2], M1[3]))
        b_I = (pack(I0[0], I0[1]), pack(I0[2], I0[3]), pack(I1[0], I1[1]), pack(I1[2], I1[3]))
        M_of = keys_and_starts(K0, K1, b_M)
        I_of = keys_and_starts(KK0, KK1, b_I)
        p_s = p_starts + j * (P * N) + (warp * 128 + lane)
        for i in gl.static_range(4):
            gl.store(p_s + 32 * i, b_M[i])
            gl.store(p_s + 512 + 32 * i, b_I[i])

        wait_async(zero_int)
        barrier()
        turn = j % 2 * 1024
        following = gl.minimum(j + 1, n_sub - 1)
        ahead = _operands(p_B, p_C, p_d, t0, following, T, B_t, C_t, g, c, warp)
        copy_async(a_copy + (1024 - turn), p_rows + following * (P * 64))
        copy_async(a_copy + (1536 - turn), p_rows + following * (P * 64) + 256)
        for r in range(8):
            M, I = row_states(r, a_pairs + (turn + r * 128), a_prior, c, M_of, I_of, forward)
            dy = load4(a_dy + turn + r * 128)  # 2c, 2c + 1, 2c + 8, 2c + 9
            here = g == r
            b0 = gl.where(here, pack(dy[0] * x0, dy[1] * x1), 0)
            b1 = gl.where(here, pack(dy[2] * x2, dy[3] * x3), 0)
            z0, z1, y0, y1 = _direct_adjoint(M[0], I[0], C00)
            z2, z3, y2, y3 = _direct_adjoint(M[1], I[1], C01)
            E0 = mma16(z0, z1, z2, z3, b0, b1, E0)
            EI0 = mma16(y0, y1, y2, y3, b0, b1, EI0)
            z0, z1, y0, y1 = _direct_adjoint(M[2], I[2], C10)
            z2, z3, y2, y3 = _direct_adjoint(M[3], I[3], C11)
            E1 = mma16(z0, z1, z2, z3, b0, b1, E1)
            EI1 = mma16(y0, y1, y2, y3, b0, b1, EI1)
        # the next sub-chunk's start
        pairs = load4_bits(a_pairs + turn + g * 128)
        b0 = times(pairs[0], out0)
        b1 = times(pairs[1], out1)
        M0 = mma16(K0[0], K0[1], K0[2], K0[3], b0, b1, scaled(M0, keep))
        M1 = mma16(K1[0], K1[1], K1[2], K1[3], b0, b1, scaled(M1, keep))
        b0 = times(pairs[2], out0)
        b1 = times(pairs[3], out1)
        I0 = mma16(KK0[0], KK0[1], KK0[2], KK0[3], b0, b1, scaled(I0, keep))
        I1 = mma16(KK1[0], KK1[1], KK1[2], KK1[3], b0, b1, scaled(I1, keep))
    wait_async(zero_int)  # no copy lands in shared memory after the program's end
    p_e = adjoints + o_state
    gl.store(p_e, E0[0])
    gl.store(p_e + N, E0[1])
    gl.store(p_e + 8, E0[2])
    gl.store(p_e + N + 8, E0[3])
    gl.store(p_e + 16, E1[0])
    gl.store(p_e + N + 16, E1[1])
    gl.store(p_e + 24, E1[2])
    gl.store(p_e + N + 24, E1[3])
    p_e = adjoints + o_state + P * N
    gl.store(p_e, -EI0[0])
    gl.store(p_e + N, -EI0[1])
    gl.store(p_e + 8, -EI0[2])
    gl.store(p_e + N + 8, -EI0[3])
    gl.store(p_e + 16, -EI1[0])
    gl.store(p_e + N + 16, -EI1[1])
    gl.store(p_e + 24, -EI1[2])
    gl.store(p_e + N + 24, -EI1[3])
