"""How long the layers remember and how unequal their importance is, in one forward pass: cheap enough while training.

`diagnose` measures the same and more, by position, over long texts. Letters: B batch, T time, H heads.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from palimpsa_surgery.hf_models import PalimpsaMamba2ForCausalLM
from palimpsa_surgery.surgery.state_statistics import importance_ratios
from palimpsa_surgery.surgery.windows import log_window, observing


@dataclass(frozen=True)
class LayerProbe:
    """One layer on a batch of sequences, each from an empty state.

    Attributes:
        layer: index of the layer.
        kind: what the layer is.
        median_window: median effective window N_t over tokens and heads, in tokens; inf forgets nothing.
        mean_log_window: mean of log N_t (natural) over the same, as in the paper's Fig. 3.
        importance_ratio: largest Ibar / I_prior of the state after the last token, over sequences, heads and
            elements; None in a Mamba2 layer.
        metaplasticity_ratio: (I_max - I_min) / I_min over a head's elements after the last token (paper 3.2 and
            Fig. 3), mean over sequences and heads; None in a Mamba2 layer.
    """

    layer: int
    kind: Literal["mamba2", "palimpsa"]
    median_window: float
    mean_log_window: float
    importance_ratio: float | None
    metaplasticity_ratio: float | None


@torch.no_grad()
def probe_layers(
    model: PalimpsaMamba2ForCausalLM,
    input_ids: Tensor,
    *,
    seq_idx: Tensor | None = None,
    layers: Iterable[int] | None = None,
) -> tuple[LayerProbe, ...]:
    """Run a batch through the layers, watch them, and leave model and random numbers as they were.

    Args:
        input_ids: `[B, T]`.
        seq_idx: document numbers `[B, T]`, at each of which the states start anew.
        layers: which to report on, increasing; default: all.
    """
    layers = list(range(model.config.num_hidden_layers) if layers is None else layers)
    windows: dict[int, Tensor] = {}
    priors: dict[int, Tensor] = {}

    def observe(layer: int, seen: dict[str, Tensor | None]) -> None:
        windows[layer] = log_window(seen["dt"], seen["A"]).flatten()
        if seen["importance_gate"] is not None:
            # Read here, where parameters that are divided over several processes are whole.
            priors[layer] = torch.exp(model.backbone.layers[layer].mixer.Ip_log.float())

    was_training = model.training
    model.eval()
    try:
        with observing(model, observe, layers):
            output = model(input_ids, seq_idx=seq_idx, return_final_states=True, use_cache=False, logits_to_keep=1)
            states = output.final_states
    finally:
        model.train(was_training)

    probes = []
    for layer in layers:
        importance = metaplasticity = None
        if layer in priors:
            largest, ratio = importance_ratios(states[layer].recurrent_state[:, :, 1].flatten(2), priors[layer])
            importance, metaplasticity = largest.max().item(), ratio.mean().item()
        probes.append(
            LayerProbe(
                layer=layer,
                kind="mamba2" if importance is None else "palimpsa",
                median_window=windows[layer].median().exp().item(),
                mean_log_window=windows[layer].mean().item(),
                importance_ratio=importance,
                metaplasticity_ratio=metaplasticity,
            )
        )
    return tuple(probes)
