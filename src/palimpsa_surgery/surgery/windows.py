"""Effective memory windows, N_t = 1 / (1 - alpha_t), gathered from any amount of text in constant memory.

A window says how many tokens of evidence a head keeps at a token (paper 2.2): 1 forgets everything at once,
infinity forgets nothing. Windows spread over many orders of magnitude, so they are counted on a log axis.
Letters: B batch, T time, H heads.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from palimpsa_surgery.hf_models import PalimpsaMamba2ForCausalLM

POSITION_BINS = 256
"""Sequences longer than this share bins between neighbouring positions."""

_BIN_WIDTH = 0.01  # of log N: a value is known within 0.5%
_GROWTH = 256  # bins added at least when the histogram must grow


def log_window(dt: Tensor, decay_rate: Tensor) -> Tensor:
    """log N_t = -log(1 - alpha_t), where alpha = exp(-A dt); finite for every A dt > 0.

    Args:
        dt: [B, T, H] time steps after bias, softplus and limits, ≥ 0; float32 or float64.
        decay_rate: [H] A > 0, of the same type.

    Returns:
        [B, T, H], in [0, inf]; inf where A dt = 0.
    """
    # expm1, not 1 - exp: a window of 1e6 would otherwise have one significant digit in float32
    return -torch.log(-torch.expm1(-decay_rate * dt))


class LogHistogram:
    """Counts of values ≥ 1 in bins of log value, for `rows` separate populations.

    Quantiles are right within 0.5% (half a bin). The bins cover what has been seen, so memory depends on the
    range of the values, at most 0.1 MB per row for all of float32, and never on their number.
    """

    def __init__(self, rows: int) -> None:
        self.counts = torch.zeros(rows, 0, dtype=torch.int64)  # [rows, bins]
        self.first = 0  # index of the first bin: the bin i covers exp(i w) to exp((i + 1) w)
        self.infinite = torch.zeros(rows, dtype=torch.int64)

    def _cover(self, low: int, high: int) -> None:
        """Make the bins from `low` to `high`, both included, exist."""
        rows, bins = self.counts.shape
        if bins == 0:
            self.first = low
        before = max(0, self.first - low)
        after = max(0, high + 1 - self.first - bins)
        if before:
            before = min(max(before, _GROWTH), self.first)  # no value lies below 1
        if after:
            after = max(after, _GROWTH)
        if before or after:
            zeros = [torch.zeros(rows, n, dtype=torch.int64) for n in (before, after)]
            self.counts = torch.cat([zeros[0], self.counts, zeros[1]], dim=1)
            self.first -= before

    def add(self, rows: Tensor, log_values: Tensor) -> None:
        """Count `log_values`, each in the row that `rows` names; the two are broadcast together.

        Args:
            rows: integers in [0, rows).
            log_values: ≥ 0, inf allowed, NaN not.
        """
        rows, log_values = torch.broadcast_tensors(rows.to(log_values.device), log_values)
        rows, log_values = rows.reshape(-1), log_values.reshape(-1)
        finite = torch.isfinite(log_values)
        if not finite.all():
            self.infinite += torch.bincount(rows[~finite], minlength=len(self.infinite)).cpu()
            rows, log_values = rows[finite], log_values[finite]
        if len(log_values) == 0:
            return
        index = (log_values / _BIN_WIDTH).long()
        self._cover(int(index.min()), int(index.max()))
        lowest, highest = int(rows.min()), int(rows.max())  # the rows concerned, so that one layer stays cheap
        bins = self.counts.shape[1]
        cells = (rows - lowest) * bins + (index - self.first)
        counts = torch.bincount(cells, minlength=(highest - lowest + 1) * bins).cpu()
        self.counts[lowest : highest + 1] += counts.view(-1, bins)

    def merge(self, other: "LogHistogram") -> None:
        """Add the counts of `other`, a histogram with as many rows."""
        used = other.counts.sum(0).nonzero()[:, 0]
        if len(used):
            low, high = int(used[0]), int(used[-1]) + 1
            self._cover(other.first + low, other.first + high - 1)
            start = other.first + low - self.first
            self.counts[:, start : start + high - low] += other.counts[:, low:high]
        self.infinite += other.infinite

    def pooled(self, rows_per_pool: int) -> "LogHistogram":
        """A histogram in which every `rows_per_pool` neighbouring rows are one."""
        pooled = LogHistogram(len(self.infinite) // rows_per_pool)
        pooled.first = self.first
        pooled.counts = self.counts.unflatten(0, (-1, rows_per_pool)).sum(1)
        pooled.infinite = self.infinite.unflatten(0, (-1, rows_per_pool)).sum(1)
        return pooled

    @property
    def totals(self) -> Tensor:
        """Values counted so far, [rows] int64."""
        return self.counts.sum(1) + self.infinite

    def quantiles(self, levels: Sequence[float]) -> Tensor:
        """Quantiles of the values (not of their logs), [rows, levels] float64; NaN for an empty row.

        Interpolates between neighbouring order statistics, as numpy's default does.
        """
        cumulative = torch.cat([self.counts, self.infinite[:, None]], dim=1).cumsum(1)  # [rows, bins + 1]
        centres = torch.exp((torch.arange(self.counts.shape[1], dtype=torch.float64) + self.first + 0.5) * _BIN_WIDTH)
        values = torch.cat([centres, torch.tensor([math.inf], dtype=torch.float64)])
        totals = cumulative[:, -1:]  # [rows, 1]
        ranks = torch.tensor(levels, dtype=torch.float64) * (totals - 1).clamp_min(0)  # [rows, levels]
        low, high = (
            values[torch.searchsorted(cumulative, order.long(), right=True).clamp_max(len(values) - 1)]
            for order in (ranks.floor(), ranks.ceil())
        )
        weight = ranks.frac()
        between = torch.where(weight > 0, low + weight * (high - low), low)
        between = torch.where(torch.isinf(low), low, between)  # inf - inf is NaN
        return torch.where(totals > 0, between, math.nan)


class WindowStatistics:
    """Windows of every layer: per-head and per-position histograms, filled batch by batch.

    Neither the order of the batches nor how the text is divided among several objects that are merged
    makes a difference.
    """

    def __init__(self, num_layers: int, num_heads: int, sequence_length: int) -> None:
        self.num_layers, self.num_heads, self.sequence_length = num_layers, num_heads, sequence_length
        self.position_bins = min(sequence_length, POSITION_BINS)
        self.heads = LogHistogram(num_layers * num_heads)  # windows of every token, one row per head
        # medians over the heads of every token, one row per bin of positions
        self.positions = LogHistogram(num_layers * self.position_bins)

    def update(self, layer: int, dt: Tensor, decay_rate: Tensor) -> None:
        """Count the windows of one layer on a batch of sequences that start at position 0.

        Args:
            layer: index of the layer.
            dt: [B, T, H] as in `log_window`; T is at most the sequence length.
            decay_rate: [H].

        Raises:
            ValueError: a time step or decay rate is NaN, infinite or negative.
        """
        logs = log_window(dt, decay_rate)
        if not (torch.isfinite(dt).all() and torch.isfinite(decay_rate).all()) or logs.isnan().any():
            raise ValueError(f"layer {layer} has time steps that are NaN, infinite or negative")
        heads = layer * self.num_heads + torch.arange(self.num_heads)
        self.heads.add(heads, logs)
        time = torch.arange(dt.shape[1])
        bins = layer * self.position_bins + time * self.position_bins // self.sequence_length
        self.positions.add(bins, _log_median(logs))

    def merge(self, other: "WindowStatistics") -> None:
        """Add what `other`, of the same shape, has counted."""
        self.heads.merge(other.heads)
        self.positions.merge(other.positions)

    @property
    def tokens(self) -> int:
        """Tokens seen by the first layer."""
        return int(self.heads.totals[0])

    def position_starts(self) -> list[int]:
        """First position of each bin that has been reached."""
        reached = int((self.positions.totals[: self.position_bins] > 0).sum())
        length, bins = self.sequence_length, self.position_bins
        return [-(-index * length // bins) for index in range(reached)]

    def layer_quantiles(self, levels: Sequence[float]) -> Tensor:
        """Quantiles of the windows over all tokens and heads, [layers, levels] float64."""
        return self.heads.pooled(self.num_heads).quantiles(levels)

    def head_medians(self) -> Tensor:
        """Medians over tokens, [layers, heads] float64."""
        return self.heads.quantiles([0.5]).view(self.num_layers, self.num_heads)

    def position_medians(self) -> Tensor:
        """Per bin of positions, the median over its tokens of the median over heads (paper Fig. 6, right).

        [layers, bins reached] float64.
        """
        medians = self.positions.quantiles([0.5]).view(self.num_layers, self.position_bins)
        return medians[:, : len(self.position_starts())]

    def paper_medians(self) -> Tensor:
        """The paper's score (A.10): the median over positions of the median over heads, [layers] float64."""
        return self.positions.pooled(self.position_bins).quantiles([0.5])[:, 0]


def _log_median(logs: Tensor) -> Tensor:
    """Log of the median over the last dimension of the values (not logs); the mean of the middle two."""
    ordered = logs.sort(-1).values
    count = ordered.shape[-1]
    low, high = ordered[..., (count - 1) // 2], ordered[..., count // 2]
    return torch.logaddexp(low, high) - math.log(2)


@contextmanager
def observing(
    model: PalimpsaMamba2ForCausalLM,
    observer: Callable[[int, dict[str, Tensor | None]], None],
    layers: Iterable[int] | None = None,
) -> Iterator[None]:
    """Have the mixers of `layers` (default: all) call `observer(layer, seen)` in every forward pass.

    `seen` holds dt, A, x, B, C and, in Palimpsa layers, the importance gate; see the mixers.
    """
    stack = model.backbone.layers
    mixers = [stack[layer].mixer for layer in (range(len(stack)) if layers is None else layers)]
    for mixer in mixers:
        mixer.observer = observer
    try:
        yield
    finally:
        for mixer in mixers:
            mixer.observer = None
