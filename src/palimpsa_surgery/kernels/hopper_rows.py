"""One value row of a sub-chunk, 16 tokens by a warp's 32 keys, of the gradient kernel in `hopper_gradients.py`.

Fragments of a [n, t] tile are numbered by 16 keys, then by 8 tokens: 00, 01, 10, 11.
"""

from .hopper_lanes import (
    gl,
    jit,
    load4,
    load4_bits,
    mma8,
    mma16,
    mma_tf32,
    pack,
    reciprocal,
    states,
    times,
    transpose,
)

# Where a lane's words lie, four at a time, from its address in shared memory: C's four fragments, then
# decays from s to t; the last two of them, the sub-chunk's decay; decays from the start to 2c, 2c + 1, 2c + 8, 2c + 9;
# decays from g and g + 8 to the end; sums of the row groups
DECAYS = gl.constexpr(8192)
LATE_DECAYS = gl.constexpr(10240)
START_DECAYS = gl.constexpr(12288)
END_DECAYS = gl.constexpr(14336)
SUMS = gl.constexpr(16384)
ONES = gl.constexpr(0x3F803F80)  # a pair of bfloat16
SIGNS = gl.constexpr(-0x7FFF8000)  # changes the signs of a pair


@jit
def direct_adjoint(M, I, C, dy, dC, dprior):
    """Z and Z R of a fragment, in pairs of tokens, of keys g and g + 8; dC; all Z R added up, before rounding.

    After the pairs Z and Z R as they are, as `mma_tf32` takes tokens 2c and 2c + 1 for columns c and c + 4.
    """
    dy0, dy1 = dy
    # two tokens share a reciprocal, as in the read-out
    s0 = reciprocal(I[0] * I[1])
    s1 = reciprocal(I[2] * I[3])
    r0 = I[1] * s0
    r1 = I[0] * s0
    r2 = I[3] * s1
    r3 = I[2] * s1
    m0 = M[0] * r0
    m1 = M[1] * r1
    m2 = M[2] * r2
    m3 = M[3] * r3
    z0 = (C[0] * r0) * dy0
    z1 = (C[1] * r1) * dy1
    z2 = (C[2] * r2) * dy0
    z3 = (C[3] * r3) * dy1
    y0 = z0 * m0
    y1 = z1 * m1
    y2 = z2 * m2
    y3 = z3 * m3
    dC = (dC[0] + dy0 * m0, dC[1] + dy1 * m1, dC[2] + dy0 * m2, dC[3] + dy1 * m3)
    dprior = (dprior[0] + y0, dprior[1] + y1, dprior[2] + y2, dprior[3] + y3)
    z = (z0, z2, z1, z3)
    y = (y0, y2, y1, y3)
    return pack(z0, z1), pack(z2, z3), pack(y0, y1), pack(y2, y3), z, y, dC, dprior


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
def sum_over_tokens(Q, d, late, one, total):
    """Add the sums over t of D Q to a column of the [s, p] tile total, the one where `one` is not zero.

    Q for tokens s, t: (g, 2c), (g, 2c + 1), (g, 2c + 8), (g, 2c + 9), (g + 8, 2c + 8), (g + 8, 2c + 9).
    """
    return mma16(
        pack(d[0] * Q[0], d[1] * Q[1]), one * 0, pack(d[2] * Q[2], d[3] * Q[3]),
        pack(late[0] * Q[4], late[1] * Q[5]), one, one, total,
    )  # fmt: skip


@jit
def over_keys(operands, b0, b1, b2, b3, zeros):
    """Sums over 32 keys: two first operands [k, n] times the pairs of a [n, columns] tile."""
    a, b = operands
    first = mma16(a[0], a[1], a[2], a[3], b0, b1, zeros)
    return mma16(b[0], b[1], b[2], b[3], b2, b3, first)


@jit
def row_states(r, a_pairs, a_prior, c, M_of, I_of, forward):
    """M and I of row r of a group, as fragments.

    Args:
        r: row of the group.
        a_pairs, a_prior: addresses of its operands (`hopper_scan.prepare_rows`) and of I_prior.
        M_of, I_of: first operands of the products that give M and I (`hopper_lanes.keys_and_starts`).
        forward: pairs of D transposed, three tiles [t, s], and of the decays from the start to tokens g and g + 8.
    """
    zero = (c * 0).to(gl.float32)
    e00, e01, e11, in_g0, in_g1 = forward
    pairs = load4_bits(a_pairs)  # pairs v[2c], v[2c + 8], beta[2c], beta[2c + 8]
    half = gl.where(c * 2 == r, 65535, gl.where(c * 2 + 1 == r, -65536, 0))
    in0 = in_g0 & half
    in1 = in_g1 & half
    zeros = (zero, zero, zero, zero)
    M = states(M_of, times(e00, pairs[0]), times(e01, pairs[0]), times(e11, pairs[1]), in0, in1, zeros)
    priors = load4(a_prior)  # from memory: four registers, where copies of one would cost as many moves
    I = states(I_of, times(e00, pairs[2]), times(e01, pairs[2]), times(e11, pairs[3]), in0, in1, priors)
    return M, I


@jit
def row_gradients(
    r, M, I, a_rows, a_dy, a_lane, g, of_M, of_I, late_keys, backward,
    dC, dB, G, E, between, begun, dprior, dv, du,
):  # fmt: skip
    """Add what row r of a group contributes.

    Args:
        r: as in `row_states`, which gives M and I. The addresses are those of the row's operands and the lane's words.
        of_M, of_I: first operands for sums over keys, for each 16 keys: in rows g the tokens s < 8, in rows g + 8 the
            starting states (Ibar's negated), [k, n].
        late_keys: the same of B for tokens s >= 8 in rows g, of B² in rows g + 8.
        backward: pairs of D, three tiles [s, t].
    """
    zero = (g * 0).to(gl.float32)
    zeros = (zero, zero, zero, zero)
    d00, d01, d11 = backward
    vu = load4(a_rows)  # v[g], v[g + 8], -beta[g], -beta[g + 8]
    dy = load4(a_dy)  # 2c, 2c + 1, 2c + 8, 2c + 9
    here = g == r
    M00, M01, M10, M11 = M
    I00, I01, I10, I11 = I
    z00a, z00b, y00a, y00b, z00, y00, dC00, dprior = direct_adjoint(M00, I00, load4(a_lane), dy[:2], dC[0], dprior)
    z01a, z01b, y01a, y01b, z01, y01, dC01, dprior = direct_adjoint(
        M01, I01, load4(a_lane + 2048), dy[2:], dC[1], dprior
    )
    z10a, z10b, y10a, y10b, z10, y10, dC10, dprior = direct_adjoint(
        M10, I10, load4(a_lane + 4096), dy[:2], dC[2], dprior
    )
    z11a, z11b, y11a, y11b, z11, y11, dC11, dprior = direct_adjoint(
        M11, I11, load4(a_lane + 6144), dy[2:], dC[3], dprior
    )
    dC = (dC00, dC01, dC10, dC11)
    # products over tokens t: dB, G, the adjoint of the start
    dB = over_tokens((z00a, z00b, z01a, z01b, z10a, z10b, z11a, z11b), (d00, d01, d11), vu[0], vu[1], dB)
    G = over_tokens((y00a, y00b, y01a, y01b, y10a, y10b, y11a, y11b), (d00, d01, d11), vu[2], vu[3], G)
    # of which bfloat16 would be the largest error in the gradient of A: what a long memory sends back cancels
    start = load4(a_lane + START_DECAYS)
    b0 = gl.where(here, start[0], 0.0)
    b1 = gl.where(here, start[1], 0.0)
    b2 = gl.where(here, start[2], 0.0)
    b3 = gl.where(here, start[3], 0.0)
    E = (
        mma_tf32(z01, b2, b3, mma_tf32(z00, b0, b1, E[0])),
        mma_tf32(z11, b2, b3, mma_tf32(z10, b0, b1, E[1])),
        mma_tf32(y01, b2, b3, mma_tf32(y00, b0, b1, E[2])),
        mma_tf32(y11, b2, b3, mma_tf32(y10, b0, b1, E[3])),
    )
    # sums over keys: Q [s, t], and the same for the starts [p, t], for earlier and later tokens t
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
    Q0 = over_keys(of_M, z00a, z00b, z10a, z10b, zeros)
    Q1 = over_keys(of_M, z01a, z01b, z11a, z11b, zeros)
    Q2 = over_keys(late_keys, z01a, z01b, z11a, z11b, zeros)
    R0 = over_keys(of_I, y00a, y00b, y10a, y10b, zeros)
    R1 = over_keys(of_I, y01a, y01b, y11a, y11b, zeros)
    R2 = over_keys(late_keys, y01a, y01b, y11a, y11b, zeros)
    m = gl.where(here, 1.0, 0.0)
    begun = (
        begun[0] + m * Q0[2] + m * R0[2],
        begun[1] + m * Q0[3] + m * R0[3],
        begun[2] + m * Q1[2] + m * R1[2],
        begun[3] + m * Q1[3] + m * R1[3],
    )
    Q = (Q0[0], Q0[1], Q1[0], Q1[1], Q2[0], Q2[1])
    R = (R0[0], R0[1], R1[0], R1[1], R2[2], R2[3])
    between = (
        between[0] + vu[0] * Q[0] + vu[2] * R[0],
        between[1] + vu[0] * Q[1] + vu[2] * R[1],
        between[2] + vu[0] * Q[2] + vu[2] * R[2],
        between[3] + vu[0] * Q[3] + vu[2] * R[3],
        between[4] + vu[1] * Q[4] + vu[3] * R[4],
        between[5] + vu[1] * Q[5] + vu[3] * R[5],
    )
    d = load4(a_lane + DECAYS)
    late = load4(a_lane + LATE_DECAYS)
    dv = sum_over_tokens(Q, d, late, gl.where(here, ONES, 0), dv)
    du = sum_over_tokens(R, d, late, gl.where(here, ONES ^ SIGNS, 0), du)
    return dC, dB, G, E, between, begun, dprior, dv, du
