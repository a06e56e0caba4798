"""Initial importance parameters of the layers that surgery puts in.

`draw_importance` follows the paper (2.4, A.9) and the authors' code; `calibrate_scales` then lowers or raises
b_scale until importance stays below a chosen share of the prior, so that the hybrid starts as its source.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.surgery.drift import ImportancePeaks
from palimpsa_surgery.surgery.progress import track
from palimpsa_surgery.surgery.windows import observing

PAPER_B_SCALE = (0.1, 1.0)
"""Range from which the paper draws b_scale for fine-tuning."""

_B_SCALE_UNSEEN = 1.0  # the paper's value for training from scratch, for heads that wrote nothing on the sample
_B_SCALE_LIMIT = 1000.0  # a head that hardly writes on the sample may do so on other text
_MARGIN = 0.99  # of the target: later layers' inputs move a little once earlier layers have importance


def draw_importance(config: PalimpsaMamba2Config, layer: int, seed: int) -> dict[str, Tensor]:
    """Draw the importance parameters of one layer, in float32 on the CPU, by their name in the mixer.

    The values depend on `seed` and `layer` alone: neither on torch's global generator nor on which other
    layers are replaced.
    """
    state = np.random.SeedSequence([seed, layer]).generate_state(1, np.uint64)[0]
    generator = torch.Generator().manual_seed(int(state >> np.uint64(1)))
    rank, hidden, channels = config.importance_rank, config.hidden_size, config.num_heads * config.head_dim
    bound = rank**-0.5
    return {
        "b_rank_proj.weight": torch.empty(rank, hidden).normal_(0.0, 0.02, generator=generator),
        "b_proj.weight": torch.empty(channels, rank).uniform_(-bound, bound, generator=generator),
        "b_scale": torch.empty(config.num_heads).uniform_(*PAPER_B_SCALE, generator=generator),
        "Ip_log": torch.zeros(config.num_heads),
    }


def inverse_softplus(value: Tensor) -> Tensor:
    """The x for which softplus(x) = `value` > 0, without loss for tiny or large values; float64 [...]."""
    value = value.double()
    return value + torch.log(-torch.expm1(-value))


@torch.inference_mode()
def calibrate_scales(
    model: PalimpsaMamba2ForCausalLM,
    sample: Sequence[Sequence[int]],
    layers: Sequence[int],
    target: float,
    dtype: torch.dtype,
) -> None:
    """Give each head of `layers` the largest b_scale that keeps its importance_ratio below `target`.

    importance_ratio is the largest Ibar / I_prior over the tokens of the sample and the state elements of a
    head. It is proportional to softplus(b_scale), given the layer's input; the input depends on the scales of
    earlier layers only. So the first new layer is settled after one pass, the next after two at the latest,
    and a pass that finds every ratio below the target ends it.

    Args:
        model: a hybrid; b_scale of `layers` is set in place.
        sample: token ids, one or more sequences.
        layers: indices of its new layers.
        target: > 0.
        dtype: type in which b_scale will be stored; it is rounded down to it.
    """
    mixers = {layer: model.backbone.layers[layer].mixer for layer in layers}
    device = model.lm_head.weight.device
    for mixer in mixers.values():
        mixer.b_scale.fill_(-1e4)  # softplus is zero: the first pass sees the inputs that the source has
    for attempt in range(len(layers) + 1):
        observer = ImportancePeaks()
        with observing(model, observer, layers):
            for row in track(sample, f"calibrating importance, pass {attempt + 1}"):
                model.backbone(torch.tensor([row], device=device), use_cache=False)
        if attempt and all((ratio < target).all() for ratio in observer.ratios(model).values()):
            return
        for layer, mixer in mixers.items():
            peaks = (observer.peaks[layer].double() / torch.exp(mixer.Ip_log.double())).cpu()
            mixer.b_scale.copy_(_round_down(_largest_scale(peaks, target), dtype))
    raise RuntimeError("importance did not settle below its target")


def _largest_scale(peaks: Tensor, target: float) -> Tensor:
    """b_scale [H] from the largest ratios [H] that softplus(b_scale) = 1 gives, both float64."""
    scale = inverse_softplus(_MARGIN * target / peaks).clamp(max=_B_SCALE_LIMIT)
    return torch.where(peaks > 0, scale, _B_SCALE_UNSEEN)


def _round_down(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest numbers of type `dtype` that are not above `value`."""
    rounded = value.to(dtype)
    lower = torch.nextafter(rounded, torch.full_like(rounded, -torch.inf))
    return torch.where(rounded.double() > value, lower, rounded)
