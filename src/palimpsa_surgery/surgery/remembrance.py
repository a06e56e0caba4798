"""Effective remembrance: how much the beginning of a text still moves a model's prediction at its end.

EffRem_T(t) = d(q(. | x[0:T]), q(. | x[t:T])) compares the prediction after T tokens with the one of a run that
starts, from empty states, at token t (2507.02782 section 3.4, Eqs. 2 and 3; total variation as half the sum of
|q(v) - q'(v)| over the vocabulary). It is 0 at t = 0 and need not rise steadily.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.hf_models.modeling_palimpsa_mamba2 import LayerState

_STATE_BYTES = 1 << 30  # recurrent states of the suffixes that are run side by side


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """Half the L1 distance of distributions over the last dimension, in [0, 1]."""
    return (p - q).abs().sum(-1) / 2


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Jensen–Shannon divergence of distributions over the last dimension, in bits, in [0, 1]."""
    middle = (p + q) / 2
    terms = torch.special.xlogy(p, p / middle) + torch.special.xlogy(q, q / middle)
    # where both are zero the quotient is NaN, and there is nothing to add
    return torch.where(middle > 0, terms, 0).sum(-1).clamp_min(0) / (2 * torch.log(torch.tensor(2.0, dtype=p.dtype)))


def cosine(p: Tensor, q: Tensor) -> Tensor:
    """1 - cos of the angle between distributions over the last dimension, in [0, 1]; not a metric."""
    norms = (p.square().sum(-1) * q.square().sum(-1)).sqrt()
    return (1 - (p * q).sum(-1) / norms).clamp_min(0)


DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "tv": total_variation,
    "js": jensen_shannon,
    "cosine": cosine,
}
"""Distances between predictions by the name they have on the command line; Appendix G compares these three."""


def remembrance_starts(length: int, points: int) -> list[int]:
    """At most `points` increasing suffix starts t in [0, length), 0 always among them.

    They lie densely, as on a log axis, at both ends: where few tokens are taken away, which tells whether the
    model depends on what it read first, and where few are left.

    Args:
        length: T, at least 2.
        points: at least 2.
    """
    removed = log_spaced((length - 1) // 2, (points - 1) // 2)
    kept = log_spaced(length // 2, points // 2)
    return [0, *removed, *(length - count for count in reversed(kept))]


def log_spaced(last: int, count: int) -> list[int]:
    """Distinct whole numbers from 1 to `last`, as evenly spaced on a log axis as that allows; at most `count`."""
    count = min(count, last)
    chosen = [1] if count else []
    for left in range(count - 1, 0, -1):
        previous = chosen[-1]
        chosen.append(max(previous + 1, round(previous * (last / previous) ** (1 / left))))
    return chosen


def state_bytes(config: PalimpsaMamba2Config) -> int:
    """Bytes of the recurrent states of one sequence, all layers together."""
    matrices = config.num_hidden_layers + len(config.palimpsa_layers)
    return matrices * config.num_heads * config.head_dim * config.state_size * 4


@torch.inference_mode()
def effective_remembrance(
    model: PalimpsaMamba2ForCausalLM,
    ids: Tensor,
    starts: Sequence[int],
    *,
    distance: str = "tv",
    piece_length: int = 2048,
    advance: Callable[[int], object] = lambda tokens: None,
) -> Tensor:
    """EffRem_T(t) of one text at every t of `starts`, where T is its length.

    All suffixes read the same tokens and differ in their states only, so they run as rows of a batch that gains
    a row at every t; as many at once as their states allow.

    Args:
        ids: [T] token ids.
        starts: increasing, from 0 to at most T - 1; the first must be 0.
        distance: a key of DISTANCES.
        piece_length: tokens computed at once, all rows together.
        advance: told the tokens computed, `sum(T - t)` in the end.

    Returns:
        [len(starts)] float64 on the CPU.

    Raises:
        UserError: a prediction is NaN.
    """
    at_once = max(1, _STATE_BYTES // state_bytes(model.config))
    predictions = []
    for first in range(0, len(starts), at_once):
        rows = starts[first : first + at_once]
        logits = _last_logits(model, ids, rows, piece_length, advance)
        bad = (~torch.isfinite(logits)).any(-1).nonzero()
        if len(bad):
            start = rows[int(bad[0])]
            raise UserError(f"logits at position {len(ids) - 1} are NaN or infinite when reading from token {start}")
        predictions.append(logits.double().softmax(-1).cpu())
    rows = torch.cat(predictions)
    return DISTANCES[distance](rows[:1], rows)


def _last_logits(
    model: PalimpsaMamba2ForCausalLM,
    ids: Tensor,
    starts: Sequence[int],
    piece_length: int,
    advance: Callable[[int], object],
) -> Tensor:
    """Logits after the last token of `ids[t:]` for every t of `starts`, [len(starts), vocabulary]."""
    states = hidden = None
    for rows, (start, end) in enumerate(zip(starts, [*starts[1:], len(ids)], strict=True), start=1):
        if states is not None:
            states = [_with_an_empty_row(state) for state in states]
        for piece in ids[start:end].split(max(1, piece_length // rows)):
            output = model.backbone(
                piece.expand(rows, -1), initial_states=states, return_final_states=True, use_cache=False
            )
            states, hidden = output.final_states, output.last_hidden_state[:, -1]
            advance(rows * len(piece))
    return model.lm_head(hidden.to(model.lm_head.weight.dtype)).float()  # as the model's forward does


def _with_an_empty_row(state: LayerState) -> LayerState:
    return LayerState(*(torch.cat([part, torch.zeros_like(part[:1])]) for part in state))
