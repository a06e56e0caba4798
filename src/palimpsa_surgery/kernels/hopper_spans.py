"""From where `hopper_gradients.py` goes back in time, in plain Triton: the ends of spans of tokens.

With c the product of the decays since a span's first token, r = 1 / c, M / c and I / c do not decay. A span is as many
blocks of 16 tokens as there are in which neither outgrows its start. For I / c there is a bound, `GROWTH`:

    I / c at the end ≤ r I_prior + Σ r max_p beta max_n B²        I / c at the start ≥ I_prior

M may begin at zero, so what is bounded is its size as writes of random signs make it: by `GROWTH_OF_M`, the growth of
m / c, where m² is decayed by alpha² and gets (dt max_p x max_n B)² from a token; what was written more than 16 tokens
before the segment counts for nothing. (A huge dt would otherwise leave, of the tokens before it, what float32 rounds.)

A block that grows more by itself is no span: it is cut into parts, within which nothing outgrows its start either.
"""

from .triton_jit import jit, tl

GROWTH = 2048.0
GROWTH_OF_M = 16384.0


@jit
def _load_token(p_dt, doc, to_M, t, b_A, dt_t, there, HAS_DOC: tl.constexpr):
    """Log alpha of tokens t, and the square of the most that they add to M."""
    b_dt = tl.load(p_dt + t * dt_t, mask=there, other=0.0)
    log_alpha = -b_A * b_dt
    if HAS_DOC:
        before = tl.load(doc + tl.maximum(t - 1, 0), mask=there, other=0)
        log_alpha = tl.where(tl.load(doc + t, mask=there, other=0) == before, log_alpha, -float("inf"))
    written = b_dt * tl.load(to_M + t, mask=there, other=0.0)
    return log_alpha, written * written


@jit
def _one_after_other(keep_a, a, keep_b, b):
    """What is left of a sum over two stretches of tokens, and of what was there before."""
    return keep_a * keep_b, a * keep_b + b


@jit
def find_spans(
    dt, to_M, to_I, A, prior, doc, scales, factors, parts, dt_b, dt_t, dt_h, T, TP, H,
    S: tl.constexpr, HAS_DOC: tl.constexpr, LIMIT: tl.constexpr, LIMIT_M: tl.constexpr,
):  # fmt: skip
    """The spans of one segment and head, from what tokens add at most; growth up to LIMIT, and LIMIT_M for M.

    Of each block of 16 tokens: parts [b, h, TP / 16], a bit for each token with which a part begins, 1 for the last
    block of a span and 0 for others of it; factors [b, h, TP / 16], what makes of the state before, in its span's
    scale, that in this one's with the decay of the first token (1 within a span). scales [b, h, TP]: r, or for a block
    that is no span the decay from the token to its end.
    """
    J: tl.constexpr = S // 16
    i_seg = tl.program_id(0).to(tl.int64)
    i_bh = tl.program_id(1).to(tl.int64)
    b = i_bh // H
    h = i_bh % H
    o_j = tl.arange(0, J)
    t = i_seg * S + o_j * 16
    b_A = tl.load(A + h)
    b_prior = tl.load(prior + h)
    p_dt = dt + b * dt_b + h * dt_h
    p_doc = doc + b * T
    p_M = to_M + i_bh * TP
    # m² before each block
    log_kept = tl.zeros([J], tl.float32)
    size = tl.zeros([J], tl.float32)
    for i in tl.static_range(-16, 0):
        log_alpha, written = _load_token(p_dt, p_doc, p_M, t + i, b_A, dt_t, (t + i >= 0) & (t + i < T), HAS_DOC)
        size = size * tl.exp(2 * log_alpha) + written
        log_kept += log_alpha
    _, size = tl.associative_scan((tl.exp(2 * log_kept), size), 0, _one_after_other)
    # of each block [j] by itself: log r after the last token of its last part, and what the part's tokens have added
    log_alphas = ()
    log_part = tl.zeros([J], tl.float32)
    added = tl.zeros([J], tl.float32)
    part = tl.full([J], 1, tl.int32)
    first_size = size
    part_size = size
    for i in tl.static_range(16):
        there = t + i < T
        log_alpha, written = _load_token(p_dt, p_doc, p_M, t + i, b_A, dt_t, there, HAS_DOC)
        log_alphas += (log_alpha,)
        size = size * tl.exp(2 * log_alpha) + written
        b_added = tl.load(to_I + i_bh * TP + t + i, mask=there, other=0.0) / b_prior
        if i > 0:
            log_r = log_part - log_alpha
            r = tl.exp(log_r)
            grown = added + r * b_added
            fits = (r + grown <= LIMIT) & (r * r * size <= part_size * (LIMIT_M * LIMIT_M))  # not NaN either
            log_part = tl.where(fits, log_r, 0.0)
            added = tl.where(fits, grown, b_added)
            part_size = tl.where(fits, part_size, size)
            part += tl.where(fits, 0, 1 << i)
        else:
            added = b_added
            first_size = size
            part_size = size
    is_span = part == 1
    # block by block, whether it goes on with the span before
    log_span = tl.zeros([J], tl.float32)  # log r of each block's first token
    factor = tl.zeros([J], tl.float32)
    b_log = 0.0  # log r after the last token of the block before, or zero where that is no span
    b_grown = float("inf")  # what the span's tokens have added so far; none can go on with what is no span
    b_size = 0.0  # m² after the span's first token
    for j in tl.static_range(J):
        b_first = tl.sum(tl.where(o_j == j, log_alphas[0], 0.0), 0)
        b_added = tl.sum(tl.where(o_j == j, added, 0.0), 0)
        b_end = tl.sum(tl.where(o_j == j, log_part, 0.0), 0)
        b_span = tl.sum(tl.where(o_j == j, is_span.to(tl.int32), 0), 0) > 0
        b_first_size = tl.sum(tl.where(o_j == j, first_size, 0.0), 0)
        b_end_size = tl.sum(tl.where(o_j == j, size, 0.0), 0)
        grown = b_grown + tl.exp(b_log - b_first) * b_added
        r = tl.exp(b_log - b_first + b_end)
        fits = (r + grown <= LIMIT) & (r * r * b_end_size <= b_size * (LIMIT_M * LIMIT_M))
        goes_on = fits & b_span & (i_seg * S + j * 16 < T)
        factor = tl.where(o_j == j, tl.where(goes_on, 1.0, tl.exp(b_first - b_log)), factor)
        part = tl.where(o_j == j - 1, tl.where(goes_on, 0, part), part)
        b_start = tl.where(goes_on, b_log - b_first, 0.0)
        log_span = tl.where(o_j == j, b_start, log_span)
        b_log = tl.where(b_span, b_start + b_end, 0.0)
        b_grown = tl.where(b_span, tl.where(goes_on, grown, b_added), float("inf"))
        b_size = tl.where(goes_on, b_size, b_first_size)
    p_j = i_bh * (TP // 16) + i_seg * J + o_j
    tl.store(factors + p_j, factor)
    tl.store(parts + p_j, part)
    later = tl.zeros([J], tl.float32)  # log decay over the tokens after
    for i in tl.static_range(15, -1, -1):
        log_r = log_span + log_part
        tl.store(scales + i_bh * TP + t + i, tl.exp(tl.where(is_span, log_r, later)))
        later += log_alphas[i]
        log_part += log_alphas[i]
