"""How far a hybrid is from its source: logits, predictions and importance on a sample of text.

Letters: B batch, T time, H heads, P head_dim, G groups, N state_size, as in the recurrence.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from palimpsa_surgery.hf_models import PalimpsaMamba2ForCausalLM
from palimpsa_surgery.surgery.progress import track
from palimpsa_surgery.surgery.windows import observing

_LOGITS = 1 << 23  # logits of each model held at once


@dataclass(frozen=True)
class Drift:
    """How far a hybrid is from its source.

    Attributes:
        relative: root mean square of the logits' difference over that of the source's logits.
        kl: mean over tokens of KL(source ‖ hybrid) between their predictions, in nats.
        max_importance_ratio: largest Ibar / I_prior over tokens and state elements of the new layers.
        tokens: tokens of text it was measured on.
    """

    relative: float
    kl: float
    max_importance_ratio: float
    tokens: int


def largest_importance(gate: Tensor, dt: Tensor, decay_rate: Tensor, keys: Tensor) -> Tensor:
    """The largest Ibar over time, sequences and state elements, for softplus(b_scale) = 1.

    Ibar (paper Eq. 5) is linear in softplus(b_scale), so that one pass serves every scale.

    Args:
        gate: [B, T, H, P] importance gate, in (0, 1).
        dt: [B, T, H] float32.
        decay_rate: [H] A > 0, float32.
        keys: [B, T, G, N] B of the recurrence.

    Returns:
        [H] float32.
    """
    groups = keys.shape[2]
    beta = (gate.float() * dt[..., None]).unflatten(2, (groups, -1))[..., None]  # [B, T, G, H/G, P, 1]
    alpha = torch.exp(-decay_rate * dt).unflatten(2, (groups, -1))[..., None, None]  # [B, T, G, H/G, 1, 1]
    squares = keys.float().square().contiguous()[:, :, :, None, None]  # [B, T, G, 1, 1, N]; read T times below
    importance = torch.zeros(torch.broadcast_shapes(beta[:, 0].shape, squares[:, 0].shape), device=beta.device)
    largest = torch.zeros_like(importance)
    for t in range(beta.shape[1]):  # one state at a time: all of them would not fit
        importance.mul_(alpha[:, t]).addcmul_(beta[:, t], squares[:, t])
        torch.maximum(largest, importance, out=largest)
    return largest.amax(dim=(0, 3, 4)).flatten()


class ImportancePeaks:
    """An observer that keeps `largest_importance` of each layer over all sequences it sees."""

    def __init__(self) -> None:
        self.peaks: dict[int, Tensor] = {}

    def __call__(self, layer: int, seen: dict[str, Tensor]) -> None:
        """Account for one forward pass of one Palimpsa layer."""
        peak = largest_importance(seen["importance_gate"], seen["dt"], seen["A"], seen["B"])
        self.peaks[layer] = torch.maximum(self.peaks[layer], peak) if layer in self.peaks else peak

    def ratios(self, model: PalimpsaMamba2ForCausalLM) -> dict[int, Tensor]:
        """importance_ratio of each layer seen: the largest Ibar / I_prior of each head, [H] float64 on the CPU."""
        ratios = {}
        for layer, peak in self.peaks.items():
            mixer = model.backbone.layers[layer].mixer
            scale, prior = F.softplus(mixer.b_scale.double()), torch.exp(mixer.Ip_log.double())
            ratios[layer] = (peak * scale / prior).detach().cpu()
        return ratios


@torch.inference_mode()
def measure_drift(
    source: PalimpsaMamba2ForCausalLM,
    hybrid: PalimpsaMamba2ForCausalLM,
    sample: Sequence[Sequence[int]],
    new_layers: Collection[int],
) -> Drift:
    """Compare two models of the same vocabulary on sequences of tokens.

    Args:
        source: the model before the replacement.
        hybrid: the model after it.
        sample: token ids, one or more sequences.
        new_layers: the Palimpsa layers that `source` does not have.
    """
    peaks = ImportancePeaks()
    difference = power = divergence = 0.0
    vocabulary, device = source.config.vocab_size, source.lm_head.weight.device
    with observing(hybrid, peaks, new_layers):
        for row in track(sample, "measuring drift"):
            ids = torch.tensor([row], device=device)
            states = [model.backbone(ids, use_cache=False).last_hidden_state[0] for model in (source, hybrid)]
            size = max(1, _LOGITS // vocabulary)  # the logits of a long sequence need not exist at once
            for before, after in zip(*(state.split(size) for state in states), strict=True):
                logits, other = source.lm_head(before).double(), hybrid.lm_head(after).double()
                difference += (other - logits).square().sum().item()
                power += logits.square().sum().item()
                divergence += F.kl_div(
                    other.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="sum"
                ).item()
    tokens = sum(map(len, sample))
    largest = max((ratio.max().item() for ratio in peaks.ratios(hybrid).values()), default=0.0)
    return Drift(
        relative=math.sqrt(difference / power) if power else math.nan,
        kl=divergence / tokens,
        max_importance_ratio=largest,
        tokens=tokens,
    )
