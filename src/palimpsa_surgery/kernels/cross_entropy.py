"""Cross-entropy of a linear head without ever holding all of its logits.

At 32k tokens and 50k words they would take 6.6 GB in float32, and their gradients as much again. torch's own
`linear_cross_entropy` came with 2.13, later than the oldest torch supported here.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_PER_BLOCK = 2**26
"""Logits that exist at a time: 256 MiB in float32, 1,334 tokens at 50,288 words. A smaller loss recomputes nothing."""


def linear_cross_entropy(
    hidden_states: Tensor, weight: Tensor, labels: Tensor, *, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropies of `hidden_states @ weight.T`, in float32 (float64 for float64).

    On CUDA by Liger's fused kernel where `liger_kernel` imports; elsewhere block by block, each block's logits
    computed again for its gradient. Differentiable once in `hidden_states` and `weight`.

    Args:
        hidden_states: `[..., hidden_size]`; under autocast the product is in autocast's type.
        weight: `[vocab_size, hidden_size]`.
        labels: `[...]`, integers; `ignore_index` marks positions that do not count.

    Returns:
        The sum over all labels that count, and their number; divide one by the other for the mean.

    Raises:
        ValueError: shapes that do not fit.
    """
    if hidden_states.shape[:-1] != labels.shape or hidden_states.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden_states [..., hidden_size], weight [vocab_size, hidden_size] and labels [...] do not fit: got "
            f"{tuple(hidden_states.shape)}, {tuple(weight.shape)} and {tuple(labels.shape)}"
        )
    hidden_states, labels = hidden_states.reshape(-1, weight.shape[-1]), labels.reshape(-1)
    count = (labels != ignore_index).sum()
    # Liger's loss has a gradient of the weight only beside one of the hidden states
    head_alone = torch.is_grad_enabled() and weight.requires_grad and not hidden_states.requires_grad
    liger = _liger() if hidden_states.is_cuda and weight.dtype != torch.float64 and not head_alone else None
    if liger is not None:
        if torch.is_autocast_enabled("cuda"):
            hidden_states = hidden_states.to(torch.get_autocast_dtype("cuda"))
        with torch.cuda.device(hidden_states.device):  # Triton launches on the current device
            return liger(ignore_index=ignore_index)(weight, hidden_states, labels), count
    block = max(1, LOGITS_PER_BLOCK // weight.shape[0])
    if labels.numel() <= block:
        return _block_loss(hidden_states, weight, labels, ignore_index), count
    recompute = functools.partial(checkpoint, _block_loss, use_reentrant=False, preserve_rng_state=False)
    run = recompute if torch.is_grad_enabled() else _block_loss
    total = weight.new_zeros((), dtype=torch.promote_types(weight.dtype, torch.float32))
    for start in range(0, labels.numel(), block):
        rows = slice(start, start + block)
        total = total + run(hidden_states[rows], weight, labels[rows], ignore_index)
    return total, count


def _block_loss(hidden_states: Tensor, weight: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    logits = F.linear(hidden_states, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels.to(logits.device), ignore_index=ignore_index, reduction="sum")


@functools.cache
def _liger() -> Callable | None:
    """Liger's loss but for its `ignore_index`; None where the package is absent, older than 0.6.2 or broken."""
    try:
        from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

        loss = functools.partial(LigerFusedLinearCrossEntropyLoss, reduction="sum", accum_dtype=torch.float32)
        loss()
    except Exception:  # a broken optional package must break nothing else
        return None
    return loss
