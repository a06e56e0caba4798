"""What the gradient kernel of `hopper_gradients.py` leaves to matrix products, in plain Triton.

After it and `pass_states`, `carry_rows` and `carry_keys` add what the adjoints E and E_I after a segment send back to
its tokens. With w[s] the decay from token s to the segment's end and v = dt x,

    d v[s] += w[s] E B[s]        d beta[s] += w[s] E_I B[s]²        dB[s] += Eᵀ (w v)[s] + 2 B[s] E_Iᵀ (w beta)[s]

and, of the gradient of log alpha, from s to after the segment flows w[s] (v · E B + beta · E_I B²), from before the
segment decay (E · M_start + E_I · Ibar_start).
"""

from .triton_jit import jit, tl


@jit
def _carry_state(
    A, B, doc, p_dt, rows, states, adjoints, decay, w, flow, whole, p_written, p_out, p_dvx, i_bh, h, T,
    dt_t, w_t, B_t, g_t, TP, NSEG,
    STATE: tl.constexpr, S: tl.constexpr, BT: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HAS_DOC: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What `carry_rows` does for one state, M (STATE = 0) or Ibar (1); doc and B from the batch's row on."""
    i_seg = tl.program_id(0).to(tl.int64)
    o_t = tl.arange(0, BT)
    o_p = tl.arange(0, P)
    o_n = tl.arange(0, N)
    i_out = STATE * tl.num_programs(1) + i_bh
    b_A = tl.load(A + h)
    o_state = o_p[:, None] * N + o_n[None, :]
    b_E = tl.load(adjoints + ((i_bh * (NSEG + 1) + i_seg + 1) * 2 + STATE) * P * N + o_state)  # [P, N]
    b_state = tl.load(states + ((i_bh * (NSEG + 1) + i_seg) * 2 + STATE) * P * N + o_state)
    b_keep = tl.load(decay + i_bh * NSEG + i_seg)
    tl.store(whole + i_out * NSEG + i_seg, tl.sum(tl.sum(b_E * b_state, 1), 0) * b_keep)
    b_ET = tl.trans(b_E.to(DOT))
    b_last = 0
    if HAS_DOC:
        b_last = tl.load(doc + tl.minimum(i_seg * S + S, T) - 1)
    b_sum = 0.0  # log decay from the tokens still to come to the segment's end
    for block in range(S // BT - 1, -1, -1):
        t0 = i_seg * S + block * BT
        m_t = t0 + o_t < T
        b_dt = tl.load(p_dt + (t0 + o_t) * dt_t, mask=m_t, other=0.0)
        # decay to the segment's end, over the later tokens alone: the token's own may be larger by far
        b_later = tl.load(p_dt + (t0 + o_t + 1) * dt_t, mask=(o_t + 1 < BT) & (t0 + o_t + 1 < T), other=0.0)
        b_w = tl.exp(tl.cumsum(-b_A * b_later, 0, reverse=True) + b_sum)
        b_sum -= b_A * tl.sum(b_dt, 0)
        if HAS_DOC:
            b_w = tl.where(tl.load(doc + t0 + o_t, mask=m_t, other=-1) == b_last, b_w, 0.0)
        b_K = tl.load(B + (t0 + o_t[:, None]) * B_t + o_n[None, :], mask=m_t[:, None], other=0.0)  # [BT, N]
        if STATE == 1:
            b_K = b_K.to(tl.float32) * b_K.to(tl.float32)
        b_x = tl.load(p_written + (t0 + o_t[:, None]) * w_t + o_p[None, :], mask=m_t[:, None], other=0.0)
        b_x = b_x.to(tl.float32)
        p_own = rows + ((i_bh * 2 + STATE) * TP + t0 + o_t[:, None]) * P + o_p[None, :]
        b_own = tl.load(p_own, mask=m_t[:, None], other=0.0)
        b_d = tl.dot(b_K.to(DOT), b_ET, input_precision=PRECISION) * b_w[:, None]  # [BT, P]
        b_flow = tl.sum(b_x * b_d, 1)
        b_d += b_own
        if STATE == 0:
            tl.store(w + i_bh * TP + t0 + o_t, b_w, mask=m_t)
            tl.store(p_dvx + t0 + o_t, tl.sum(b_x * b_d, 1), mask=m_t)
            b_flow *= b_dt
            b_d *= b_dt[:, None]
        tl.store(flow + i_out * TP + t0 + o_t, b_flow, mask=m_t)
        p_d = p_out + (t0 + o_t[:, None]) * g_t + o_p[None, :]
        tl.store(p_d, b_d.to(p_out.dtype.element_ty), mask=m_t[:, None])


@jit
def carry_rows(
    x, dt, beta, A, B, doc, rows, states, adjoints, decay, dx, dbeta, dvx, w, flow, whole,
    x_b, x_t, x_h, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, B_b, B_t, g_b, g_t, g_h, T, TP, H, NSEG,
    S: tl.constexpr, BT: tl.constexpr, P: tl.constexpr, N: tl.constexpr, HAS_DOC: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dx or dbeta of one segment and head, BT tokens at a time, and what `carry_keys` and `hopper_scan.sum_flows` need.

    rows [b, h, 2, TP, p] hold what the segment's own tokens cause, d v and d beta. Slot
    k + 1 of adjoints [b, h, NSEG + 1, 2, p, n] is the adjoint after segment k, slot k of states the state before it and
    decay [b, h, NSEG] what it keeps. dx and dbeta have strides g_*; dvx [b, h, TP] = Σ_p x d v; w [b, h, TP]. What
    flows to after the segment, by M and by Ibar: flow [2, b, h, TP] from each token, whole [2, b, h, NSEG] from before.
    """
    i_bh = tl.program_id(1).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    p_doc = doc + b * T
    p_B = B + b * B_b
    p_dt = dt + b * dt_b + h * dt_h
    p_dvx = dvx + i_bh * TP
    o_g = b * g_b + h * g_h
    if tl.program_id(2) == 0:
        _carry_state(
            A, p_B, p_doc, p_dt, rows, states, adjoints, decay, w, flow, whole, x + b * x_b + h * x_h, dx + o_g, p_dvx,
            i_bh, h, T, dt_t, x_t, B_t, g_t, TP, NSEG, 0, S, BT, P, N, HAS_DOC, DOT, PRECISION,
        )  # fmt: skip
    else:
        _carry_state(
            A, p_B, p_doc, p_dt, rows, states, adjoints, decay, w, flow, whole, beta + b * beta_b + h * beta_h,
            dbeta + o_g, p_dvx, i_bh, h, T, dt_t, beta_t, B_t, g_t, TP, NSEG, 1, S, BT, P, N, HAS_DOC, DOT, PRECISION,
        )  # fmt: skip


@jit
def carry_keys(
    x, dt, beta, B, adjoints, w, dB,
    x_b, x_t, x_h, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, B_b, B_t, T, TP, H, NSEG,
    S: tl.constexpr, BT: tl.constexpr, P: tl.constexpr, N: tl.constexpr, BN: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the adjoint after the segment causes, summed over all heads, to dB [b, TP, n].

    Of BT tokens and BN keys; the other arguments are those of `carry_rows`.
    """
    i_n = tl.program_id(0) % (N // BN)
    b = tl.program_id(1).to(tl.int64)
    o_t = tl.arange(0, BT)
    o_p = tl.arange(0, P)
    o_n = i_n * BN + tl.arange(0, BN)
    t0 = (tl.program_id(0) // (N // BN)).to(tl.int64) * BT
    m_t = t0 + o_t < T
    p_dt = dt + b * dt_b + t0 * dt_t + o_t * dt_t
    p_w = w + b * H * TP + t0 + o_t
    p_x = x + b * x_b + t0 * x_t + o_t[:, None] * x_t + o_p[None, :]
    p_u = beta + b * beta_b + t0 * beta_t + o_t[:, None] * beta_t + o_p[None, :]
    p_E = adjoints + (b * H * (NSEG + 1) + t0 // S + 1) * (2 * P * N) + o_p[:, None] * N + o_n[None, :]
    b_M = tl.zeros([BT, BN], tl.float32)
    b_I = tl.zeros([BT, BN], tl.float32)
    for _ in range(H):
        b_w = tl.load(p_w, mask=m_t, other=0.0)
        b_vw = tl.load(p_dt, mask=m_t, other=0.0) * b_w
        b_x = tl.load(p_x, mask=m_t[:, None], other=0.0).to(tl.float32) * b_vw[:, None]  # [BT, P]
        b_M = tl.dot(b_x.to(DOT), tl.load(p_E).to(DOT), acc=b_M, input_precision=PRECISION)
        b_u = tl.load(p_u, mask=m_t[:, None], other=0.0).to(tl.float32) * b_w[:, None]
        b_I = tl.dot(b_u.to(DOT), tl.load(p_E + P * N).to(DOT), acc=b_I, input_precision=PRECISION)
        p_dt += dt_h
        p_w += TP
        p_x += x_h
        p_u += beta_h
        p_E += (NSEG + 1).to(tl.int64) * (2 * P * N)
    b_B = tl.load(B + b * B_b + t0 * B_t + o_t[:, None] * B_t + o_n[None, :], mask=m_t[:, None], other=0.0)
    p_dB = dB + (b * TP + t0 + o_t[:, None]) * N + o_n[None, :]
    b_dB = tl.load(p_dB, mask=m_t[:, None], other=0.0) + b_M + 2.0 * b_B.to(tl.float32) * b_I
    tl.store(p_dB, b_dB, mask=m_t[:, None])
