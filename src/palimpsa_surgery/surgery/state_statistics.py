"""What happens inside the layers as a text goes by: states, importance, windows, predictive variance.

Everything is gathered from the states a model carries between pieces of a text and from what its mixers show
to an observer, in memory that does not depend on the text.
Letters: T time, H heads, P head_dim, N state_size, K sampled positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from palimpsa_surgery.hf_models import PalimpsaMamba2ForCausalLM
from palimpsa_surgery.hf_models.modeling_palimpsa_mamba2 import LayerState
from palimpsa_surgery.kernels.scan import palimpsa_scan
from palimpsa_surgery.surgery.windows import LogHistogram, log_window

Table = tuple[tuple[float, ...], ...]
"""Numbers by sampled position and head, [K][H]."""


@dataclass(frozen=True)
class Importance:
    """What only Palimpsa layers have. Tables are [K][H]; see `LayerDiagnosis` for the positions.

    Attributes:
        mean, std: of Ibar over a head's P × N elements, averaged over sequences.
        importance_ratio: the largest Ibar / I_prior of the elements, over all sequences.
        metaplasticity_ratio: (I_max - I_min) / I_min over the elements, with I = I_prior + Ibar (paper 3.2
            and Fig. 3), averaged over sequences.
        variance: predictive variance of the read-out, (1 / I) C² (paper 2.3), averaged over the tokens since
            the position before, the head's P channels and the sequences.
        prior_variance: what it would be at the same tokens with empty states, C² / I_prior.
    """

    mean: Table
    std: Table
    importance_ratio: Table
    metaplasticity_ratio: Table
    variance: Table
    prior_variance: Table


@dataclass(frozen=True)
class LayerDiagnosis:
    """One layer, at the sampled positions: after that many tokens, or for windows up to there from the one before.

    Attributes:
        layer: index of the layer.
        kind: what the layer is.
        median_window: median effective window N_t over all tokens and heads, in tokens; inf forgets nothing.
        head_windows: median over tokens of each head, [H].
        position_windows: median over the tokens since the position before and all heads, [K].
        state_mean, state_std: of the state M over a head's P × N elements, averaged over sequences, [K][H]
            (2507.02782 Figs. 4 and 9).
        importance: None in a Mamba2 layer.
    """

    layer: int
    kind: Literal["mamba2", "palimpsa"]
    median_window: float
    head_windows: tuple[float, ...]
    position_windows: tuple[float, ...]
    state_mean: Table
    state_std: Table
    importance: Importance | None


class StateStatistics:
    """Gathers the statistics of every layer, sequence by sequence and piece by piece.

    An observer of the mixers. Pieces must not reach across a sampled position:

        for each sequence:
            statistics.start_sequence()
            for each piece:
                run the model on it, observed by `statistics`, from the states before
                statistics.finish_piece(end, states)
    """

    def __init__(self, model: PalimpsaMamba2ForCausalLM, positions: Sequence[int]) -> None:
        """Prepare for sequences of `positions[-1]` tokens, sampled after each of `positions` (increasing)."""
        config = model.config
        self.model, self.positions = model, list(positions)
        self.layers, self.heads = config.num_hidden_layers, config.num_heads
        self.palimpsa = set(config.palimpsa_layers)
        self.sequences = 0
        self.head_windows = LogHistogram(self.layers * self.heads)
        self.position_windows = LogHistogram(self.layers * len(self.positions))
        shape = (self.layers, len(self.positions), self.heads)
        self.sums = {
            name: torch.zeros(shape, dtype=torch.float64)
            for name in ("state_mean", "state_std", "mean", "std", "metaplasticity_ratio", "variance", "prior_variance")
        }
        self.importance_ratio = torch.zeros(shape, dtype=torch.float64)
        self.start_sequence()

    def start_sequence(self) -> None:
        """Begin a sequence, from empty states."""
        self.interval = 0  # index of the next sampled position
        self.states: Sequence[LayerState] | None = None

    def __call__(self, layer: int, seen: dict[str, Tensor | None]) -> None:
        """Observe one mixer on one piece; see `windows.observing`."""
        logs = log_window(seen["dt"], seen["A"])
        if logs.isnan().any():  # the logits will be NaN too, and whoever reads them knows their position
            return
        self.head_windows.add(layer * self.heads + torch.arange(self.heads), logs)
        self.position_windows.add(torch.tensor(layer * len(self.positions) + self.interval), logs)
        if layer in self.palimpsa:
            self._add_variance(layer, seen)

    def _add_variance(self, layer: int, seen: dict[str, Tensor]) -> None:
        mixer = self.model.backbone.layers[layer].mixer
        dt, keys, queries = seen["dt"], seen["B"], seen["C"]
        beta = seen["importance_gate"].float() * (F.softplus(mixer.b_scale.float()) * dt)[..., None]
        prior = torch.exp(mixer.Ip_log.float())
        _, _, variance = palimpsa_scan(
            seen["x"],
            dt,
            seen["A"],
            keys,
            queries,
            beta.to(seen["x"].dtype),
            prior,
            initial_state=None if self.states is None else self.states[layer].recurrent_state,
            return_variance=True,
        )
        self.sums["variance"][layer, self.interval] += variance.double().mean(3).sum((0, 1)).cpu()
        squares = queries.double().square().sum((0, 1, 3)).repeat_interleave(self.heads // queries.shape[2])
        self.sums["prior_variance"][layer, self.interval] += (squares / prior.double()).cpu()

    def finish_piece(self, end: int, states: Sequence[LayerState]) -> None:
        """Keep the states after `end` tokens for the next piece, and sample them if they are to be.

        Args:
            states: of a batch of one sequence.
        """
        self.states = states
        if end != self.positions[self.interval]:
            return
        for layer, state in enumerate(states):
            self._sample(layer, state.recurrent_state[0].double())
        self.interval += 1
        self.sequences += end == self.positions[-1]

    def _sample(self, layer: int, state: Tensor) -> None:
        """Add one layer's state, [H, P, N] or [H, 2, P, N]."""
        at = layer, self.interval
        M = state[:, 0] if layer in self.palimpsa else state
        self._add_mean_and_std(at, "state_mean", "state_std", M)
        if layer in self.palimpsa:
            importance = state[:, 1].flatten(1)
            self._add_mean_and_std(at, "mean", "std", importance)
            prior = torch.exp(self.model.backbone.layers[layer].mixer.Ip_log.double())
            largest, metaplasticity = importance_ratios(importance, prior)
            self.sums["metaplasticity_ratio"][at] += metaplasticity.cpu()
            self.importance_ratio[at] = torch.maximum(self.importance_ratio[at], largest.cpu())

    def _add_mean_and_std(self, at: tuple[int, int], mean_name: str, std_name: str, values: Tensor) -> None:
        variance, mean = torch.var_mean(values.flatten(1), dim=1, correction=0)
        self.sums[mean_name][at] += mean.cpu()
        self.sums[std_name][at] += variance.sqrt().cpu()

    def summary(self) -> tuple[LayerDiagnosis, ...]:
        """The layers in order, from the sequences finished so far, of which there must be one."""
        averages = {name: total / self.sequences for name, total in self.sums.items()}
        lengths = torch.tensor(self.positions).diff(prepend=torch.zeros(1, dtype=torch.int64))[:, None]
        for name in ("variance", "prior_variance"):
            averages[name] /= lengths
        heads = self.head_windows.quantiles([0.5]).view(self.layers, self.heads)
        intervals = self.position_windows.quantiles([0.5]).view(self.layers, -1)
        medians = self.head_windows.pooled(self.heads).quantiles([0.5])[:, 0]
        of_importance = ("mean", "std", "metaplasticity_ratio", "variance", "prior_variance")
        return tuple(
            LayerDiagnosis(
                layer=layer,
                kind="palimpsa" if layer in self.palimpsa else "mamba2",
                median_window=rounded(medians[layer]),
                head_windows=rounded(heads[layer]),
                position_windows=rounded(intervals[layer]),
                state_mean=rounded(averages["state_mean"][layer]),
                state_std=rounded(averages["state_std"][layer]),
                importance=Importance(
                    importance_ratio=rounded(self.importance_ratio[layer]),
                    **{name: rounded(averages[name][layer]) for name in of_importance},
                )
                if layer in self.palimpsa
                else None,
            )
            for layer in range(self.layers)
        )


def importance_ratios(importance: Tensor, I_prior: Tensor) -> tuple[Tensor, Tensor]:
    """How much evidence the elements of each head's state hold, and how unequally.

    Args:
        importance: Ibar of the P × N elements, [..., H, P N].
        I_prior: [H].

    Returns:
        The largest Ibar / I_prior, and (I_max - I_min) / I_min with I = I_prior + Ibar (paper 3.2), both [..., H].
    """
    low, high = importance.aminmax(dim=-1)
    return high / I_prior, (high - low) / (I_prior + low)


def rounded(values: Tensor) -> float | tuple:
    """A number, or nested tuples of numbers, of six digits: the rest is noise, and would double the file."""
    if values.ndim:
        return tuple(rounded(value) for value in values)
    return float(f"{values.item():.6g}")
