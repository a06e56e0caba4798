"""One token of `hopper_gradients.py`, from the last to the first, and the sums that it leaves."""

from .hopper_block import IDLE_AT, KEY_SUMS_AT, PRIORS_AT, ROW_SUMS_AT
from .hopper_lanes import (
    barrier,
    from_lane,
    gl,
    jit,
    load1,
    load2,
    load4,
    pack,
    reciprocal,
    scaled,
    store1,
    store2,
    store4,
    store_global4,
    store_global4_bits,
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
def _once_known(address, value, nothing):
    """The address, once the value is known: keeps loads from being scheduled all at once. `nothing` is zero."""
    return address | (value.to(gl.int32, bitcast=True) & nothing)


@jit
def _place_of_row_sums(a_sums, lane):
    """Of d v or d beta of two rows, which four lanes have parts of, the first part to load; addresses differ by 16."""
    return a_sums + ((lane >> 4) * 512 + ((lane >> 1) & 7) * 64 + ((lane >> 2) & 3) * 16 + (lane & 1) * 8)


@jit
def _place_of_key_sums(a_sums, lane):
    """Of dC or dB of two keys, which eight lanes have parts of, the first of four parts; lane ^ 8 has the others."""
    return a_sums + (1024 + (lane >> 4) * 512 + ((lane >> 3) & 1) * 320 + (lane & 7) * 8)


@jit
def _sum_parts(a, distance: gl.constexpr):
    """Sums of two words each of four parts, in an order without conflicts of banks."""
    a0, b0 = load2(a)
    a1, b1 = load2(a ^ distance)
    a2, b2 = load2(a ^ (2 * distance))
    a3, b3 = load2(a ^ (3 * distance))
    return (a0 + a1) + (a2 + a3), (b0 + b1) + (b2 + b3)


@jit
def _put_row_sums(a_sums, base, t, warp, lane):
    a, b = _sum_parts(a_sums, 16)
    store2(base + ROW_SUMS_AT + t * 2048 + warp * 256 + lane * 8, a, b)


@jit
def _put_key_sums(a_sums, base, t, warp, lane):
    """Each of two lanes has half of the parts of two keys' sums, and stores one key's."""
    a, b = _sum_parts(a_sums, 64)
    second = ((lane >> 3) & 1)
    total = gl.where(second == 0, a, b) + from_lane(gl.where(second == 0, b, a), lane ^ 8)
    place = (warp >> 2) * 512 + (lane >> 4) * 256 + (warp & 3) * 64 + (lane & 7) * 8 + second * 4
    store1(base + KEY_SUMS_AT + t * 1024 + place, total)


@jit
def token(M, I, E, J, t, base, a_rows, a_keys, a_scales, warp, lane, nothing):
    """Token t. While it is worked on, what lanes left of token t + 1 is summed over the warp."""
    a_sums = base + warp * 2048
    a_rows = a_rows + t * 768
    a_out = a_sums + lane * 16
    zero = (lane * 0).to(gl.float32)
    zeros = (zero, zero, zero, zero)
    sums = (zeros, zeros, zeros, zero)
    warp_barrier()
    C = load4(a_keys + t * 768)
    dy = load4(a_rows)
    v = load4(a_rows + 256)
    u = load4(a_rows + 512)
    B = load4(a_keys + t * 768 + 64)
    S = load4(a_keys + t * 768 + 128)
    dq = load1(a_scales + 2048 + t * 4)
    M0, I0, E0, J0, sums, dv0, du0 = _row(M[0], I[0], E[0], J[0], C, B, S, dy[0], v[0], u[0], dq, sums)
    M1, I1, E1, J1, sums, dv1, du1 = _row(M[1], I[1], E[1], J[1], C, B, S, dy[1], v[1], u[1], dq, sums)
    after = (t + 1) % 16  # of the block's first token it is the last one's place, which is written again
    _put_row_sums(_once_known(_place_of_row_sums(a_sums, lane), J0[3], nothing), base, after, warp, lane)
    _put_key_sums(_once_known(_place_of_key_sums(a_sums, lane), J1[3], nothing), base, after, warp, lane)
    M2, I2, E2, J2, sums, dv2, du2 = _row(M[2], I[2], E[2], J[2], C, B, S, dy[2], v[2], u[2], dq, sums)
    M3, I3, E3, J3, sums, dv3, du3 = _row(M[3], I[3], E[3], J[3], C, B, S, dy[3], v[3], u[3], dq, sums)
    warp_barrier()
    store4(a_out, (dv0, dv1, dv2, dv3))
    store4(a_out + 512, (du0, du1, du2, du3))
    dC, dB, G, z = sums
    store4(a_out + 1024, dC)
    # G is that of -E_I
    dB = (
        dB[0] - (B[0] + B[0]) * G[0],
        dB[1] - (B[1] + B[1]) * G[1],
        dB[2] - (B[2] + B[2]) * G[2],
        dB[3] - (B[3] + B[3]) * G[3],
    )
    store4(a_out + 1536, dB)
    z = z + from_lane(z, lane ^ 1)
    z = z + from_lane(z, lane ^ 2)
    place = PRIORS_AT + t * 256 + warp * 32 + (lane >> 2) * 4
    store1(base + gl.where((lane & 3) == 0, place, IDLE_AT + warp * 128 + lane * 4), z)
    return (M0, M1, M2, M3), (I0, I1, I2, I3), (E0, E1, E2, E3), (J0, J1, J2, J3)


@jit
def last_token(base, warp, lane):
    """What is left of token 0."""
    warp_barrier()
    a_sums = base + warp * 2048
    _put_row_sums(_place_of_row_sums(a_sums, lane), base, 0, warp, lane)
    _put_key_sums(_place_of_key_sums(a_sums, lane), base, 0, warp, lane)


@jit
def sum_of_warp(v, lane):
    """Sum over the lanes, for all of them."""
    for i in gl.static_range(5):
        v = v + from_lane(v, lane ^ (1 << i))
    return v


@jit
def _two_sums_of_warp(a, b, lane):
    """Sums over the lanes of two values: the first for lanes 0 to 15, the second for the others."""
    upper = lane >= 16
    v = gl.where(upper, b, a) + from_lane(gl.where(upper, a, b), lane ^ 16)
    for i in gl.static_range(4):
        v = v + from_lane(v, lane ^ (1 << i))
    return v


@jit
def _load_sums(base, a_rows, a_scales, t, lane):
    """Of a token, parts of d v (lanes 0 to 15) or d beta of four rows, their v or u, 1 / c and parts of -Z_I."""
    rows = ((lane >> 3) & 1) * 1024 + (lane >> 4) * 128 + (lane & 7) * 16
    a = base + ROW_SUMS_AT + t * 2048 + rows
    parts = (load4(a), load4(a + 256), load4(a + 512), load4(a + 768))
    operand = load4(a_rows + 256 + t * 768 + lane * 16)
    return parts, operand, load1(a_scales + 1024 + t * 4), load2(base + PRIORS_AT + t * 256 + lane * 8)


@jit
def add_up(base, a_rows, a_scales, tid, prior, p_rows, p_changes, p_keys, dB_to_dC, TP, dprior):
    """Sums over warps, of two tokens by each: d v, d beta and the changes of d log alpha; returns dprior with -Z_I.

    And of eight keys of a token by each thread, dC or dB.
    """
    warp = (tid >> 5)
    lane = (tid & 31)
    loaded = (
        _load_sums(base, a_rows, a_scales, warp, lane),
        _load_sums(base, a_rows, a_scales, warp + 8, lane),
    )
    barrier()  # the rows may be written anew
    t = (tid >> 4)
    q = ((tid >> 3) & 1)
    a = base + KEY_SUMS_AT + t * 1024 + q * 256 + (tid & 7) * 32
    first = add4(load4(a), load4(a + 512))
    second = add4(load4(a + 16), load4(a + 528))
    p = p_keys + (gl.where(q == 0, dB_to_dC, 0) + (t * 64 + (tid & 7) * 4))
    store_global4_bits(
        p, pack(first[0], first[1]), pack(first[2], first[3]), pack(second[0], second[1]), pack(second[2], second[3])
    )
    sign = gl.where(lane < 16, 1.0, -1.0)
    changes = ()
    for i in gl.static_range(2):
        parts, operand, r, z = loaded[i]
        total = scaled(add4(add4(parts[0], parts[1]), add4(parts[2], parts[3])), sign)
        z = r * (z[0] + z[1])
        change = total[0] * operand[0] + total[1] * operand[1] + total[2] * operand[2] + total[3] * operand[3]
        changes += (change - prior * z,)
        p = p_rows + (((lane >> 4)).to(gl.int64) * 128 * TP + ((8 * i + warp) * 64 + (lane & 15) * 4))
        store_global4(p, scaled(total, r))
        dprior = dprior + z
    change = _two_sums_of_warp(changes[0], changes[1], lane)
    gl.store(p_changes + ((lane >> 4) * 8 + warp), change, mask=(lane & 15) == 0)
    return dprior
