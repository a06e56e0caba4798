"""What the scan's gradients can be when matrix products round their operands: the yardstick of the kernels' accuracy.

Letters as in the kernels: b batch, t and s time within a sub-chunk, h heads, p head_dim, n state_size.
"""

import torch
from torch import Tensor

from palimpsa_surgery.kernels.decay import decay_from_start, decay_within, document_numbers
from palimpsa_surgery.kernels.hopper_scan import BACKWARD_SEGMENT
from scan_cases import Data, Gradients

SUB_CHUNK = 16
GROWTH, GROWTH_OF_M = 2048, 16384  # of the Hopper kernels' spans, written down again: both decide what is allowed


def find_spans(log_alpha: Tensor, to_M: Tensor, to_I: Tensor, segment: int) -> list[list[Tensor]]:
    """Where the Hopper kernels go back in time from, as `hopper_spans.py` says; all `[b, h, t]`.

    `to_M`, `to_I`: what tokens add to M at most, and to I relative to the prior. Of each sub-chunk: its tokens' scales
    1 / c and by how much each has grown `[b, h, 16]`, whether a span ends with it, and whether it is in one at all
    `[b, h]`.
    """
    sizes, size = [], torch.zeros_like(to_M[..., 0])  # m²
    for t in range(to_M.shape[-1]):
        size = size * (2 * log_alpha[..., t]).exp() + to_M[..., t] ** 2
        sizes.append(size)
    sizes = torch.stack(sizes, -1)
    found: list[list[Tensor]] = []
    log_end = grown = first = torch.zeros_like(size)  # after the sub-chunk before, and m² after the span's first token
    for start in range(0, log_alpha.shape[-1], SUB_CHUNK):
        now = slice(start, start + SUB_CHUNK)
        decay, added = log_alpha[..., now], to_I[..., now]
        log_r = torch.cat((torch.zeros_like(decay[..., :1]), -decay[..., 1:].cumsum(-1)), -1)
        own = (log_r.exp() * added).sum(-1)

        def fits(log_r: Tensor, grown: Tensor, first: Tensor, end: Tensor = sizes[..., now][..., -1]) -> Tensor:
            r = log_r[..., -1].exp()
            return (r + grown <= GROWTH) & (r * r * end <= GROWTH_OF_M**2 * first)

        in_span = fits(log_r, own, sizes[..., start])
        goes_on = torch.zeros_like(in_span)
        if start % segment:
            log_first = log_end - decay[..., 0]
            both, further = grown + log_first.exp() * own, log_first[..., None] + log_r
            goes_on = found[-1][3] & in_span & fits(further, both, first)
            log_r, own = torch.where(goes_on[..., None], further, log_r), torch.where(goes_on, both, own)
            found[-1][2] = found[-1][2] & ~goes_on
        scales = log_r.exp()
        before = torch.where(goes_on, found[-1][0][..., -1], scales[..., 0]) if found else scales[..., 0]
        growth = scales - torch.cat((before[..., None], scales[..., :-1]), -1)
        log_end, grown, first = log_r[..., -1], own, torch.where(goes_on, first, sizes[..., start])
        found.append([scales, growth, in_span, in_span])
    return found


def take_back(carried, exact, span, written, keys, prior) -> tuple[list[Tensor], list[Tensor]]:
    """A sub-chunk's M and I `[b, h, t, p, n]` as float32 has them that takes back what each token wrote.

    `carried`: M / c and I / c after the sub-chunk, unless a span ends with it; returned are those before it, too.
    """
    scales, growth, ends, in_span = span
    states, before = [], []
    for i, (state, what, key) in enumerate(zip(exact, written, keys, strict=True)):
        fresh = (scales[..., -1, None, None] * state[:, :, -1]).float()
        now = torch.where(ends[..., None, None], fresh, fresh if carried is None else carried[i])
        found = []
        for t in range(scales.shape[-1] - 1, -1, -1):
            found.insert(0, now.double() / scales[..., t, None, None])
            now = now - (what[:, :, t] * scales[..., t, None]).float()[..., None] * key[:, :, t, None].float()
            if i == 1:
                now = now - (prior * growth[..., t, None, None]).float()
        states.append(torch.where(in_span[..., None, None, None], torch.stack(found, 2), state))
        before.append(now)
    return states, before


def emulate(
    data: Data, variance: bool, dtype: torch.dtype | None, tuned: bool = False, segment: int = BACKWARD_SEGMENT
) -> Gradients:
    """The scan and its gradients in float64, but for the operands of matrix products and the results.

    The operands are rounded where tensor cores would take them (decay ∘ (dt x), decay ∘ beta, B², the direct adjoints
    Z and Z_I, the decay and the adjoints that arrive from later sub-chunks), the results to the arguments' types.

    Args:
        dtype: type to round to; None rounds nothing, so that the result is the recurrence's own.
        tuned: round what the Hopper kernels round: B² in the backward pass, states by taking back what tokens wrote in
            float32, and what products take that make the states at segments' starts and add what the adjoint after a
            segment causes.
        segment: tokens of such a segment, a multiple of a sub-chunk's.

    Returns:
        The entries of `scan_cases.differentiate`, in float64.
    """
    a = {name: None if v is None else v.detach().double() for name, v in data.arguments.items()}
    batch, time, heads, head_dim = a["x"].shape
    per_group = heads // a["B"].shape[2]

    def r(v: Tensor) -> Tensor:
        return v if dtype is None else v.to(dtype).double()

    def r_tuned(v: Tensor) -> Tensor:
        return r(v) if tuned else v

    def r_portable(v: Tensor) -> Tensor:
        return v if tuned else r(v)

    def by_head(v: Tensor) -> Tensor:  # [b, t, h, ...] to [b, h, t, ...]
        return v.double().transpose(1, 2)

    def to_heads(v: Tensor) -> Tensor:
        return by_head(v).repeat_interleave(per_group, 1)

    x, B, C, dt, dy = by_head(a["x"]), to_heads(a["B"]), to_heads(a["C"]), by_head(a["dt"]), by_head(data.dy)
    beta = torch.zeros_like(x) if a["beta"] is None else by_head(a["beta"])
    dvar = by_head(data.dvariance) * variance
    value, squares, log_alpha = dt[..., None] * x, B.square(), -a["A"][:, None] * dt
    prior = a["I_prior"][:, None, None, None]
    documents = None if data.seq_idx is None else document_numbers(data.seq_idx)[:, None]
    M = x.new_zeros(batch, heads, head_dim, B.shape[-1]) if a["initial_state"] is None else a["initial_state"][:, :, 0]
    Ibar = torch.zeros_like(M) if a["initial_state"] is None else a["initial_state"][:, :, 1]

    spans = [slice(i, min(i + SUB_CHUNK, time)) for i in range(0, time, SUB_CHUNK)]

    def decays(now: slice) -> tuple[Tensor, Tensor]:
        if documents is None:
            return decay_within(log_alpha[..., now]), decay_from_start(log_alpha[..., now])
        here, before = documents[..., now], documents[..., max(now.start - 1, 0), None]
        return decay_within(log_alpha[..., now], here), decay_from_start(log_alpha[..., now], here, before)

    def states(written: Tensor, key: Tensor, D: Tensor, start: Tensor, state: Tensor) -> Tensor:  # [b, h, t, p, n]
        weights = r_portable(D[..., None] * written[:, :, None])  # [b, h, t, s, p]
        return weights.transpose(-1, -2) @ r_portable(key)[:, :, None] + start[..., None, None] * state[:, :, None]

    y, var, starts = torch.empty_like(x), torch.empty_like(x), []
    for now in spans:
        if not tuned or now.start % segment == 0:
            carried = (M, Ibar)
        starts.append(carried)
        D, start = decays(now)
        all_M = states(value[:, :, now], B[:, :, now], D, start, M)
        all_I = states(beta[:, :, now], squares[:, :, now], D, start, Ibar)
        y[:, :, now] = torch.einsum("bhtpn,bhtn->bhtp", all_M / (prior + all_I), C[:, :, now])
        var[:, :, now] = torch.einsum("bhtpn,bhtn->bhtp", 1 / (prior + all_I), C[:, :, now].square())
        M, Ibar = (
            (r(D[..., -1, :, None] * written[:, :, now]).transpose(-1, -2) @ r(key[:, :, now]))
            + start[..., -1, None, None] * state
            for written, key, state in ((value, B, M), (beta, squares, Ibar))
        )
        carried = [
            (D[..., -1, :, None] * written[:, :, now]).transpose(-1, -2) @ key[:, :, now]
            + start[..., -1, None, None] * state
            for written, key, state in ((value, B, carried[0]), (beta, r_tuned(squares), carried[1]))
        ]
    final_state = torch.stack((M, Ibar), 2)

    dvalue, dbeta, dB, dC = (torch.empty_like(v) for v in (value, beta, B, C))
    dlog, dprior = torch.zeros_like(dt), torch.zeros_like(a["I_prior"])
    E = list(data.dfinal.double().unbind(2))

    def carry(now: slice, state: tuple[Tensor, Tensor]) -> None:
        """What the adjoint after a segment adds to the gradients of its tokens."""
        D, start = decays(now)
        w, keep = D[..., -1, :, None], start[..., -1]
        for after, first, written, key, dwritten, factor in (
            (late[0], state[0], value, B, dvalue, 1.0),
            (late[1], state[1], beta, squares, dbeta, 2.0 * B[:, :, now]),
        ):
            written, key = written[:, :, now], key[:, :, now]
            added = w * (r(key) @ r(after).transpose(-1, -2))  # [b, h, s, p]
            dwritten[:, :, now] += added
            dB[:, :, now] += factor * (r(w * written) @ r(after))
            flow = (added * written).sum(-1)
            dlog[..., now] += flow.cumsum(-1) - flow + (keep * (after * first).sum((-1, -2)))[..., None]

    log_kept = log_alpha.clone()
    if documents is not None:
        log_kept[..., 1:].masked_fill_(documents[..., 1:] != documents[..., :-1], -torch.inf)
    to_M = value.abs().amax(-1) * B.abs().amax(-1)
    to_I = beta.abs().amax(-1) * squares.amax(-1) / a["I_prior"][:, None]
    back, taken = find_spans(log_kept, to_M, to_I, segment), None

    for i_now, now, state in zip(range(len(spans) - 1, -1, -1), reversed(spans), reversed(starts), strict=True):
        if tuned and (now.stop == time or now.stop % segment == 0):
            late, E = E, [torch.zeros_like(M), torch.zeros_like(M)]
        D, start = decays(now)
        end = D[..., -1, :]
        all_M = states(value[:, :, now], B[:, :, now], D, start, state[0])
        all_I = prior + states(beta[:, :, now], r_tuned(squares)[:, :, now], D, start, state[1])
        if tuned and dtype is not None:
            written, keys = (value[:, :, now], beta[:, :, now]), (B[:, :, now], r(squares)[:, :, now])
            at_segment_end = now.stop == time or now.stop % segment == 0
            (all_M, all_I), taken = take_back(
                None if at_segment_end else taken, (all_M, all_I), back[i_now], written, keys, prior[..., 0]
            )
        inverse = 1 / all_I
        mean, query = all_M * inverse, C[:, :, now]
        Z = dy[:, :, now, :, None] * query[..., None, :] * inverse
        Z_I = -Z * mean - dvar[:, :, now, :, None] * (query[..., None, :] * inverse).square()
        dC[:, :, now] = torch.einsum("bhtp,bhtpn->bhtn", dy[:, :, now], mean)
        dC[:, :, now] += 2 * query * torch.einsum("bhtp,bhtpn->bhtn", dvar[:, :, now], inverse)
        dprior += Z_I.sum((0, 2, 3, 4))
        # Sums over the spans of one state; then [b, h, s, t] spans, [b, h, t] from the start, [b, h, s] to the end.
        dwritten, dkey = [], []
        for i, (direct, written, key) in enumerate(((Z, value, B), (Z_I, beta, r_tuned(squares)))):
            written, key, rounded = written[:, :, now], key[:, :, now], r_portable(direct)
            Q = torch.einsum("bhsn,bhtpn->bhpst", r_portable(key), rounded) * D.transpose(-1, -2)[:, :, None]
            leaving = end[..., None] * (r_portable(key) @ r_portable(E[i]).transpose(-1, -2))  # [b, h, s, p]
            within = torch.einsum("bhpst,bhsp->bhst", Q, written)
            begun = start * torch.einsum("bhtpn,bhpn->bht", direct, state[i])
            whole = start[..., -1] * (E[i] * state[i]).sum((-1, -2))
            dlog[..., now] += within.flip(-1).cumsum(-1).flip(-1).triu(1).sum(-2)
            dlog[..., now] += begun.flip(-1).cumsum(-1).flip(-1) + whole[..., None]
            lost = (leaving * written).sum(-1)
            dlog[..., now] += lost.cumsum(-1) - lost
            total = torch.einsum("bhtpn,bhts->bhspn", rounded, r_portable(D)) + end[..., None, None] * E[i][:, :, None]
            dkey.append(torch.einsum("bhsp,bhspn->bhsn", written, total))
            E[i] = start[..., 0, None, None] * total[:, :, 0]
            dwritten.append(Q.sum(-1).transpose(-1, -2) + leaving)
        dvalue[:, :, now], dbeta[:, :, now] = dwritten
        dB[:, :, now] = dkey[0] + 2 * B[:, :, now] * dkey[1]
        if tuned and now.start % segment == 0:
            whole = slice(now.start, min(now.start + segment, time))
            carry(whole, state)
            keep = decays(whole)[1][..., -1, None, None]
            E = [own + keep * after for own, after in zip(E, late, strict=True)]

    def by_time(v: Tensor) -> Tensor:
        return v.transpose(1, 2)

    def sum_heads(v: Tensor) -> Tensor:
        return by_time(v.unflatten(1, (-1, per_group)).sum(2))

    found = {"y": r(by_time(y)), "final_state": final_state} | ({"variance": by_time(var)} if variance else {})
    found["dx"] = r(by_time(dt[..., None] * dvalue))
    found["ddt"] = by_time((x * dvalue).sum(-1) - a["A"][:, None] * dlog)
    found["dA"] = -(dt * dlog).sum((0, 2))
    found |= {"dB": r(sum_heads(dB)), "dC": r(sum_heads(dC))}
    found |= {"dbeta": r(by_time(dbeta))} if a["beta"] is not None else {}
    found["dI_prior"] = dprior
    return found | ({"dinitial_state": torch.stack(E, 2)} if a["initial_state"] is not None else {})
