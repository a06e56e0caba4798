"""The Palimpsa scan in plain PyTorch, for any device: sub-chunks by matrix products, a loop over sub-chunks.

Letters: b batch, t and s time within a sub-chunk, g groups, k heads of a group, p head_dim, n state_size.

Only the division couples M and Ibar, so everything else is a matrix product. In a sub-chunk,

    M[t]    = sum_s decay(t, s) (dt x)[s] ⊗ B[s]  + decay(t, start) M[start]
    Ibar[t] = sum_s decay(t, s) beta[s] ⊗ B[s]²   + decay(t, start) Ibar[start]

and the adjoints are products with the direct adjoints of M and Ibar at each token,

    Z = C dy / I,   Z_I = -Z M / I - dvar C² / I²   with I = I_prior + Ibar.

States are kept only every `SEGMENT` tokens; the backward pass recomputes what lies between. The gradient of
log alpha is a sum over the spans that contain a token, each formed inside its sub-chunk, so nothing cancels.
"""

import torch
from torch import Tensor

from .decay import decay_from_start, decay_within, document_numbers
from .triton_jit import NAMESPACE

# Sub-chunks of 16 tokens keep [heads, 16, head_dim, state_size] in a CPU's second-level cache at tiny-mamba2's
# size, and match the depth of a tensor-core product.
SUBCHUNK = 16
SEGMENT = 256


class _Subchunk:
    """Operands of one sub-chunk in the computing type, grouped by B/C group."""

    def __init__(self, inputs, documents: Tensor | None, start: int, stop: int):
        x, dt, A, B, C, beta = inputs
        batch, _, heads, head_dim = x.shape
        groups = B.shape[2]
        shape = (batch, stop - start, groups, heads // groups)
        dtype = A.dtype
        self.dt = dt[:, start:stop].to(dtype).view(shape).permute(0, 2, 3, 1)  # [b, g, k, t]
        self.x = x[:, start:stop].to(dtype).reshape(*shape, head_dim).permute(0, 2, 3, 1, 4)  # [b, g, k, t, p]
        self.value = self.dt[..., None] * self.x
        self.beta = beta[:, start:stop].to(dtype).reshape(*shape, head_dim).permute(0, 2, 3, 1, 4)
        self.key = B[:, start:stop].to(dtype).transpose(1, 2)  # [b, g, t, n]
        self.key_squared = self.key.square()
        self.query = C[:, start:stop].to(dtype).permute(0, 2, 1, 3)[:, :, None, :, None, :]  # [b, g, 1, t, 1, n]
        self.rate = A.view(1, groups, -1, 1)
        log_alpha = -self.rate * self.dt
        if documents is None:
            self.decay = decay_within(log_alpha)
            self.decay_start = decay_from_start(log_alpha)
        else:
            documents = documents[:, None, None, :]
            inside, before = documents[..., start:stop], documents[..., max(start - 1, 0), None]
            self.decay = decay_within(log_alpha, inside)  # [b, g, k, t, s]
            self.decay_start = decay_from_start(log_alpha, inside, before)  # [b, g, k, t]
        self.decay_end = self.decay[..., -1, :]  # [b, g, k, s]

    def mixing(self, written: Tensor) -> Tensor:
        """`decay(t, s) written[s, p]` as `[b, g, (k t p), s]`, the left factor of the states' product."""
        factor = self.decay[..., :, None, :] * written.transpose(-1, -2)[..., None, :, :]  # [b, g, k, t, p, s]
        return factor.flatten(2, 4)

    def state_at_each_token(self, mixing: Tensor, key: Tensor, start: Tensor) -> Tensor:
        """State `[b, g, k, t, p, n]` at each token from the state `[b, g, k, p, n]` before the first."""
        states = (mixing @ key).view(*self.decay.shape[:-1], start.shape[-2], start.shape[-1])
        return states.addcmul_(self.decay_start[..., None, None], start[..., None, :, :])

    def state_at_end(self, written: Tensor, key: Tensor, start: Tensor) -> Tensor:
        """State `[b, g, k, p, n]` after the last token."""
        fed = (self.decay_end[..., None] * written).transpose(-1, -2) @ key[:, :, None]
        return fed.addcmul_(self.decay_start[..., -1, None, None], start)

    def advance(self, M: Tensor, Ibar: Tensor) -> tuple[Tensor, Tensor]:
        return (
            self.state_at_end(self.value, self.key, M),
            self.state_at_end(self.beta, self.key_squared, Ibar),
        )


def _spans(length: int, step: int, start: int = 0) -> list[tuple[int, int]]:
    return [(i, min(i + step, length)) for i in range(start, length, step)]


def _ungroup(v: Tensor) -> Tensor:
    """`[b, g, k, t, ...]` to `[b, t, h, ...]`."""
    return v.flatten(1, 2).transpose(1, 2)


def _prepare(x: Tensor, A: Tensor, I_prior: Tensor, B: Tensor, seq_idx: Tensor | None):
    documents = None if seq_idx is None else document_numbers(seq_idx)
    prior = I_prior.to(A.dtype).view(1, B.shape[2], -1, 1, 1, 1)
    return documents, prior


@torch.library.custom_op(f"{NAMESPACE}::chunked_scan", mutates_args=())
def _chunked_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor,
    I_prior: Tensor,
    initial_state: Tensor,
    seq_idx: Tensor | None,
    with_variance: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, the final state, the variance (empty unless asked for) and the states at segment starts."""
    documents, prior = _prepare(x, A, I_prior, B, seq_idx)
    groups = B.shape[2]
    M, Ibar = initial_state.unflatten(1, (groups, -1)).unbind(3)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    variance = y.new_empty(x.shape if with_variance else 0, dtype=A.dtype)
    segment_starts = []
    with torch.autocast(x.device.type, enabled=False):
        for start, stop in _spans(x.shape[1], SUBCHUNK):
            if start % SEGMENT == 0:
                segment_starts.append(torch.stack((M, Ibar)))
            chunk = _Subchunk((x, dt, A, B, C, beta), documents, start, stop)
            mean = chunk.state_at_each_token(chunk.mixing(chunk.value), chunk.key, M)
            importance = chunk.state_at_each_token(chunk.mixing(chunk.beta), chunk.key_squared, Ibar).add_(prior)
            mean.div_(importance)
            y[:, start:stop] = _ungroup((mean @ chunk.query.transpose(-1, -2)).squeeze(-1))
            if with_variance:
                spread = importance.reciprocal_() @ chunk.query.square().transpose(-1, -2)
                variance[:, start:stop] = _ungroup(spread.squeeze(-1))
            M, Ibar = chunk.advance(M, Ibar)
    final_state = torch.stack((M.flatten(1, 2), Ibar.flatten(1, 2)), dim=2)
    return y, final_state, variance, torch.stack(segment_starts)


@_chunked_scan.register_fake
def _(x, dt, A, B, C, beta, I_prior, initial_state, seq_idx, with_variance):
    batch, time, heads, head_dim = x.shape
    segments = (time + SEGMENT - 1) // SEGMENT
    groups = B.shape[2]
    return (
        x.new_empty(x.shape),
        initial_state.new_empty(initial_state.shape),
        x.new_empty(x.shape if with_variance else 0, dtype=A.dtype),
        x.new_empty(segments, 2, batch, groups, heads // groups, head_dim, B.shape[3], dtype=A.dtype),
    )


@torch.library.custom_op(f"{NAMESPACE}::chunked_scan_backward", mutates_args=())
def _chunked_scan_backward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor,
    I_prior: Tensor,
    seq_idx: Tensor | None,
    segment_starts: Tensor,
    dy: Tensor,
    dfinal: Tensor,
    dvariance: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, dt, A, B, C, beta, I_prior and the initial state, in the computing type."""
    documents, prior = _prepare(x, A, I_prior, B, seq_idx)
    inputs = (x, dt, A, B, C, beta)
    heads, groups = x.shape[2], B.shape[2]
    dtype = A.dtype
    # What arrives at the end of the sequence for M and Ibar, [b, g, k, p, n] each.
    E_M, E_I = dfinal.to(dtype).unflatten(1, (groups, -1)).unbind(3)
    dx, ddt, dbeta = (torch.empty(v.shape, dtype=dtype, device=x.device) for v in (x, dt, beta))
    dB, dC = (torch.empty(v.shape, dtype=dtype, device=x.device) for v in (B, C))
    dA = A.new_zeros(groups, heads // groups)
    dprior = A.new_zeros(groups, heads // groups)

    with torch.autocast(x.device.type, enabled=False):
        for segment, (start, stop) in reversed(list(enumerate(_spans(x.shape[1], SEGMENT)))):
            M, Ibar = segment_starts[segment].unbind(0)
            chunks, states = [], []
            for span in _spans(stop, SUBCHUNK, start):
                chunks.append((span, _Subchunk(inputs, documents, *span)))
                states.append((M, Ibar))
                M, Ibar = chunks[-1][1].advance(M, Ibar)
            while chunks:
                (begin, end), chunk = chunks.pop()
                M, Ibar = states.pop()
                grouped = (x.shape[0], end - begin, groups, heads // groups, x.shape[3])
                dy_here = dy[:, begin:end].to(dtype).reshape(grouped).permute(0, 2, 3, 1, 4)  # [b, g, k, t, p]

                mixing_M, mixing_I = chunk.mixing(chunk.value), chunk.mixing(chunk.beta)
                mean = chunk.state_at_each_token(mixing_M, chunk.key, M)
                importance = chunk.state_at_each_token(mixing_I, chunk.key_squared, Ibar).add_(prior)
                inverse = importance.reciprocal_()
                mean.mul_(inverse)
                dC_here = (dy_here[..., None, :] @ mean).squeeze(-2)  # [b, g, k, t, n]
                Z_I = mean.neg_()
                if dvariance is not None:
                    dvar = dvariance[:, begin:end].reshape(grouped).permute(0, 2, 3, 1, 4)
                    twice_query = 2 * chunk.query.squeeze(-2)
                    dC_here = dC_here + twice_query * (dvar[..., None, :] @ inverse).squeeze(-2)
                Z = inverse * dy_here[..., None] * chunk.query
                Z_I.mul_(Z)
                if dvariance is not None:
                    Z_I.sub_(dvar[..., None] * (inverse * chunk.query).square())
                dC[:, begin:end] = dC_here.sum(2).transpose(1, 2)
                dprior += Z_I.sum((0, 3, 4, 5))

                dvalue, dkey, E_M, spans, from_start = _adjoint(chunk, mixing_M, chunk.value, chunk.key, M, Z, E_M)
                dbeta_here, dsquare, E_I, spans_I, from_start_I = _adjoint(
                    chunk, mixing_I, chunk.beta, chunk.key_squared, Ibar, Z_I, E_I
                )
                dlog_alpha = _adjoint_of_log_alpha(spans + spans_I, from_start + from_start_I)

                dB[:, begin:end] = (dkey + 2 * chunk.key * dsquare).transpose(1, 2)
                dx[:, begin:end] = _ungroup(chunk.dt[..., None] * dvalue)
                dbeta[:, begin:end] = _ungroup(dbeta_here)
                ddt[:, begin:end] = _ungroup((chunk.x * dvalue).sum(-1) - chunk.rate * dlog_alpha)
                dA -= (chunk.dt * dlog_alpha).sum((0, 3))
    dinitial = torch.stack((E_M.flatten(1, 2), E_I.flatten(1, 2)), dim=2)
    return dx, ddt, dA.flatten(), dB, dC, dbeta, dprior.flatten(), dinitial


def _adjoint(
    chunk: _Subchunk, mixing: Tensor, written: Tensor, key: Tensor, start: Tensor, Z: Tensor, E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Send the adjoints of one of the two states back through a sub-chunk.

    Args:
        written: `[b, g, k, s, p]` and key `[b, g, s, n]`, whose outer products the state sums up.
        start: the state before the sub-chunk, `[b, g, k, p, n]`.
        Z: direct adjoint of the state at each token, `[b, g, k, t, p, n]`.
        E: adjoint of the state after the sub-chunk, `[b, g, k, p, n]`.

    Returns:
        The adjoints of `written`, `key` and `start`, and those of the logarithms of `decay`
        `[b, g, k, t, s]` and `decay_start` `[b, g, k, t]`.
    """
    time = Z.shape[3]
    # From each token's state.
    weighted = (Z.flatten(2, 4) @ key.transpose(-1, -2)).view(*Z.shape[:-1], time)  # [b, g, k, t, p, s]
    weighted.mul_(chunk.decay[..., :, None, :])
    dwritten = weighted.sum(3).transpose(-1, -2)
    spans = (weighted * written.transpose(-1, -2)[..., None, :, :]).sum(-2)
    dkey = mixing.transpose(-1, -2) @ Z.flatten(2, 4)
    flat = Z.flatten(4, 5)
    from_start = chunk.decay_start * (flat @ start.flatten(3, 4)[..., None]).squeeze(-1)
    dstart = (chunk.decay_start[..., None, :] @ flat).view_as(start)
    # From the state after the sub-chunk.
    late = chunk.decay_end[..., None] * (key[:, :, None] @ E.transpose(-1, -2))  # [b, g, k, s, p]
    dwritten = dwritten + late
    spans[..., -1, :] += (late * written).sum(-1)
    dkey = dkey + ((chunk.decay_end[..., None] * written) @ E).sum(2)
    last = chunk.decay_start[..., -1, None, None] * E
    from_start[..., -1] += (last * start).sum((-1, -2))
    return dwritten, dkey, dstart + last, spans, from_start


def _adjoint_of_log_alpha(spans: Tensor, from_start: Tensor) -> Tensor:
    """Sum over the spans s < r <= t that contain a token r: `[..., r]`."""
    ending_at_or_after = spans.flip(-2).cumsum(-2).flip(-2)  # [..., r, s]: sum over t >= r
    inside = ending_at_or_after.tril(-1).sum(-1)
    return inside + from_start.flip(-1).cumsum(-1).flip(-1)


@_chunked_scan_backward.register_fake
def _(x, dt, A, B, C, beta, I_prior, seq_idx, segment_starts, dy, dfinal, dvariance):
    like = [v.new_empty(v.shape, dtype=A.dtype) for v in (x, dt, A, B, C, beta, I_prior)]
    return (*like, dfinal.new_empty(dfinal.shape, dtype=A.dtype))


def _setup_context(ctx, inputs, output):
    x, dt, A, B, C, beta, I_prior, initial_state, seq_idx, with_variance = inputs
    ctx.save_for_backward(x, dt, A, B, C, beta, I_prior, seq_idx, output[3])
    ctx.with_variance = with_variance
    ctx.state_dtype = initial_state.dtype
    ctx.set_materialize_grads(False)  # zeros for the segment starts would take as much memory as they do


def _backward(ctx, dy, dfinal, dvariance, _):
    x, dt, A, B, C, beta, I_prior, seq_idx, segment_starts = ctx.saved_tensors
    dy = x.new_zeros(1).expand(x.shape) if dy is None else dy
    if dfinal is None:
        dfinal = A.new_zeros(1).expand(x.shape[0], x.shape[2], 2, x.shape[3], B.shape[3])
    *grads, dinitial = _chunked_scan_backward(
        x,
        dt,
        A,
        B,
        C,
        beta,
        I_prior,
        seq_idx,
        segment_starts,
        dy,
        dfinal,
        dvariance if ctx.with_variance else None,
    )
    inputs = (x, dt, A, B, C, beta, I_prior)
    grads = [grad.to(v.dtype) for grad, v in zip(grads, inputs, strict=True)]
    return (*grads, dinitial.to(ctx.state_dtype), None, None)


_chunked_scan.register_autograd(_backward, setup_context=_setup_context)


def palimpsa_scan_chunked(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    beta: Tensor | None,
    I_prior: Tensor,
    initial_state: Tensor | None = None,
    seq_idx: Tensor | None = None,
    return_final_state: bool = False,
    return_variance: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The scan of `reference.palimpsa_scan_reference` with the same arguments, differentiable once.

    Accumulates in float32 (float64 when `A` is float64) whatever the type of the activations.

    Returns:
        y `[b, t, h, p]` in the type of `x`; the final state `[b, h, 2, p, n]` and the variance
        `[b, t, h, p]` in the computing type, or None where not asked for.
    """
    dtype = torch.float64 if A.dtype == torch.float64 else torch.float32
    A, I_prior = A.to(dtype), I_prior.to(dtype)
    beta = torch.zeros_like(x) if beta is None else beta
    if initial_state is None:
        initial_state = A.new_zeros(x.shape[0], x.shape[2], 2, x.shape[3], B.shape[3])
    y, final_state, variance, _ = _chunked_scan(
        x, dt, A, B, C, beta, I_prior, initial_state.to(dtype), seq_idx, return_variance
    )
    return y, final_state if return_final_state else None, variance if return_variance else None
