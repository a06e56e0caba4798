"""The states M and I from which `hopper_gradients.py` goes back in time, a lane's 32 elements of each.

Forwards through the blocks of a segment: after the block with which a span ends, and before one in parts, they are left
in global memory, from where the same thread takes them again. They are float32 and made of the products that going
back takes away again, or what is left would be what they differ by: v and u are cut to 16 bits there and here, in two
parts of bfloat16, and B² is rounded. (Within a block in parts v and u are not cut, and three parts hold keys times
their scales.) Tensor cores cut their sums off, so a state is never what they add to.
"""

from .hopper_block import KEYS_AT, PAIRS_AT, SCALES_AT, SPANS_AT, WRITTEN, copy_written, parts_of, put_written
from .hopper_lanes import (
    barrier,
    beyond,
    gl,
    jit,
    load1,
    load4_bits,
    load_global4_if,
    load_transposed,
    mma16,
    scaled,
    store_global4,
    thread_anew,
    upper,
    wait_async,
)
from .hopper_token import add4

STATE_WORDS = gl.constexpr(8192)  # of M and I of 64 keys


@jit
def times_all(V, factor):
    """A state's or adjoint's 32 elements times a factor."""
    rows = ()
    for j in gl.static_range(8):
        rows += (scaled(V[j], factor),)
    return rows


@jit
def load_state(pointer, M, I, condition):
    """M and I as `leave_states` left them, or as they are where the condition does not hold."""
    M_new = ()
    I_new = ()
    for j in gl.static_range(8):
        M_new += (load_global4_if(pointer + 512 * j, M[j], condition),)
        I_new += (load_global4_if(pointer + (4096 + 512 * j), I[j], condition),)
    return M_new, I_new


@jit
def _store_state(pointer, M, I, factor, more):
    """M and I times a factor, and I and more, to where the pointer, four words a thread, says."""
    for j in gl.static_range(8):
        store_global4(pointer + 512 * j, scaled(M[j], factor))
        row = (I[j][0] * factor + more, I[j][1] * factor + more, I[j][2] * factor + more, I[j][3] * factor + more)
        store_global4(pointer + (4096 + 512 * j), row)


@jit
def _first_state(p, zero):
    """A lane's elements of a state [p, 128], from the address of the first."""
    rows = ()
    for j in gl.static_range(8):
        rows += (load_global4_if(p + j * 128, (zero, zero, zero, zero), zero.to(gl.int32) + 1),)
    return rows


@jit
def _two_rows(V, tiles, factor):
    """Two rows of a lane times a factor, and a product's tiles of two keys each."""
    a, b = tiles
    return (
        (V[0][0] * factor + a[0], V[0][1] * factor + a[1], V[0][2] * factor + b[0], V[0][3] * factor + b[1]),
        (V[1][0] * factor + a[2], V[1][1] * factor + a[3], V[1][2] * factor + b[2], V[1][3] * factor + b[3]),
    )


@jit
def _tiles(first, second, keys, zero):
    """Products of 16 rows, in two parts, and twice eight keys."""
    found = ()
    for u in gl.static_range(2):
        tile = mma16(second[0], second[1], second[2], second[3], keys[2 * u], keys[2 * u + 1], (zero, zero, zero, zero))
        found += (mma16(first[0], first[1], first[2], first[3], keys[2 * u], keys[2 * u + 1], tile),)
    return found


@jit
def _add_product(V, W, a_rows, a_keys, factor):
    """A state's halves times a factor and what 16 tokens write, of `put_written`'s operands."""
    zero = (a_rows * 0).to(gl.float32)
    V_keys = load_transposed(a_keys)
    W_keys = load_transposed(a_keys + 4608)
    V_new = ()
    W_new = ()
    for i in gl.static_range(4):
        first = load4_bits(a_rows + 512 * i)
        second = load4_bits(a_rows + (2048 + 512 * i))
        V_new += _two_rows((V[2 * i], V[2 * i + 1]), _tiles(first, second, V_keys, zero), factor)
        W_new += _two_rows((W[2 * i], W[2 * i + 1]), _tiles(first, second, W_keys, zero), factor)
    return V_new, W_new


@jit
def leave_states(base, spare, p_state, p_x, p_beta, p_B, x_t, beta_t, B_t, prior, n_blocks, steps, S, zero_int):
    """Through the blocks of a segment, from the state before it [2, p, n], to spare [2, S / 16, 2, 8, 512]."""
    zero = zero_int.to(gl.float32)
    last_start = (n_blocks - 1) * 16
    tid = thread_anew(zero_int)
    copy_written(base, tid, p_x, p_beta, p_B, x_t, beta_t, B_t, 0, steps)
    p = p_state + (((tid & 31) >> 2) * 1024 + (tid >> 5) * 16 + (tid & 3) * 4)
    M = _first_state(p, zero)
    I = _first_state(p + 8192, zero)
    M_2 = _first_state(p + 64, zero)
    I_2 = _first_state(p + 8256, zero)
    for i_block in range(n_blocks):
        start = i_block * 16
        tid = thread_anew(zero_int)
        a_operands = base + i_block % 2 * WRITTEN
        a_scales = base + SCALES_AT + start * 4
        put_written(base, a_operands, a_scales, tid, steps - start)
        copy_written(base, tid, p_x, p_beta, p_B, x_t, beta_t, B_t, gl.minimum(start + 16, last_start), steps)
        parts = parts_of(i_block)
        factor = load1(base + SPANS_AT + i_block * 4)
        p = spare + (i_block * STATE_WORDS + tid * 4)
        p_2 = p + S // 16 * STATE_WORDS
        for _ in range(gl.where(parts > 1, 1, 0)):
            _store_state(p, M, I, factor, zero)
            _store_state(p_2, M_2, I_2, factor, zero)
            factor = factor * load1(a_scales + 1024)
        barrier()
        lane = tid & 31
        a_rows = a_operands + (lane ^ (lane >> 3)) * 16
        a_keys = a_operands + (8192 + (lane & 15) * 144 + (tid >> 5) * 32 + (lane >> 4) * 16)
        M, M_2 = _add_product(M, M_2, a_rows, a_keys, factor)
        I, I_2 = _add_product(I, I_2, a_rows + 4096, a_keys + 2304, factor)
        for _ in range(gl.where(parts == 1, 1, 0)):
            more = prior * load1(a_scales + 1084)
            _store_state(p, M, I, zero + 1.0, more)
            _store_state(p_2, M_2, I_2, zero + 1.0, more)
    wait_async(zero_int)


@jit
def _three_parts(a, b):
    """Two float32 as three pairs of bfloat16, whose sum is all of them."""
    a1 = beyond(a)
    b1 = beyond(b)
    a2 = beyond(a1)
    b2 = beyond(b1)
    return (
        upper(a, b).to(gl.int32, bitcast=True),
        upper(a1, b1).to(gl.int32, bitcast=True),
        upper(a2, b2).to(gl.int32, bitcast=True),
    )


@jit
def _written(a_pairs, a_keys, scales):
    """What 16 tokens write, scaled: eight tiles of 16 rows × 8 keys, products of x or beta, bfloat16, with three parts.

    `scales` of tokens 2 c, 2 c + 1, 2 c + 8 and 2 c + 9. Of tile 2 i + u a lane has rows 2 i and 2 i + 1 of its eight
    and keys 2 u and 2 u + 1 of its four.
    """
    s0, s1, s8, s9 = scales
    zero = (a_keys * 0).to(gl.float32)
    tiles = ()
    parts = ()
    for u in gl.static_range(2):
        a = a_keys + 8 * u
        parts += (
            (
                _three_parts(load1(a) * s0, load1(a + 768) * s1),
                _three_parts(load1(a + 6144) * s8, load1(a + 6912) * s9),
            ),
        )
    for i in gl.static_range(4):
        a0, a1, a2, a3 = load4_bits(a_pairs + 512 * i)
        for u in gl.static_range(2):
            first, second = parts[u]
            tile = mma16(a0, a1, a2, a3, first[2], second[2], (zero, zero, zero, zero))
            tile = mma16(a0, a1, a2, a3, first[1], second[1], tile)
            tiles += (mma16(a0, a1, a2, a3, first[0], second[0], tile),)
    return tiles


@jit
def _from_tiles(tiles, j: gl.constexpr):
    """A lane's row j of tiles as of `_written`."""
    i: gl.constexpr = j // 2 * 2
    k: gl.constexpr = j % 2 * 2
    return (tiles[i][k], tiles[i][k + 1], tiles[i + 1][k], tiles[i + 1][k + 1])


@jit
def part_state(M, I, pointer, base, v_scales, u_scales, kept, prior, prior_end, warp, lane):
    """M and I after a token of a block in parts: `kept` of the state before it, and what was written since.

    `prior` and `prior_end`: I_prior / c of the block's first token and of this one.
    """
    g = lane >> 2
    k_g = (g >> 1) * 4 + (g & 1)  # of a tile's column g; two keys further, the other tile's
    a_pairs = base + PAIRS_AT + (lane ^ (lane >> 3)) * 16
    a_keys = base + (KEYS_AT + 64) + (lane & 3) * 1536 + warp * 192 + k_g * 4
    M, I = load_state(pointer, M, I, lane * 0 + 1)
    tiles = _written(a_pairs, a_keys, v_scales)
    M_new = ()
    for j in gl.static_range(8):
        M_new += (add4(scaled(M[j], kept), _from_tiles(tiles, j)),)
    tiles = _written(a_pairs + 2048, a_keys + 64, u_scales)
    grown = prior_end - prior
    I_new = ()
    for j in gl.static_range(8):
        new = _from_tiles(tiles, j)
        row = ()
        for k in gl.static_range(4):
            row += ((I[j][k] * kept + prior) + (new[k] + grown),)
        I_new += (row,)
    return M_new, I_new
