"""Decay factors of the linear recurrences, with resets at document boundaries.

A reset is a mask, never log alpha = -inf: differences of running sums would become NaN. Sums over a span
are masked running sums of that span alone, never differences of two long ones, so that a strong decay
early on does not cost the weak ones after it their precision.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def document_numbers(seq_idx: Tensor) -> Tensor:
    """Number the runs of equal `seq_idx` `[b, t]` along a row 0, 1, 2, …: `[b, t]` int64.

    An index that comes back after another document is a new document, as for the step-by-step recurrence.
    """
    changed = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
    return changed.cumsum(-1)


def decay_within(log_alpha: Tensor, documents: Tensor | None = None) -> Tensor:
    """Factor by which what was written at s has decayed at t: `exp(sum of log_alpha over s < r <= t)`.

    Args:
        log_alpha: `[..., t]`, ≤ 0.
        documents: `[..., t]`, broadcastable to `log_alpha`; factors across documents are zero.

    Returns:
        `[..., t, s]`, zero for s > t.
    """
    length = log_alpha.shape[-1]
    ones = torch.ones(length, length, dtype=torch.bool, device=log_alpha.device)
    spans = log_alpha[..., :, None].expand(*log_alpha.shape, length).masked_fill(~ones.tril(-1), 0).cumsum(-2)
    keep = ones.tril()
    if documents is not None:
        keep = keep & (documents[..., :, None] == documents[..., None, :])
    return spans.exp().masked_fill(~keep, 0)


def decay_from_start(
    log_alpha: Tensor, documents: Tensor | None = None, previous_document: Tensor | None = None
) -> Tensor:
    """Factor by which the state before the first of these tokens has decayed at t.

    Args:
        log_alpha: `[..., t]`, ≤ 0.
        documents: `[..., t]`, broadcastable to `log_alpha`.
        previous_document: `[..., 1]`, the document that the state belongs to.

    Returns:
        `[..., t]`.
    """
    decay = log_alpha.cumsum(-1).exp()
    return decay if documents is None else decay.masked_fill(documents != previous_document, 0)
