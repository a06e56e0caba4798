"""One value row of a sub-chunk, 16 tokens by a warp's 32 keys, of the gradient kernel in `hopper_gradients.py`.

Fragments of a [n, t] tile are numbered by 16 keys, then by 8 tokens: 00, 01, 10, 11.
"""

from .hopper_lanes import (
    gl,
    jit,
    load4,
    load4_bits,
    mma8,
    mma8_tf32,
    mma16,
    pack,
    reciprocal,
    states,
    times,
    transpose,
)

# Where a lane's words lie, four at a time, from its address in shared memory: C's four fragments, then
# decays from s to t; the last two of them, the sub-chunk's decay, dt; decays from the start to 2c, 2c + 1, 2c + 8,
# 2c + 9; decays from g and g + 8 to the end; sums of the row groups
DECAYS = gl.constexpr(8192)
LATE_DECAYS = gl.constexpr(10240)
START_DECAYS = gl.constexpr(12288)
END_DECAYS = gl.constexpr(14336)
SUMS = gl.constexpr(16384)
ONES = gl.constexpr(0x3F803F80)  # a pair of bfloat16
SIGNS = gl.constexpr(-0x7FFF8000)  # changes the signs of a pair


@jit
def direct_adjoint(M, I, C, dy0, dy1, dC):
    """Z and Z R of a fragment, in pairs of tokens, of keys g and g + 8; Z R in float32; dC."""
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
    y = (z0 * m0, z1 * m1, z2 * m2, z3 * m3)
    dC = (dC[0] + dy0 * m0, dC[1] + dy1 * m1, dC[2] + dy0 * m2, dC[3] + dy1 * m3)
    return pack(z0, z1), pack(z2, z3), pack(y[0], y[1]), pack(y[2], y[3]), y, dC


@jit
def over_tokens(z, d, v, v8, total):
    """Add Z (D ∘ v)ᵀ, products over the tokens t, to the [n, s] tile total; Z as pairs 00a, 00b, 01a, ..., 11b."""
    w = pack(v, v)
    b0 = times(d[0], w)
    b1 = times(d[1], w)
    w = times(d[2], pack(v8, v8))
    return (
        mma16(z[0], z[1], z[2], z[3], b0, b1, total[0]),
        mma8(z[2], z[3], w, total[1]),
        mma16(z[4], z[5], z[6], z[7], b0, b1, total[2]),
        mma8(z[6], z[7], w, total[3]),
    )


@jit
def sum_over_tokens(Q0, Q1, d, late, one, total):
    """Add the sums over t of D Q to a column of the [s, p] tile total, the one where `one` is not zero."""
    return mma16(
        pack(d[0] * Q0[0], d[1] * Q0[1]), one * 0, pack(d[2] * Q1[0], d[3] * Q1[1]),
        pack(late[0] * Q1[2], late[1] * Q1[3]), one, one, total,
    )  # fmt: skip


@jit
def row_gradients(
    r, a_rows, a_pairs, a_dy, a_prior, a_lane, g, c, B0, B1, BB0, BB1, K0, K1, KK0, KK1, decays, b_M, b_I, MT, IT,
    dC, dB, G, E, between, begun, dprior, dv, du,
):  # fmt: skip
    """Add what row r of a group contributes.

    Args:
        r: row of the group. The addresses are those of its operands (`hopper_scan.prepare_rows`) and the lane's words.
        B0, B1, BB0, BB1, K0, K1, KK0, KK1: B and B² as first operands [s, n], and their transposes.
        decays: pairs of D, as [s, t], of D transposed and of the decays from the start to g, g + 8, 2c, 2c + 8.
        b_M, b_I, MT, IT: states at the sub-chunk's start, of eight rows, as first operands [n, p] and [p, n].
    """
    zero_int = g * 0
    zero = zero_int.to(gl.float32)
    zeros = (zero, zero, zero, zero)
    d00, d01, d11, e00, e01, e11, in_g0, in_g1, in_c0, in_c1 = decays
    vu = load4(a_rows)  # v[g], v[g + 8], -beta[g], -beta[g + 8]
    pairs = load4_bits(a_pairs)  # pairs v[2c], v[2c + 8], beta[2c], beta[2c + 8]
    dy = load4(a_dy)  # 2c, 2c + 1, 2c + 8, 2c + 9
    here = g == r
    half = gl.where(c * 2 == r, 65535, gl.where(c * 2 + 1 == r, -65536, 0))
    s_in0 = in_g0 & half
    s_in1 = in_g1 & half
    w00 = times(e00, pairs[0])
    w01 = times(e01, pairs[0])
    w11 = times(e11, pairs[1])
    M00, M01, M10, M11 = states(K0, K1, b_M, w00, w01, w11, s_in0, s_in1, zeros)
    priors = load4(a_prior)  # from memory: four registers, where copies of one would cost as many moves
    w00 = times(e00, pairs[2])
    w01 = times(e01, pairs[2])
    w11 = times(e11, pairs[3])
    I00, I01, I10, I11 = states(KK0, KK1, b_I, w00, w01, w11, s_in0, s_in1, priors)
    # the gradient of I_prior is the sum of Z R, in TF32: terms rounded to bfloat16 cancel less well
    z00a, z00b, y00a, y00b, y00, dC00 = direct_adjoint(M00, I00, load4(a_lane), dy[0], dy[1], dC[0])
    dprior = mma8_tf32(y00, zero + 1.0, dprior)
    z01a, z01b, y01a, y01b, y01, dC01 = direct_adjoint(M01, I01, load4(a_lane + 2048), dy[2], dy[3], dC[1])
    dprior = mma8_tf32(y01, zero + 1.0, dprior)
    z10a, z10b, y10a, y10b, y10, dC10 = direct_adjoint(M10, I10, load4(a_lane + 4096), dy[0], dy[1], dC[2])
    dprior = mma8_tf32(y10, zero + 1.0, dprior)
    z11a, z11b, y11a, y11b, y11, dC11 = direct_adjoint(M11, I11, load4(a_lane + 6144), dy[2], dy[3], dC[3])
    dprior = mma8_tf32(y11, zero + 1.0, dprior)
    dC = (dC00, dC01, dC10, dC11)
    # products over tokens t: dB, G, the adjoint of the start
    dB = over_tokens((z00a, z00b, z01a, z01b, z10a, z10b, z11a, z11b), (d00, d01, d11), vu[0], vu[1], dB)
    G = over_tokens((y00a, y00b, y01a, y01b, y10a, y10b, y11a, y11b), (d00, d01, d11), vu[2], vu[3], G)
    b0 = gl.where(here, in_c0, 0)
    b1 = gl.where(here, in_c1, 0)
    E = (
        mma16(z00a, z00b, z01a, z01b, b0, b1, E[0]),
        mma16(z10a, z10b, z11a, z11b, b0, b1, E[1]),
        mma16(y00a, y00b, y01a, y01b, b0, b1, E[2]),
        mma16(y10a, y10b, y11a, y11b, b0, b1, E[3]),
    )
    # products over keys: Q [s, t], and the same for the starts, of M in row r and of Ibar in row 8 + r
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
    from0 = mma16(MT[0], IT[0], MT[1], IT[1], z00a, z00b, zeros)
    from1 = mma16(MT[0], IT[0], MT[1], IT[1], z01a, z01b, zeros)
    from2 = mma16(MT[0], IT[0], MT[1], IT[1], y00a, y00b, zeros)
    from3 = mma16(MT[0], IT[0], MT[1], IT[1], y01a, y01b, zeros)
    from0 = mma16(MT[2], IT[2], MT[3], IT[3], z10a, z10b, from0)
    from1 = mma16(MT[2], IT[2], MT[3], IT[3], z11a, z11b, from1)
    from2 = mma16(MT[2], IT[2], MT[3], IT[3], y10a, y10b, from2)
    from3 = mma16(MT[2], IT[2], MT[3], IT[3], y11a, y11b, from3)
    m = gl.where(here, 1.0, 0.0)
    begun = (
        begun[0] + m * from0[0] + m * from2[2],
        begun[1] + m * from0[1] + m * from2[3],
        begun[2] + m * from1[0] + m * from3[2],
        begun[3] + m * from1[1] + m * from3[3],
    )
    between = (
        between[0] + vu[0] * Q0[0] + vu[2] * R0[0],
        between[1] + vu[0] * Q0[1] + vu[2] * R0[1],
        between[2] + vu[0] * Q1[0] + vu[2] * R1[0],
        between[3] + vu[0] * Q1[1] + vu[2] * R1[1],
        between[4] + vu[1] * Q1[2] + vu[3] * R1[2],
        between[5] + vu[1] * Q1[3] + vu[3] * R1[3],
    )
    d = load4(a_lane + DECAYS)
    late = load4(a_lane + LATE_DECAYS)
    dv = sum_over_tokens(Q0, Q1, d, late, gl.where(here, ONES, 0), dv)
    du = sum_over_tokens(R0, R1, d, late, gl.where(here, ONES ^ SIGNS, 0), du)
    return dC, dB, G, E, between, begun, dprior, dv, du
