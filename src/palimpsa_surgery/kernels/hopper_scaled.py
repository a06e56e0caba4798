"""States that an accumulator holds without their decay, and to which one product a token adds what it writes.

With c the product of the decays since the state was last rescaled, M / c and I / c do not decay, and their quotient is
M / I. A token adds v B to the one and u B² + dq to the other, with v = dt x / c, u = beta / c and dq by how much
q = I_prior / c has grown. Both sums are products of depth 8 of bfloat16, in parts that make up for the short type: B
has it already, S = B² is two of them, v three.

    k             0     1     2     3     4     5     6     7
    keys          S_0   S_1   S_0   B     B     1     1     B
    rows for M                      v_0   v_1               v_2
    rows for I    u_0   u_0   u_1               dq_0  dq_1

The operands of 16 tokens are prepared in shared memory. A warp has 16 value rows and a number of blocks of 32 keys; a
lane's fragments of a block are those of two keys and rows, two keys and the other rows, and the same of two other keys.
"""

from .hopper_lanes import (
    beyond,
    from_lane,
    gl,
    high,
    jit,
    load4_bits,
    low,
    mma8,
    pack,
    reciprocal,
    scaled,
    store4,
    upper,
)

LEAST = gl.constexpr(2.0**-16)  # c never falls below: importances of 1e-18 to 1e14 leave products of two finite


@jit
def scales(a, before, q_before, prior, lane):
    """Of 16 tokens with decays a, one a lane: what rescales the state before each, 1 / c and dq; the last c and q.

    `each`: the tokens keep so little that each rescales the state, by its decay alone. Otherwise the first does, by the
    c of `before`, unless the state can go on as it is.
    """
    t = lane % 16
    c = a
    for i in gl.static_range(4):
        c = gl.where(t >= 1 << i, c * from_lane(c, lane - (1 << i)), c)
    total = from_lane(c, lane * 0 + 15)
    as_it_is = before * total >= LEAST
    each = ((total >= LEAST) == 0) & (as_it_is == 0)  # and where a decay is NaN, which then reaches no earlier token
    rescale = gl.where(each, a, 1.0)
    rescale = gl.where((t == 0) & (as_it_is == 0), rescale * before, rescale)
    c = gl.where(each, 1.0, gl.where(as_it_is, before * c, c))
    r = reciprocal(c)
    q = prior * r
    dq = q - rescale * gl.where(t == 0, q_before, from_lane(q, lane - 1))
    return each, rescale, r, dq, from_lane(c, lane * 0 + 15), from_lane(q, lane * 0 + 15)


@jit
def prior_parts(dq, zero):
    """Both parts of dq, each in the half of a register where the rows' operand has it."""
    first = pack(zero, dq)
    second = pack(dq - high(first), zero)
    return first.to(gl.float32, bitcast=True), second.to(gl.float32, bitcast=True)


@jit
def parts(v):
    """The first 16 bits of v, as a pair: all of the square of a bfloat16."""
    return upper(v, beyond(v))


@jit
def _before_one(B):
    """1 and a bfloat16, which is above it."""
    return (B.to(gl.int32, bitcast=True) | 0x3F80).to(gl.float32, bitcast=True)


@jit
def store_keys(a_keys, B, one):
    """A token's operands for four keys, one word for each at the addresses for c = 0 to 3."""
    S = (B[0] * B[0], B[1] * B[1], B[2] * B[2], B[3] * B[3])
    store4(a_keys[0], (parts(S[0]), parts(S[1]), parts(S[2]), parts(S[3])))
    store4(a_keys[1], (upper(S[0], B[0]), upper(S[1], B[1]), upper(S[2], B[2]), upper(S[3], B[3])))
    store4(a_keys[2], (upper(B[0], one), upper(B[1], one), upper(B[2], one), upper(B[3], one)))
    store4(a_keys[3], (_before_one(B[0]), _before_one(B[1]), _before_one(B[2]), _before_one(B[3])))


@jit
def _row(x, beta, v_scale, u_scale, zero):
    """A row's words for c = 1 to 3 of M's operand and for c = 0 and 1 of I's; three parts hold all of v.

    Of a v below 1e-33, what is left below the third part must not become a part of its own.
    """
    v = x * v_scale
    v_1 = beyond(v)
    v_2 = beyond(v_1)
    u = beta * u_scale
    u_1 = pack(beyond(u), zero).to(gl.float32, bitcast=True)
    return upper(zero, v), upper(v_1, zero), upper(zero, v_2), upper(u, u), u_1


@jit
def store_rows(a_rows, rows, v_scale, u_scale, dq_0, dq_1, zero):
    """A token's operands for two rows, for M and then for I, at the addresses for c = 0 to 3."""
    x, beta = rows
    v_0a, v_1a, v_2a, u_0a, u_1a = _row(low(x), low(beta), v_scale, u_scale, zero)
    v_0b, v_1b, v_2b, u_0b, u_1b = _row(high(x), high(beta), v_scale, u_scale, zero)
    store4(a_rows[0], (zero, zero, u_0a, u_0b))
    store4(a_rows[1], (v_0a, v_0b, u_1a, u_1b))
    store4(a_rows[2], (v_1a, v_1b, dq_0, dq_0))
    store4(a_rows[3], (v_2a, v_2b, dq_1, dq_1))


@jit
def update(a_keys, rows, M, I):
    """A token's product with 32 keys: their M and I of 16 rows."""
    k = load4_bits(a_keys)
    M = (
        mma8(k[0], k[1], rows[0], M[0]),
        mma8(k[0], k[1], rows[1], M[1]),
        mma8(k[2], k[3], rows[0], M[2]),
        mma8(k[2], k[3], rows[1], M[3]),
    )
    I = (
        mma8(k[0], k[1], rows[2], I[0]),
        mma8(k[0], k[1], rows[3], I[1]),
        mma8(k[2], k[3], rows[2], I[2]),
        mma8(k[2], k[3], rows[3], I[3]),
    )
    return M, I


@jit
def scaled4(V, factor):
    """A block of 32 keys times a factor."""
    return (scaled(V[0], factor), scaled(V[1], factor), scaled(V[2], factor), scaled(V[3], factor))


@jit
def _fragment(p, initial):
    """Two keys and rows p and p + 2 of a state [p, n]."""
    return (
        gl.load(p) + initial,
        gl.load(p + 256) + initial,
        gl.load(p + 1) + initial,
        gl.load(p + 257) + initial,
    )


@jit
def load_block(p, initial):
    """A lane's part of 32 keys of a state [p, n], from its first row and key."""
    return (
        _fragment(p, initial),
        _fragment(p + 128, initial),
        _fragment(p + 2, initial),
        _fragment(p + 130, initial),
    )
