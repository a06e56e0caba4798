"""The gradients that a segment's own tokens cause (step 5 of `triton_scan.py`'s backward pass) for Hopper.

Time runs forwards through blocks of 16 tokens, to states at the ends of spans (`hopper_spans.py`, `hopper_states.py`),
and then, for each half of the keys, backwards from these. With c the product of the decays since a span's first token,
M / c and I / c do not decay, so a token that is done takes back what it wrote,

    M / c -= v B        I / c -= u B² + dq        with v = dt x / c, u = beta / c, dq by how much I_prior / c has grown

and adds C dy (c / I) to c E and -C dy (c / I) (M / I) to c E_I, which do not decay either. All of it is float32, and no
element is moved: a lane has eight value rows and four keys of M, I, E and E_I, and leaves its sums over them in shared
memory (`hopper_token.py`); what a block's tokens bring lies there too (`hopper_block.py`).

A block that is no span goes in parts, each from a state that products make of the one before the block.

A program takes one segment and head after the other: as many programs as run at a time need room for their states, and
dB and dC of several heads add up without one tensor for each.

The gradient of log alpha at a span's or a part's first token is what flows through there, E · alpha M + E_I · alpha
Ibar; from a token to the next it grows by v · dv + u · dbeta, less what the prior receives. (It is zero after the
segment, but summed up from there, what rounding misses would stay where little is left of larger numbers.)
"""

from .hopper_block import (
    KEYS_AT,
    ROWS_AT,
    SCALES_AT,
    SPANS_AT,
    WORDS,
    copy_block,
    decays,
    parts_of,
    put_keys,
    put_parts,
    put_rows,
    put_scaled,
    put_scales,
    scales_of,
)
from .hopper_lanes import (
    barrier,
    count_bits,
    from_lane,
    gl,
    highest_bit,
    jit,
    load1,
    reciprocal,
    scaled,
    shared_base,
    store_global4,
    thread_anew,
    wait_async,
)
from .hopper_states import STATE_WORDS, leave_states, load_state, part_state, times_all
from .hopper_token import add_up, last_token, sum_of_warp, token

HEAD_DIM, STATE_SIZE = 64, 128  # what the kernel is written for
NUM_WARPS = 4  # of 16 keys each
HALVES = 2  # of the keys, which a program takes one after the other


@jit
def _flow(M, I, E, J, prior, keep, lane):
    """What flows through a span's first token, of a warp's elements: E · alpha M + E_I · alpha Ibar.

    Nothing where nothing is kept: what is left there of a token that was taken back is rounding, which a huge dt would
    make matter.
    """
    zero = prior * 0.0
    flow = (zero, zero, zero, zero)
    for j in gl.static_range(8):
        more = ()
        for k in gl.static_range(4):
            more += (flow[k] + M[j][k] * E[j][k] - (I[j][k] - prior) * J[j][k],)
        flow = more
    return gl.where(keep > 0.0, sum_of_warp((flow[0] + flow[1]) + (flow[2] + flow[3]), lane), 0.0)


@jit
def _put_state(p, V, factor):
    """A lane's elements times a factor to [p, n]."""
    for j in gl.static_range(8):
        store_global4(p + j * 128, scaled(V[j], factor))


@jit
def _back_in_time(
    p_x, p_dt, p_beta, p_A, p_B, p_C, prior, p_doc, p_dy, p_factors, spare, p_adjoint, p_rows, p_keys, p_changes,
    p_flows, p_dprior, x_t, dt_t, beta_t, B_t, C_t, dy_t, TP, dB_to_dC, before, n_blocks, steps, nothing, half,
    zero_int, HAS_DOC: gl.constexpr,
):  # fmt: skip
    """What `segment_gradients` says, of one segment, one head and half of the keys, from the states in `spare`."""
    zero = zero_int.to(gl.float32)
    base = shared_base(zero_int)
    tid = thread_anew(zero_int)
    last_start = (n_blocks - 1) * 16
    copy_block(base, tid, p_x, p_beta, p_dy, p_B, p_C, x_t, beta_t, dy_t, B_t, C_t, last_start, steps)
    # a lane has rows 8 g to 8 g + 7 and keys 16 warp + 4 c to 16 warp + 4 c + 3 of the half
    lane = tid & 31
    warp = tid >> 5
    g = lane >> 2
    c = lane & 3
    o_key = warp * 16 + c * 4
    # dC or dB of the key that it adds up
    p_outs = p_keys + (gl.where(((lane >> 2) & 1) == 0, dB_to_dC, 0) + o_key + (lane >> 4) * 2 + ((lane >> 3) & 1))
    a_keys = base + KEYS_AT + warp * 192 + c * 16
    zeros = (zero, zero, zero, zero)
    E = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    J = E
    M, I = load_state(spare + ((n_blocks - 1) * STATE_WORDS + tid * 4), E, E, zero_int + 1)
    dprior_sum = zero
    put_rows(base, base + ROWS_AT, base + SCALES_AT + last_start * 4, tid, steps - last_start)
    put_keys(base, tid)
    previous = gl.maximum(last_start - 16, 0)
    copy_block(base, tid, p_x, p_beta, p_dy, p_B, p_C, x_t, beta_t, dy_t, B_t, C_t, previous, steps)
    barrier()
    for i_block in range(n_blocks):
        start = (n_blocks - 1 - i_block) * 16
        previous = gl.maximum(start - 16, 0)
        a_scales = base + SCALES_AT + start * 4
        a_rows = base + ROWS_AT + i_block % 2 * 12288
        a_spans = base + SPANS_AT + (start >> 2)
        tid = thread_anew(zero_int)  # each warp its own, which it may write again
        gl.store(p_flows + ((start + (tid & 15)) * 4 + (tid >> 5)), zero + float("nan"), mask=(tid & 31) < 16)
        b_parts = parts_of(start >> 4)
        whole = gl.where(b_parts > 1, 0, 1)
        # the last block of a span
        for _ in range(whole * b_parts):
            factor = gl.where(zero_int + i_block == 0, 0.0, load1(a_spans + 4))
            E = times_all(E, factor)
            J = times_all(J, factor)
        for i_token in range(16 * whole):
            M, I, E, J = token(
                M, I, E, J, 15 - i_token, base, a_rows + g * 32, a_keys, a_scales,
                p_outs + start * 128, warp, lane, nothing,
            )  # fmt: skip
        # or a block that is no span, in parts
        for _ in range(1 - whole):
            tid = thread_anew(zero_int)
            t = tid & 15
            lane = tid & 31
            warp = tid >> 5
            g = lane >> 2
            c = lane & 3
            alpha, d = decays(p_dt, p_doc, dt_t, gl.load(p_A), start, steps, before, t, HAS_DOC)
            r = put_parts(base, a_scales, alpha, d, b_parts, prior, tid)
            put_scaled(base, a_rows, p_x, p_beta, x_t, beta_t, d, r, start, steps, tid)
            last = 15
            for _ in range(count_bits(b_parts)):
                first = highest_bit(b_parts & ((2 << last) - 1))
                v_scales, u_scales, kept = scales_of(alpha, d, r, t, first, last, lane, c)
                r_end = from_lane(r, zero_int + last)
                p_spare = spare + ((start >> 4) * STATE_WORDS + thread_anew(zero_int) * 4)
                M, I = part_state(
                    M, I, p_spare, base, v_scales, u_scales, kept, prior + zero, prior * r_end, warp, lane
                )
                factor = gl.where(zero_int + i_block == 0, 0.0, load1(a_spans + 4))
                after = gl.where(zero_int + last == 15, factor, from_lane(alpha, zero_int + (last + 1)))
                E = times_all(E, after * reciprocal(r_end))
                J = times_all(J, after * reciprocal(r_end))
                for i_token in range(last - first + 1):
                    M, I, E, J = token(
                        M, I, E, J, last - i_token, base, a_rows + g * 32, a_keys, a_scales,
                        p_outs + start * 128, warp, lane, nothing,
                    )  # fmt: skip
                keep = gl.where(zero_int + first == 0, load1(a_spans), from_lane(alpha, zero_int + first))
                flow = _flow(M, I, E, J, prior + zero, keep, lane)
                gl.store(p_flows + ((start + first) * 4 + warp), flow, mask=lane == 0)
                last = first - 1
        # the first block of a span
        begins = (start == 0) | (parts_of((start >> 4) - 1) > 0)
        for _ in range(gl.where(begins & (parts_of(start >> 4) <= 1), 1, 0)):
            flow = _flow(M, I, E, J, prior + zero, load1(a_spans), lane)
            gl.store(p_flows + (start * 4 + warp), flow, mask=lane == 0)
        ends = gl.where((start > 0) & (parts_of((start >> 4) - 1) == 1), 1, 0) + zero_int
        tid = thread_anew(zero_int)
        M, I = load_state(spare + ((previous >> 4) * STATE_WORDS + tid * 4), M, I, ends)
        a_next = base + ROWS_AT + (i_block + 1) % 2 * 12288
        put_rows(base, a_next, base + SCALES_AT + previous * 4, tid, steps - previous)
        last_token(base, p_outs + start * 128, warp, lane)
        barrier()
        tid = thread_anew(zero_int)
        dprior_sum = add_up(
            base, a_rows, a_scales, tid >> 5, tid & 31, prior, p_rows + start * 64, p_changes + start, TP, half,
            dprior_sum,
        )  # fmt: skip
        put_keys(base, tid)
        before_that = gl.maximum(start - 32, 0)
        copy_block(base, tid, p_x, p_beta, p_dy, p_B, p_C, x_t, beta_t, dy_t, B_t, C_t, before_that, steps)
        barrier()
    factor = gl.load(p_factors) + zero
    wait_async(zero_int)  # no copy lands in shared memory later
    dprior_sum = sum_of_warp(dprior_sum, lane)
    gl.store(p_dprior + warp, -dprior_sum, mask=lane == 0)
    p_e = p_adjoint + (g * 8 * 128 + o_key)
    _put_state(p_e, E, factor)
    _put_state(p_e + 8192, J, -factor)


@jit
def _one_segment(
    x, dt, beta, A, B, C, prior, doc, dy, scales, factors, parts, states, spare, adjoints, rows, keys, changes, flows,
    dprior, x_b, x_t, x_h, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, B_b, B_t, B_g, C_b, C_t, C_g, dy_b, dy_t, dy_h,
    T, TP, H, HPG, NSEG, S, i_seg, b, h, n_b, zero_int, HAS_DOC: gl.constexpr,
):  # fmt: skip
    """What `segment_gradients` says, of one segment and one head."""
    N: gl.constexpr = 128
    P: gl.constexpr = 64
    base = shared_base(zero_int)
    i_seg = gl.to_tensor(i_seg).to(gl.int64)
    b = gl.to_tensor(b).to(gl.int64)
    h = gl.to_tensor(h).to(gl.int64)
    n_b = gl.to_tensor(n_b).to(gl.int64)
    i_bh = b * H + h
    t0 = i_seg * S
    steps = gl.minimum(S, T - t0).to(gl.int32)
    n_blocks = gl.cdiv(steps, 16)
    b_prior = gl.load(prior + h)
    chunk = i_bh * (TP // 16) + i_seg * (S // 16)  # the segment's first block
    p_x = x + (b * x_b + h * x_h + t0 * x_t)
    p_dt = dt + (b * dt_b + h * dt_h + t0 * dt_t)
    p_beta = beta + (b * beta_b + h * beta_h + t0 * beta_t)
    p_B = B + (b * B_b + (h // HPG) * B_g + t0 * B_t)
    p_C = C + (b * C_b + (h // HPG) * C_g + t0 * C_t)
    o_state = (i_bh * (NSEG + 1) + i_seg) * 2 * P * N
    put_scales(
        base, p_dt, scales + chunk * 16, factors + chunk, parts + chunk, dt_t, b_prior, steps, thread_anew(zero_int),
        n_blocks * 16,
    )  # fmt: skip
    barrier()
    leave_states(
        base, spare, states + o_state, p_x, p_beta, p_B, x_t, beta_t, B_t, b_prior, n_blocks, steps, S, zero_int
    )
    for half in range(2):
        i_half = half * n_b * H + i_bh
        _back_in_time(
            p_x, p_dt, p_beta, A + h, p_B + half * 32, p_C + half * 32, b_prior, doc + (b * T + t0),
            dy + (b * dy_b + h * dy_h + t0 * dy_t), factors + chunk, spare + half * (S // 16 * STATE_WORDS),
            adjoints + (o_state + half * 64), rows + (i_bh * 2 * TP + t0) * P, keys + ((b * TP + t0) * N + half * 64),
            changes + (i_half * TP + t0), flows + (i_half * TP + t0) * 4, dprior + (i_half * NSEG + i_seg) * 4,
            x_t, dt_t, beta_t, B_t, C_t, dy_t, TP, n_b * TP * N,
            gl.maximum(-1, -t0).to(gl.int32),  # the token before the segment, where there is one
            n_blocks, steps,
            T >> 31,  # zero, which the compiler cannot know
            half, zero_int, HAS_DOC,
        )  # fmt: skip


@jit
def segment_gradients(
    x, dt, beta, A, B, C, prior, doc, dy, scales, factors, parts, states, spare, adjoints, rows, keys, changes, flows,
    dprior, x_b, x_t, x_h, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, B_b, B_t, B_g, C_b, C_t, C_g, dy_b, dy_t, dy_h,
    T, TP, BATCH, H, HPG, NSEG, S, SHARES, HAS_DOC: gl.constexpr,
):  # fmt: skip
    """All gradients that each segment's own tokens cause.

    x, beta, B, C and dy are int32 pairs, and their strides are in pairs; scales, factors and parts are those of
    `hopper_spans.py`, spare [programs, 2, S / 16, 2, 8, 512] is for states at the ends of spans. Slot k of states and
    adjoints [b, h, NSEG + 1, 2, p, n] is the state before segment k, and becomes the adjoint of it. rows [b, h, 2, TP,
    p]: d v and d beta. Of each half of the keys: flows [2, b, h, TP, 4], by each warp, d log alpha of a span's or a
    part's first token, and NaN for others; changes [2, b, h, TP], by how much it grows from a token to the next;
    dprior [2, b, h, NSEG, 4]. To keys [SHARES, 2, b, TP, n] dB and dC of each share of the heads, every SHARES-th, are
    added: by one program, one head after the other.
    """
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    shared = gl.allocate_shared_memory(gl.float32, [WORDS, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    zero_int = gl.arange(0, 128, layout=L) * 0
    zero = zero_int.to(gl.float32)
    shared.index(0).store(zero)  # what is not used is not allocated; this waits for all threads
    spare += gl.program_id(0).to(gl.int64) * (2 * (S // 16) * STATE_WORDS)
    for i in range(gl.program_id(0), NSEG * BATCH * SHARES, gl.num_programs(0)):
        i_seg = i % NSEG
        b = i // NSEG % BATCH
        share = i // NSEG // BATCH
        p_keys = keys + gl.to_tensor(share).to(gl.int64) * 2 * BATCH * TP * 128
        for h in range(share, H, SHARES):
            _one_segment(
                x, dt, beta, A, B, C, prior, doc, dy, scales, factors, parts, states, spare, adjoints, rows, p_keys,
                changes, flows, dprior, x_b, x_t, x_h, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, B_b, B_t, B_g,
                C_b, C_t, C_g, dy_b, dy_t, dy_h, T, TP, H, HPG, NSEG, S, i_seg, b, h, BATCH, zero_int, HAS_DOC,
            )  # fmt: skip
