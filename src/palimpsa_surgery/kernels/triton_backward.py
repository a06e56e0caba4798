"""The kernels of the backward pass of `triton_scan.py`, in plain Triton: steps 4 and 5, and sums of partial results."""

from .triton_forward import reciprocal
from .triton_jit import jit, tl


@jit
def segment_adjoints(
    x, dt, beta, A, B, C, prior, dy, dvar, doc, states, adjoints,
    x_b, x_t, x_h, x_p, dt_b, dt_t, dt_h, beta_b, beta_t, beta_h, beta_p, B_b, B_t, B_g, C_b, C_t, C_g,
    dy_b, dy_t, dy_h, dy_p, dvar_b, dvar_t, dvar_h, dvar_p,
    T, H, HPG, P, N, NSEG, S,
    BP: tl.constexpr, BN: tl.constexpr, HAS_DOC: tl.constexpr, HAS_VAR: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Slot k of adjoints [b, h, NSEG + 1, 2, p, n] = adjoint of segment k's starting state, from its own tokens."""
    i_p = tl.program_id(0)
    i_seg = tl.program_id(1).to(tl.int64)
    i_bh = tl.program_id(2).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    o_p = i_p * BP + tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    m_p = o_p < P
    m_n = o_n < N
    b_A = tl.load(A + h)
    b_prior = tl.load(prior + h)
    t0 = i_seg * S
    p_x = x + b * x_b + h * x_h + o_p * x_p + t0 * x_t
    p_beta = beta + b * beta_b + h * beta_h + o_p * beta_p + t0 * beta_t
    p_dy = dy + b * dy_b + h * dy_h + o_p * dy_p + t0 * dy_t
    p_dvar = dvar + b * dvar_b + h * dvar_h + o_p * dvar_p + t0 * dvar_t
    p_B = B + b * B_b + (h // HPG) * B_g + o_n + t0 * B_t
    p_C = C + b * C_b + (h // HPG) * C_g + o_n + t0 * C_t
    p_dt = dt + b * dt_b + h * dt_h + t0 * dt_t
    p_doc = doc + b * T + t0
    o_s = (i_bh * (NSEG + 1) + i_seg) * 2 * P * N + o_p[:, None] * N + o_n[None, :]
    m_s = m_p[:, None] & m_n[None, :]
    b_M = tl.load(states + o_s, mask=m_s, other=0.0)  # [BP, BN]
    b_I = tl.load(states + o_s + P * N, mask=m_s, other=0.0) + b_prior
    b_E = tl.zeros([BP, BN], tl.float32)
    b_EI = tl.zeros([BP, BN], tl.float32)
    b_w = 1.0
    b_before = 0
    if HAS_DOC:
        b_before = tl.load(doc + b * T + tl.maximum(t0 - 1, 0))
    for _ in range(tl.minimum(S, T - t0)):
        b_dt = tl.load(p_dt)
        b_a = tl.exp(-b_A * b_dt)
        if HAS_DOC:
            b_doc = tl.load(p_doc)
            b_a = tl.where(b_doc == b_before, b_a, 0.0)
            b_before = b_doc
            p_doc += 1
        b_w *= b_a  # decay since the segment's start
        b_v = tl.load(p_x, mask=m_p, other=0.0).to(tl.float32) * b_dt
        b_u = tl.load(p_beta, mask=m_p, other=0.0).to(tl.float32)
        b_dy = tl.load(p_dy, mask=m_p, other=0.0).to(tl.float32) * b_w
        b_B = tl.load(p_B, mask=m_n, other=0.0).to(tl.float32)
        b_C = tl.load(p_C, mask=m_n, other=0.0).to(tl.float32)
        b_M = b_a * b_M + b_v[:, None] * b_B[None, :]
        b_I = (b_a * b_I + (1.0 - b_a) * b_prior) + b_u[:, None] * (b_B * b_B)[None, :]
        b_r = reciprocal(b_I, FAST)
        b_Z0 = b_C[None, :] * b_r
        b_Z = b_dy[:, None] * b_Z0
        b_E += b_Z
        b_EI -= b_Z * (b_M * b_r)
        if HAS_VAR:
            b_dvar = tl.load(p_dvar, mask=m_p, other=0.0) * b_w
            b_EI -= b_dvar[:, None] * (b_Z0 * b_Z0)
            p_dvar += dvar_t
        p_x += x_t
        p_beta += beta_t
        p_dy += dy_t
        p_B += B_t
        p_C += C_t
        p_dt += dt_t
    tl.store(adjoints + o_s, b_E, mask=m_s)
    tl.store(adjoints + o_s + P * N, b_EI, mask=m_s)


@jit
def segment_gradients(
    xT, dt, betaT, A, B, C, prior, dyT, dvarT, doc, states, starts, adjoints,
    dvT, dbetaT, dB, dC, dlog, dprior,
    dt_b, dt_t, dt_h, B_b, B_t, B_g, C_b, C_t, C_g,
    T, BATCH, H, HPG, P, N, NSEG,
    S: tl.constexpr, L: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr,
    HAS_DOC: tl.constexpr, HAS_VAR: tl.constexpr, FAST: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of one segment, one head and one block of keys, sub-chunk by sub-chunk from the last.

    Slot k + 1 of adjoints is the adjoint after segment k and is overwritten; starts [b, h, NSEG, 2, p, n] is scratch.
    Partial results: dvT = d(dt x), dbetaT [key blocks, b, h, p, t]; dB, dC [b, h, t, n]; dlog = d log alpha
    [key blocks, b, h, t]; dprior [key blocks, b, h, NSEG].
    """
    i_n = tl.program_id(0)
    i_seg = tl.program_id(1).to(tl.int64)
    i_bh = tl.program_id(2).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    i_part = i_n * BATCH * H + i_bh
    o_l = tl.arange(0, L)
    o_n = i_n * BN + tl.arange(0, BN)
    m_n = o_n < N
    b_A = tl.load(A + h)
    b_prior = tl.load(prior + h)
    t0 = i_seg * S
    p_dt = dt + b * dt_b + h * dt_h
    p_B = B + b * B_b + (h // HPG) * B_g
    p_C = C + b * C_b + (h // HPG) * C_g
    p_doc = doc + b * T
    p_seg = states + (i_bh * (NSEG + 1) + i_seg) * 2 * P * N  # state at the segment's start
    p_start = starts + (i_bh * NSEG + i_seg) * 2 * P * N  # state at the sub-chunk's start
    p_E = adjoints + (i_bh * (NSEG + 1) + i_seg + 1) * 2 * P * N + o_n
    b_dprior = 0.0
    n_sub = tl.cdiv(tl.minimum(S, T - t0), L)
    for i in range(n_sub):
        j = n_sub - 1 - i
        ts = t0 + j * L
        t = ts + o_l
        m_t = t < T
        b_before = 0
        b_doc = tl.zeros([L], tl.int32)
        if HAS_DOC:
            b_before = tl.load(p_doc + tl.maximum(ts - 1, 0))
            b_doc = tl.load(p_doc + t, mask=m_t, other=-1)

        # The state at the sub-chunk's start: the segment's, decayed, and a product over the tokens between.
        for p0 in range(0, P, BP):
            o_p = p0 + tl.arange(0, BP)
            m_p = o_p < P
            b_M = tl.zeros([BP, BN], tl.float32)
            b_I = tl.zeros([BP, BN], tl.float32)
            b_sum = 0.0  # log decay from the end of the tokens still to come to the sub-chunk's start
            for k in range(j):
                s = ts - (k + 1) * L + o_l
                b_dt = tl.load(p_dt + s * dt_t)
                b_later = tl.load(p_dt + (s + 1) * dt_t, mask=o_l + 1 < L, other=0.0)
                b_w = tl.exp(tl.cumsum(-b_A * b_later, 0, reverse=True) + b_sum)
                b_sum -= b_A * tl.sum(b_dt, 0)
                if HAS_DOC:
                    b_w = tl.where(tl.load(p_doc + s) == b_before, b_w, 0.0)
                o_row = (i_bh * P + o_p[:, None]) * T + s[None, :]
                b_x = tl.load(xT + o_row, mask=m_p[:, None], other=0.0).to(tl.float32)  # [BP, L]
                b_u = tl.load(betaT + o_row, mask=m_p[:, None], other=0.0).to(tl.float32)
                b_B = tl.load(p_B + s[:, None] * B_t + o_n[None, :], mask=m_n[None, :], other=0.0)  # [L, BN]
                b_Bf = b_B.to(tl.float32)
                b_M = tl.dot((b_x * (b_dt * b_w)[None, :]).to(DOT), b_B.to(DOT), acc=b_M, input_precision=PRECISION)
                b_I = tl.dot((b_u * b_w[None, :]).to(DOT), (b_Bf * b_Bf).to(DOT), acc=b_I, input_precision=PRECISION)
            b_keep = tl.exp(b_sum)
            if HAS_DOC:
                b_keep = tl.where(tl.load(p_doc + tl.maximum(t0 - 1, 0)) == b_before, b_keep, 0.0)
            o_s = o_p[:, None] * N + o_n[None, :]
            m_s = m_p[:, None] & m_n[None, :]
            b_M += b_keep * tl.load(p_seg + o_s, mask=m_s, other=0.0)
            b_I += b_keep * tl.load(p_seg + P * N + o_s, mask=m_s, other=0.0)
            tl.store(p_start + o_s, b_M, mask=m_s)
            tl.store(p_start + P * N + o_s, b_I, mask=m_s)
        tl.debug_barrier()

        b_dt = tl.load(p_dt + t * dt_t, mask=m_t, other=0.0)
        b_log = -b_A * b_dt
        # decay from s to t: sums of log alpha over s < r <= t alone, never differences of longer sums
        b_D = tl.exp(tl.cumsum(tl.where(o_l[None, :] > o_l[:, None], b_log[None, :], 0.0), 1))
        b_D = tl.where(o_l[None, :] >= o_l[:, None], b_D, 0.0)  # [s, t]
        b_in = tl.exp(tl.cumsum(b_log, 0))  # from the sub-chunk's start to t
        if HAS_DOC:
            b_D = tl.where(b_doc[:, None] == b_doc[None, :], b_D, 0.0)
            b_in = tl.where(b_doc == b_before, b_in, 0.0)
        # tokens past the sequence's end have dt = 0 and pass the adjoint through
        b_last = o_l == tl.minimum(T - ts, L) - 1
        b_out = tl.sum(tl.where(b_last[None, :], b_D, 0.0), 1)  # from s to the sub-chunk's end
        b_first = tl.sum(tl.where(o_l == 0, b_in, 0.0), 0)
        b_through = tl.sum(tl.where(b_last, b_in, 0.0), 0)  # from the sub-chunk's start to its end
        b_DT = tl.trans(b_D).to(DOT)  # [t, s]
        m_nt = m_n[:, None] & m_t[None, :]
        b_B = tl.load(p_B + t[None, :] * B_t + o_n[:, None], mask=m_nt, other=0.0)  # [BN, L]
        b_C = tl.load(p_C + t[None, :] * C_t + o_n[:, None], mask=m_nt, other=0.0).to(tl.float32)
        b_Bf = b_B.to(tl.float32)
        b_B2 = (b_Bf * b_Bf).to(DOT)
        b_B = b_B.to(DOT)

        # The part of d(dt x) and dbeta that arrives from after the sub-chunk; the rows' loop adds the rest
        b_late = tl.zeros([L], tl.float32)
        for p0 in range(0, P, BP):
            o_p = p0 + tl.arange(0, BP)
            m_p = o_p < P
            o_e = o_p[:, None] * N
            m_e = m_p[:, None] & m_n[None, :]
            b_E = tl.load(p_E[None, :] + o_e, mask=m_e, other=0.0)  # [BP, BN]
            b_EI = tl.load(p_E[None, :] + P * N + o_e, mask=m_e, other=0.0)
            b_dv = tl.dot(b_E.to(DOT), b_B, input_precision=PRECISION) * b_out[None, :]  # [BP, L]
            b_du = tl.dot(b_EI.to(DOT), b_B2, input_precision=PRECISION) * b_out[None, :]
            o_row = o_p[:, None] * T + t[None, :]
            m_row = m_p[:, None] & m_t[None, :]
            b_x = tl.load(xT + i_bh * P * T + o_row, mask=m_row, other=0.0).to(tl.float32)
            b_u = tl.load(betaT + i_bh * P * T + o_row, mask=m_row, other=0.0).to(tl.float32)
            b_late += tl.sum(b_x * b_dt[None, :] * b_dv + b_u * b_du, 0)
            tl.store(dvT + i_part * P * T + o_row, b_dv, mask=m_row)
            tl.store(dbetaT + i_part * P * T + o_row, b_du, mask=m_row)
        tl.debug_barrier()

        b_BT = tl.trans(b_B)
        b_B2T = tl.trans(b_B2)
        b_dC = tl.zeros([BN, L], tl.float32)
        b_dB = tl.zeros([BN, L], tl.float32)
        b_dB2 = tl.zeros([BN, L], tl.float32)
        b_z = tl.zeros([L], tl.float32)
        b_spans = tl.zeros([L, L], tl.float32)  # [s, t]
        b_start = tl.zeros([L], tl.float32)
        b_whole = tl.zeros([BN], tl.float32)
        for p in range(P):
            o_row = (i_bh * P + p) * T + t
            b_v = tl.load(xT + o_row, mask=m_t, other=0.0).to(tl.float32) * b_dt
            b_u = tl.load(betaT + o_row, mask=m_t, other=0.0).to(tl.float32)
            b_dy = tl.load(dyT + o_row, mask=m_t, other=0.0).to(tl.float32)
            b_M0 = tl.load(p_start + p * N + o_n, mask=m_n, other=0.0)
            b_I0 = tl.load(p_start + (P + p) * N + o_n, mask=m_n, other=0.0)
            b_M = tl.dot(
                b_B, (b_D * b_v[:, None]).to(DOT), acc=b_M0[:, None] * b_in[None, :], input_precision=PRECISION
            )  # [BN, L]
            b_I = tl.dot(
                b_B2,
                (b_D * b_u[:, None]).to(DOT),
                acc=b_I0[:, None] * b_in[None, :] + b_prior,
                input_precision=PRECISION,
            )
            b_r = reciprocal(b_I, FAST)
            b_Z0 = b_C * b_r
            b_mu = b_M * b_r
            b_dC += b_dy[None, :] * b_mu
            b_Z = b_dy[None, :] * b_Z0
            b_ZI = -b_Z * b_mu
            if HAS_VAR:
                b_dvar = tl.load(dvarT + o_row, mask=m_t, other=0.0)
                b_g = b_dvar[None, :] * b_Z0
                b_dC += 2.0 * b_g
                b_ZI -= b_g * b_Z0
            b_z += tl.sum(b_ZI, 0)
            b_E = tl.load(p_E + p * N, mask=m_n, other=0.0)
            b_EI = tl.load(p_E + (P + p) * N, mask=m_n, other=0.0)
            b_start += tl.sum(b_Z * b_M0[:, None] + b_ZI * b_I0[:, None], 0)
            b_whole += b_E * b_M0 + b_EI * b_I0
            b_Z = b_Z.to(DOT)
            b_ZI = b_ZI.to(DOT)
            b_Q = tl.dot(b_BT, b_Z, input_precision=PRECISION) * b_D  # [s, t]
            b_QI = tl.dot(b_B2T, b_ZI, input_precision=PRECISION) * b_D
            b_spans += b_Q * b_v[:, None] + b_QI * b_u[:, None]
            o_part = (i_part * P + p) * T + t
            b_dv = tl.load(dvT + o_part, mask=m_t, other=0.0) + tl.sum(b_Q, 1)
            b_du = tl.load(dbetaT + o_part, mask=m_t, other=0.0) + tl.sum(b_QI, 1)
            b_W = tl.dot(b_Z, b_DT, acc=b_E[:, None] * b_out[None, :], input_precision=PRECISION)
            b_WI = tl.dot(b_ZI, b_DT, acc=b_EI[:, None] * b_out[None, :], input_precision=PRECISION)
            b_dB += b_W * b_v[None, :]
            b_dB2 += b_WI * b_u[None, :]
            b_E = tl.sum(tl.where(o_l[None, :] == 0, b_W, 0.0), 1) * b_first
            b_EI = tl.sum(tl.where(o_l[None, :] == 0, b_WI, 0.0), 1) * b_first
            tl.debug_barrier()  # all warps have read what is overwritten now
            tl.store(dvT + o_part, b_dv, mask=m_t)
            tl.store(dbetaT + o_part, b_du, mask=m_t)
            tl.store(p_E + p * N, b_E, mask=m_n)
            tl.store(p_E + (P + p) * N, b_EI, mask=m_n)
        o_out = (i_bh * T + t[None, :]) * N + o_n[:, None]
        tl.store(dC + o_out, b_dC, mask=m_nt)
        tl.store(dB + o_out, b_dB + 2.0 * b_Bf * b_dB2, mask=m_nt)
        # What each token lets through: from s before it to t from it on
        b_q = tl.sum(tl.where(o_l[:, None] < o_l[None, :], tl.cumsum(b_spans, 1, reverse=True), 0.0), 0)
        b_q += tl.cumsum(b_start * b_in, 0, reverse=True)
        b_q += tl.sum(tl.where(o_l[:, None] < o_l[None, :], b_late[:, None], 0.0), 0)
        b_q += b_through * tl.sum(b_whole, 0)
        tl.store(dlog + i_part * T + t, b_q, mask=m_t)
        b_dprior += tl.sum(b_z, 0)
        tl.debug_barrier()
    tl.store(dprior + i_part * NSEG + i_seg, b_dprior)


@jit
def reduce_rows(
    xT, dt, A, dvT, dbetaT, dlog, dx, ddt, dbeta, dA,
    dt_b, dt_t, dt_h, g_b, g_t, g_h, ddt_b, ddt_t, ddt_h,
    T, H, P, PARTS, PART_ROWS, BT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Sum the key blocks' parts: dx and dbeta [b, t, h, p] (strides g_*), ddt [b, t, h], dA [b, h, blocks of t]."""
    i_t = tl.program_id(0).to(tl.int64)
    i_bh = tl.program_id(1).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    t = i_t * BT + tl.arange(0, BT)
    o_p = tl.arange(0, BP)
    m_t = t < T
    m = m_t[:, None] & (o_p < P)[None, :]
    part = (i_bh * 0 + PART_ROWS) * P * T  # in 64 bits
    o_row = (i_bh * P + o_p[None, :]) * T + t[:, None]
    b_dt = tl.load(dt + b * dt_b + t * dt_t + h * dt_h, mask=m_t, other=0.0)
    b_dv = tl.zeros([BT, BP], tl.float32)
    b_du = tl.zeros([BT, BP], tl.float32)
    b_q = tl.zeros([BT], tl.float32)
    p_q = dlog + i_bh * T + t
    for _ in range(PARTS):
        b_dv += tl.load(dvT + o_row, mask=m, other=0.0)
        b_du += tl.load(dbetaT + o_row, mask=m, other=0.0)
        b_q += tl.load(p_q, mask=m_t, other=0.0)
        dvT += part
        dbetaT += part
        p_q += PART_ROWS * T
    b_x = tl.load(xT + o_row, mask=m, other=0.0).to(tl.float32)
    b_ddt = tl.sum(b_dv * b_x, 1) - tl.load(A + h) * b_q
    o_g = b * g_b + t[:, None] * g_t + h * g_h + o_p[None, :]
    tl.store(dx + o_g, (b_dv * b_dt[:, None]).to(dx.dtype.element_ty), mask=m)
    tl.store(dbeta + o_g, b_du.to(dbeta.dtype.element_ty), mask=m)
    tl.store(ddt + b * ddt_b + t * ddt_t + h * ddt_h, b_ddt, mask=m_t)
    tl.store(dA + i_bh * tl.num_programs(0) + i_t, -tl.sum(b_dt * b_q, 0))


@jit
def reduce_heads(part, total, H, PART_SIZE, SIZE, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    """total [2, b, SIZE] (+)= sum over h of part [2, b, h, PART_SIZE], of which the first SIZE = t n count."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    m = o < SIZE
    b_sum = tl.zeros([BLOCK], tl.float32)
    if not FIRST:
        b_sum = tl.load(total + b * SIZE + o, mask=m, other=0.0)
    for h in range(H):
        b_sum += tl.load(part + (b * H + h) * PART_SIZE + o, mask=m, other=0.0).to(tl.float32)
    tl.store(total + b * SIZE + o, b_sum, mask=m)


@jit
def skip_backward(
    x, dy, skip, dx, dskip,
    x_b, x_t, x_h, x_p, dy_b, dy_t, dy_h, dy_p, T, BATCH, H, P, BT: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Of y = ... + skip * x: dx [b, t, h, p] += skip * dy, and the blocks' parts of dskip [blocks of t, b, h]."""
    i = tl.program_id(0).to(tl.int64)
    h = i % H
    b = i // H % BATCH
    t = i // H // BATCH * BT + tl.arange(0, BT)
    o_p = tl.arange(0, BP)
    m = (t < T)[:, None] & (o_p < P)[None, :]
    b_x = tl.load(x + b * x_b + t[:, None] * x_t + h * x_h + o_p[None, :] * x_p, mask=m, other=0.0).to(tl.float32)
    b_dy = tl.load(dy + b * dy_b + t[:, None] * dy_t + h * dy_h + o_p[None, :] * dy_p, mask=m, other=0.0)
    b_dy = b_dy.to(tl.float32)
    p_dx = dx + ((b * T + t[:, None]) * H + h) * P + o_p[None, :]
    b_dx = tl.load(p_dx, mask=m, other=0.0).to(tl.float32) + tl.load(skip + h) * b_dy
    tl.store(p_dx, b_dx.to(dx.dtype.element_ty), mask=m)
    tl.store(dskip + i, tl.sum(tl.sum(b_x * b_dy, 1), 0))
