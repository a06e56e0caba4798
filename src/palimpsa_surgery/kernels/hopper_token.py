"""One token of `hopper_gradients.py`, from the last to the first, and the sums that it leaves."""

from .hopper_block import KEY_PARTS_AT, PRIORS_AT, ROW_SUMS_AT, TOKEN_SUMS
from .hopper_lanes import (
    add_global,
    add_global4,
    from_lane,
    gl,
    jit,
    load1,
    load2,
    load4,
    reciprocal,
    scaled,
    store1,
    store4,
    store_global4,
    warp_barrier,
)


@jit
def add4(a, b):
    """Sum of fours."""
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])


@jit
def _element(M, I, E, J, C, B, S, dy, v, u, dq):
    """One element: what it was before the token, adjoints with the token (J = -E_I), M / I and -Z_I / dy."""
    r = reciprocal(I)
    m = M * r
    z = C * r
    w = z * m
    return M - v * B, I - u * S - dq, E + dy * z, J + dy * w, m, w


@jit
def _row(M, I, E, J, C, B, S, dy, v, u, dq, sums):
    """A row's four keys; adds to `sums`: dC, dB by M and by I for each key, and -Z_I; d v and d beta."""
    M0, I0, E0, J0, m0, w0 = _element(M[0], I[0], E[0], J[0], C[0], B[0], S[0], dy, v, u, dq)
    M1, I1, E1, J1, m1, w1 = _element(M[1], I[1], E[1], J[1], C[1], B[1], S[1], dy, v, u, dq)
    M2, I2, E2, J2, m2, w2 = _element(M[2], I[2], E[2], J[2], C[2], B[2], S[2], dy, v, u, dq)
    M3, I3, E3, J3, m3, w3 = _element(M[3], I[3], E[3], J[3], C[3], B[3], S[3], dy, v, u, dq)
    dC, dB, G, zs = sums
    dC = (dC[0] + dy * m0, dC[1] + dy * m1, dC[2] + dy * m2, dC[3] + dy * m3)
    dB = (dB[0] + E0 * v, dB[1] + E1 * v, dB[2] + E2 * v, dB[3] + E3 * v)
    G = (G[0] + J0 * u, G[1] + J1 * u, G[2] + J2 * u, G[3] + J3 * u)
    zs = zs + dy * ((w0 + w1) + (w2 + w3))
    dv = E0 * B[0] + E1 * B[1] + E2 * B[2] + E3 * B[3]
    du = J0 * S[0] + J1 * S[1] + J2 * S[2] + J3 * S[3]
    return (M0, M1, M2, M3), (I0, I1, I2, I3), (E0, E1, E2, E3), (J0, J1, J2, J3), (dC, dB, G, zs), dv, du


@jit
def _place_of_key_sums(a_sums, lane):
    """Of two keys of four of dC or dB, which eight lanes have parts of, the first of four; lane ^ 8 has the others."""
    return a_sums + (KEY_PARTS_AT + ((lane >> 3) & 1) * 768 + (lane & 7) * 16 + (lane >> 4) * 8)


@jit
def _load_parts(a, distance: gl.constexpr):
    """Four parts of four words."""
    return load4(a), load4(a + distance), load4(a + 2 * distance), load4(a + 3 * distance)


@jit
def _once_known(address, value, nothing):
    """The address, once the value is known: keeps loads from being scheduled all at once. `nothing` is zero."""
    return address | (value.to(gl.int32, bitcast=True) & nothing)


@jit
def _total(parts):
    return add4(add4(parts[0], parts[1]), add4(parts[2], parts[3]))


@jit
def _load_key_sums(a):
    """Sums of four parts of two keys."""
    p0 = load2(a)
    p1 = load2(a + 192)
    p2 = load2(a + 384)
    p3 = load2(a + 576)
    return (p0[0] + p1[0]) + (p2[0] + p3[0]), (p0[1] + p1[1]) + (p2[1] + p3[1])


@jit
def _add_key_sums(sums, pointer, lane, condition):
    """Add what two lanes have of two keys, one key by each; zero where the condition does not hold."""
    second = ((lane >> 3) & 1) != 0
    own = gl.where(second, sums[1], sums[0])
    total = own + from_lane(gl.where(second, sums[0], sums[1]), lane ^ 8)
    add_global(pointer, gl.where(condition, total, 0.0))


@jit
def _load_rows(a_rows):
    """dy, v and u of four rows."""
    return load4(a_rows), load4(a_rows + 256), load4(a_rows + 512)


@jit
def _half(M, I, E, J, C, B, S, dq, sums, rows, half: gl.constexpr):
    """Rows 0 to 3 or 4 to 7 of a lane's eight."""
    dy, v, u = rows
    M_new = ()
    I_new = ()
    E_new = ()
    J_new = ()
    dv = ()
    du = ()
    for i in gl.static_range(4):
        M_j, I_j, E_j, J_j, sums, dv_j, du_j = _row(
            M[4 * half + i], I[4 * half + i], E[4 * half + i], J[4 * half + i], C, B, S, dy[i], v[i], u[i], dq, sums
        )
        M_new += (M_j,)
        I_new += (I_j,)
        E_new += (E_j,)
        J_new += (J_j,)
        dv += (dv_j,)
        du += (du_j,)
    return M_new, I_new, E_new, J_new, sums, dv, du


@jit
def token(M, I, E, J, t, base, a_rows, a_keys, a_scales, p_keys, warp, lane, nothing):
    """Token t. While it is worked on, what lanes left of token t + 1 is summed over the warp."""
    a_sums = base + warp * TOKEN_SUMS
    a_rows = a_rows + t * 768
    a_out = a_sums + ((lane & 3) * 544 + (lane >> 2) * 16)
    a_keys_out = a_sums + (KEY_PARTS_AT + (lane >> 2) * 192 + (lane & 3) * 16)
    after = (t + 1) & 15  # of the block's last token none: its sums, of nothing, go where the first one's will
    zero = (lane * 0).to(gl.float32)
    zeros = (zero, zero, zero, zero)
    sums = (zeros, zeros, zeros, zero)
    warp_barrier()
    C = load4(a_keys + t * 768)
    rows = _load_rows(a_rows)
    B = load4(a_keys + t * 768 + 64)
    S = load4(a_keys + t * 768 + 128)
    dq = load1(a_scales + 2048 + t * 4)
    M0, I0, E0, J0, sums, dv, du = _half(M, I, E, J, C, B, S, dq, sums, rows, 0)
    row_sums = _load_parts(_once_known(a_sums + lane * 16, J0[2][0], nothing), 544)
    key_sums = _load_key_sums(_once_known(_place_of_key_sums(a_sums, lane), J0[3][3], nothing))
    warp_barrier()
    store4(base + ROW_SUMS_AT + after * 2048 + warp * 512 + lane * 16, _total(row_sums))
    store4(a_out, dv)
    store4(a_out + 256, du)
    rows = _load_rows(a_rows + 16)
    M1, I1, E1, J1, sums, dv, du = _half(M, I, E, J, C, B, S, dq, sums, rows, 1)
    _add_key_sums(key_sums, p_keys + after * 128, lane, after != 0)
    store4(a_out + 128, dv)
    store4(a_out + 384, du)
    dC, dB, G, z = sums
    store4(a_keys_out, dC)
    # G is that of -E_I
    dB = (
        dB[0] - (B[0] + B[0]) * G[0],
        dB[1] - (B[1] + B[1]) * G[1],
        dB[2] - (B[2] + B[2]) * G[2],
        dB[3] - (B[3] + B[3]) * G[3],
    )
    store4(a_keys_out + 64, dB)
    store1(_once_known(base + PRIORS_AT + t * 512 + warp * 128 + lane * 4, z, nothing), z)
    return M0 + M1, I0 + I1, E0 + E1, J0 + J1


@jit
def last_token(base, p_keys, warp, lane):
    """What is left of token 0."""
    warp_barrier()
    a_sums = base + warp * TOKEN_SUMS
    store4(base + ROW_SUMS_AT + warp * 512 + lane * 16, _total(_load_parts(a_sums + lane * 16, 544)))
    _add_key_sums(_load_key_sums(_place_of_key_sums(a_sums, lane)), p_keys, lane, lane >= 0)


@jit
def sum_of_warp(v, lane):
    """Sum over the lanes, for all of them."""
    for i in gl.static_range(5):
        v = v + from_lane(v, lane ^ (1 << i))
    return v


@jit
def _four_sums_of_warp(a, b, c, d, lane):
    """Sums over the lanes of four values: the first for lanes 0 to 7, the second for the next eight and so on."""
    upper = lane >= 16
    a, b = (
        gl.where(upper, c, a) + from_lane(gl.where(upper, a, c), lane ^ 16),
        gl.where(upper, d, b) + from_lane(gl.where(upper, b, d), lane ^ 16),
    )
    odd = ((lane >> 3) & 1) != 0
    v = gl.where(odd, b, a) + from_lane(gl.where(odd, a, b), lane ^ 8)
    for i in gl.static_range(3):
        v = v + from_lane(v, lane ^ (1 << i))
    return v


@jit
def add_up(base, a_rows, a_scales, warp, lane, prior, p_rows, p_changes, TP, half, dprior):
    """Sums over warps, of four tokens by each: d v, d beta and the changes of d log alpha; returns dprior with -Z_I.

    Those of the second half of the keys are added to the first's.
    """
    s = lane >> 3  # d v of rows 0 to 3 and 4 to 7 of eight, and d beta
    g = lane & 7
    sign = gl.where(s < 2, 1.0, -1.0)
    a_sums = base + ROW_SUMS_AT + warp * 2048 + lane * 16
    a_rows = a_rows + 256 + warp * 768 + (s >> 1) * 256 + g * 32 + (s & 1) * 16
    a_scales = a_scales + 1024 + warp * 4
    a_priors = base + PRIORS_AT + warp * 512 + lane * 16
    loaded = ()
    for i in gl.static_range(4):
        a = a_sums + i * 8192
        parts = (load4(a), load4(a + 512), load4(a + 1024), load4(a + 1536))
        loaded += ((parts, load4(a_rows + i * 3072), load1(a_scales + i * 16), load4(a_priors + i * 2048)),)
    changes = ()
    totals = ()
    for i in gl.static_range(4):
        parts, operand, r, z = loaded[i]
        total = scaled(_total(parts), sign)
        z = r * ((z[0] + z[1]) + (z[2] + z[3]))
        change = total[0] * operand[0] + total[1] * operand[1] + total[2] * operand[2] + total[3] * operand[3]
        changes += (change - prior * z,)
        totals += (scaled(total, r),)
        dprior = dprior + z
    p = p_rows + ((s >> 1).to(gl.int64) * 64 * TP + (warp * 64 + g * 8 + (s & 1) * 4))
    for _ in range(1 - half):
        for i in gl.static_range(4):
            store_global4(p + 256 * i, totals[i])
    for _ in range(half):
        for i in gl.static_range(4):
            add_global4(p + 256 * i, totals[i])
    change = _four_sums_of_warp(changes[0], changes[1], changes[2], changes[3], lane)
    gl.store(p_changes + (4 * s + warp), change, mask=g == 0)
    return dprior
