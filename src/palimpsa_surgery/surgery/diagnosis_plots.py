"""Diagnoses for people: a figure for each quantity, and a report for the terminal.

Every figure of a layer quantity has two panels: at the left a line for each layer by position, at the right
each head of each layer.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from rich.console import Group
from rich.table import Table
from rich.text import Text

from palimpsa_surgery.surgery.plots import format_window, shortened

if TYPE_CHECKING:
    from palimpsa_surgery.surgery.diagnosis import Diagnosis
    from palimpsa_surgery.surgery.state_statistics import LayerDiagnosis

_LINE, _BAND, _GRID = "#1f6fb4", "#1f6fb433", "#d9dde1"
_HEADS_SHOWN = 6
_LABELS_AT_MOST = 10  # lines that get a legend; more of them get a colour bar

DISTANCE_NAMES = {"tv": "total variation", "js": "Jensen-Shannon divergence (bits)", "cosine": "1 - cosine"}


def plot_diagnosis(diagnosis: "Diagnosis", directory: Path) -> None:
    """Write a PNG for each quantity into an existing folder; those of importance only if there are Palimpsa layers."""
    plot_perplexity(diagnosis, directory / "perplexity.png")
    plot_remembrance(diagnosis, directory / "remembrance.png")
    plot_states(diagnosis, directory / "states.png")
    plot_windows(diagnosis, directory / "windows.png")
    if diagnosis.palimpsa_layers:
        plot_importance(diagnosis, directory / "importance.png")
        plot_importance_ratio(diagnosis, directory / "importance-ratio.png")
        plot_metaplasticity(diagnosis, directory / "metaplasticity.png")
        plot_variance(diagnosis, directory / "variance.png")


def plot_perplexity(diagnosis: "Diagnosis", path: Path) -> None:
    """Draw perplexity by position (2507.02782 Fig. 1), with its standard error over sequences.

    The first few positions, of few and surprising tokens, may leave the panel: what counts comes later.
    """
    loss = diagnosis.loss
    figure = _figure(6.4, 3.8)
    axes = figure.subplots()
    at, perplexity, nll = centres(loss.starts, loss.ends), np.array(loss.perplexity), np.array(loss.nll)
    axes.plot(at, perplexity, "o-", color=_LINE, linewidth=1.5, markersize=2.8, zorder=3)
    if loss.standard_errors is not None:
        low, high = (np.exp(nll + sign * np.array(loss.standard_errors)) for sign in (-1, 1))
        axes.fill_between(at, low, high, color=_BAND, linewidth=0, label="± standard error over sequences")
        axes.legend(frameon=False, fontsize=8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(0.9, loss.ends[-1] * 1.1)
    axes.set_ylim(settled_limits([(at, perplexity)], 1.6))
    number_ticks(axes.xaxis, 1, loss.ends[-1])
    number_ticks(axes.yaxis, *axes.get_ylim())
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("perplexity")
    finish(axes)
    figure.suptitle(f"Perplexity by position of {shortened(diagnosis.model)}", fontsize=11)
    figure.savefig(path)


def settled_limits(curves: Sequence[tuple[np.ndarray, np.ndarray]], margin: float) -> tuple[float, float]:
    """Lower and upper end of an axis for perplexities by position: the first, surprising tokens may leave the panel.

    Perplexities that are no finite number, of a model that is broken, leave it too.
    """
    values = np.concatenate([perplexity[at >= 16] if at[-1] >= 64 else perplexity for at, perplexity in curves])
    values = values[np.isfinite(values) & (values > 0)]
    return (values.min() / margin, values.max() * margin) if len(values) else (1.0, 10.0)


def plot_remembrance(diagnosis: "Diagnosis", path: Path) -> None:
    """Draw effective remembrance (2507.02782 Fig. 1e), by tokens taken away and, the same, by tokens kept."""
    remembrance = diagnosis.remembrance
    figure = _figure(8.4, 3.6)
    left, right = figure.subplots(1, 2, sharey=True)
    removed, values = np.array(remembrance.starts[1:]), np.array(remembrance.values[1:])
    kept = remembrance.length - removed
    positive = values[values > 0]
    floor = positive.min() / 2 if len(positive) else 1e-3
    for axes, at in ((left, removed), (right, kept)):
        if remembrance.standard_errors is not None:
            errors = np.array(remembrance.standard_errors[1:])
            low, high = np.maximum(values - errors, floor), np.maximum(values + errors, floor)
            axes.fill_between(at, low, high, color=_BAND, linewidth=0)
        axes.plot(at, np.maximum(values, floor), "o-", color=_LINE, linewidth=1.6, markersize=3.2)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(0.9, remembrance.length * 1.1)
        number_ticks(axes.xaxis, 1, remembrance.length)
        finish(axes)
    left.set_ylim(bottom=floor / 1.2)
    number_ticks(left.yaxis, *left.get_ylim())
    left.set_ylabel(f"EffRem, {DISTANCE_NAMES[remembrance.distance]}")
    left.set_xlabel("tokens taken away from the front, $t$")
    right.invert_xaxis()
    right.set_xlabel("tokens kept before the prediction, $T - t$")
    title = f"Effective remembrance at $T$ = {remembrance.length:,} of {shortened(diagnosis.model)}"
    figure.suptitle(title, fontsize=11)
    figure.savefig(path)


def plot_states(diagnosis: "Diagnosis", path: Path) -> None:
    """Draw mean and spread of the states: a line for each layer, and the heads that change most at the end.

    As 2507.02782 Figs. 4 and 9: what tells is a change beyond the length a model was trained on.
    """
    std = _values(diagnosis.layers, lambda layer: layer.state_std)
    mean = _values(diagnosis.layers, lambda layer: layer.state_mean)
    figure = _figure(9.2, 6.2)
    panels = figure.subplots(2, 2, sharex=True)
    colours = _layer_colours(diagnosis.layers)
    shown = _changing_heads(diagnosis.positions, std)
    names = [f"layer {diagnosis.layers[row].layer}, head {head}" for row, head in shown]
    for row, (values, of) in enumerate(((std, "standard deviation"), (mean, "mean"))):
        left, right = panels[row]
        magnitude = np.median(np.abs(values), axis=2)
        for layer in range(len(values)):
            left.plot(diagnosis.positions, magnitude[layer], color=colours[layer], linewidth=1.1)
        for order, (layer, head) in enumerate(shown):
            colour = colormaps["tab10"](order)
            right.plot(diagnosis.positions, values[layer, :, head], color=colour, linewidth=1.4)
        _log_axis(left, magnitude)
        left.set_ylabel(f"{of} of $M$" if row == 0 else "|mean| of $M$")
        right.set_ylabel(f"{of} of $M$")
        for axes in (left, right):
            _position_axis(axes, diagnosis.positions, label=row == 1)
    panels[0, 0].set_title("median over heads of each layer", fontsize=9)
    panels[0, 1].set_title("heads that change most over the last two octaves", fontsize=9)
    below = {"loc": "upper center", "bbox_to_anchor": (0.44, -0.22), "columnspacing": 1.0, "handlelength": 1.3}
    legend = panels[1, 1].legend(panels[0, 1].lines, names, ncols=3, frameon=False, fontsize=8, **below)
    legend.set_in_layout(False)  # it has the room beside the colour bar
    _name_layers(figure, panels[:, 0], diagnosis.layers)
    figure.suptitle(f"States by position of {shortened(diagnosis.model)}", fontsize=11)
    figure.savefig(path)


def plot_windows(diagnosis: "Diagnosis", path: Path) -> None:
    """Draw the effective memory windows N_t by position and by head."""
    windows = np.array([layer.position_windows for layer in diagnosis.layers])
    heads = np.array([layer.head_windows for layer in diagnosis.layers])
    _plot_layers(
        diagnosis, path, diagnosis.layers, windows, heads, "Effective memory windows", "window $N_t$ (tokens)", log=True
    )


def plot_importance(diagnosis: "Diagnosis", path: Path) -> None:
    """Draw mean and spread of the importance above the prior, Ibar, by position, and its mean by head."""
    layers = _palimpsa(diagnosis)
    mean = _values(layers, lambda layer: layer.importance.mean)
    std = _values(layers, lambda layer: layer.importance.std)
    figure = _figure(9.2, 3.6)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, values, name in ((panels[0], mean, "mean"), (panels[1], std, "standard deviation")):
        _draw_layers(axes, diagnosis.positions, values, layers)
        axes.set_ylabel(rf"{name} of $\bar I$")
        axes.set_title(_of_heads(layers), fontsize=9)
    _log_axis(panels[0], np.concatenate([mean, std]))
    _name_layers(figure, panels, layers)
    figure.suptitle(f"Importance above the prior of {shortened(diagnosis.model)}", fontsize=11)
    figure.savefig(path)


def plot_importance_ratio(diagnosis: "Diagnosis", path: Path) -> None:
    """Draw the largest Ibar / I_prior by position and head."""
    layers = _palimpsa(diagnosis)
    values = _values(layers, lambda layer: layer.importance.importance_ratio)
    label = r"largest $\bar I\,/\,I_{prior}$"
    _plot_layers(diagnosis, path, layers, values, values[:, -1], "Importance ratio", label, log=True)


def plot_metaplasticity(diagnosis: "Diagnosis", path: Path) -> None:
    """Draw the metaplasticity ratio (paper Fig. 3) by position and head."""
    layers = _palimpsa(diagnosis)
    values = _values(layers, lambda layer: layer.importance.metaplasticity_ratio)
    label = r"$(I_{max} - I_{min})\,/\,I_{min}$"
    _plot_layers(diagnosis, path, layers, values, values[:, -1], "Metaplasticity ratio", label, log=True)


def plot_variance(diagnosis: "Diagnosis", path: Path) -> None:
    """Draw the predictive variance, as a fraction of what the prior alone would give, by position and head."""
    layers = _palimpsa(diagnosis)
    values = relative_variance(layers)
    label = "predictive variance / prior variance"
    _plot_layers(diagnosis, path, layers, values, values[:, -1], "Predictive variance", label, log=False)


def relative_variance(layers: Sequence["LayerDiagnosis"]) -> np.ndarray:
    """Predictive variance over the prior's at the same tokens, [layers, positions, heads], in (0, 1]."""
    variance = _values(layers, lambda layer: layer.importance.variance)
    return variance / _values(layers, lambda layer: layer.importance.prior_variance)


def _plot_layers(
    diagnosis: "Diagnosis",
    path: Path,
    layers: Sequence["LayerDiagnosis"],
    values: np.ndarray,
    heads: np.ndarray,
    title: str,
    label: str,
    *,
    log: bool,
) -> None:
    """Draw one quantity: by position, [layers, positions(, heads)], and by head, [layers, heads]."""
    figure = _figure(9.2, min(max(3.6, 2.2 + 0.11 * len(layers)), 8.0))
    left, right = figure.subplots(1, 2)
    _draw_layers(left, diagnosis.positions, values, layers)
    if log:
        _log_axis(left, values)
    left.set_ylabel(label)
    _name_layers(figure, left, layers)
    low, high = _span(heads)
    norm = LogNorm(low, max(high, low * 1.1)) if log else Normalize(low, max(high, low + 1e-6))
    edges = np.arange(len(layers) + 1) - 0.5
    shown = np.clip(heads, low, high)
    mesh = right.pcolormesh(np.arange(heads.shape[1] + 1) - 0.5, edges, shown, norm=norm, cmap="viridis")
    right.set_ylim(len(layers) - 0.5, -0.5)
    right.yaxis.set_major_locator(MaxNLocator(nbins=min(len(layers), 12), integer=True, min_n_ticks=1))
    right.yaxis.set_major_formatter(FuncFormatter(lambda at, _: _layer_at(layers, at)))
    right.xaxis.set_major_locator(MaxNLocator(nbins=min(heads.shape[1], 10), integer=True, min_n_ticks=1))
    right.set_xlabel("head")
    right.set_ylabel("layer")
    bar = figure.colorbar(mesh, ax=right, pad=0.02, aspect=28)
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=9)
    if log:
        number_ticks(bar.ax.yaxis, norm.vmin, norm.vmax)
    when = "over all tokens" if values.ndim == 2 else f"at {diagnosis.positions[-1]:,} tokens"
    left.set_title("median over heads" if values.ndim == 2 else _of_heads(layers), fontsize=9)
    right.set_title(f"by head, {when}", fontsize=9)
    figure.suptitle(f"{title} of {shortened(diagnosis.model)}", fontsize=11)
    figure.savefig(path)


def _of_heads(layers: Sequence["LayerDiagnosis"]) -> str:
    """What the lines are; there are bands as long as there are few lines."""
    return "median over heads" + (" (bands: middle half)" if len(layers) <= _LABELS_AT_MOST else "")


def _draw_layers(axes: Axes, positions: Sequence[int], values: np.ndarray, layers: Sequence["LayerDiagnosis"]) -> None:
    """A line for each layer: the median over heads, where there are heads, with a band for their middle half."""
    colours = _layer_colours(layers)
    values = np.where(np.isfinite(values), values, np.nan)
    for row, colour in enumerate(colours):
        line = values[row]
        if line.ndim == 2:
            low, line, high = np.quantile(line, (0.25, 0.5, 0.75), axis=1)
            if len(layers) <= _LABELS_AT_MOST:
                axes.fill_between(positions, low, high, color=colour, alpha=0.08, linewidth=0)
        axes.plot(positions, line, color=colour, linewidth=1.4, label=f"layer {layers[row].layer}")
    _position_axis(axes, positions, label=True)


def _changing_heads(positions: Sequence[int], std: np.ndarray) -> list[tuple[int, int]]:
    """The (row, head) whose spread changed most, up or down, since a quarter of the positions."""
    quarter = _quarter(positions)
    tiny = np.finfo(float).tiny
    change = np.abs(np.log(np.maximum(std[:, -1], tiny) / np.maximum(std[:, quarter], tiny)))
    order = np.argsort(-change, axis=None, kind="stable")[:_HEADS_SHOWN]
    return [tuple(map(int, np.unravel_index(place, change.shape))) for place in order]


def _quarter(positions: Sequence[int]) -> int:
    """Index of the position nearest above a quarter of the last one."""
    return int(np.searchsorted(positions, positions[-1] / 4))


def _values(layers: Sequence["LayerDiagnosis"], read: Callable[["LayerDiagnosis"], object]) -> np.ndarray:
    """[layers, positions, heads] float64."""
    return np.array([read(layer) for layer in layers], dtype=float)


def _palimpsa(diagnosis: "Diagnosis") -> list["LayerDiagnosis"]:
    return [layer for layer in diagnosis.layers if layer.importance is not None]


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def finish(axes: Axes) -> None:
    """Give a panel its grid and take away what frames it."""
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _position_axis(axes: Axes, positions: Sequence[int], *, label: bool) -> None:
    axes.set_xscale("log")
    axes.set_xlim(positions[0] / 1.05, positions[-1] * 1.05)
    number_ticks(axes.xaxis, positions[0], positions[-1])
    if label:
        axes.set_xlabel("position (tokens)")
    finish(axes)


def _layer_colours(layers: Sequence["LayerDiagnosis"]) -> np.ndarray:
    """A colour for each layer, by depth; the palest end of the map is left out, since lines in it are hard to see."""
    return colormaps["viridis"](np.linspace(0, 0.9, len(layers)))


def _name_layers(figure: Figure, panels: object, layers: Sequence["LayerDiagnosis"]) -> None:
    """Say which colour is which layer: a legend for a few, a colour bar for many."""
    first = np.atleast_1d(panels)[0]
    if len(layers) <= _LABELS_AT_MOST and first.get_legend_handles_labels()[0]:
        first.legend(fontsize=8, ncols=2, edgecolor="none", framealpha=0.8)
        return
    colours = _layer_colours(layers)
    edges = np.arange(len(layers) + 1) - 0.5
    scale = ScalarMappable(BoundaryNorm(edges, len(layers)), ListedColormap(colours))
    bar = figure.colorbar(scale, ax=panels, location="bottom", pad=0.02, aspect=45)
    bar.outline.set_visible(False)
    bar.set_label("layer", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    bar.ax.xaxis.set_major_locator(MaxNLocator(nbins=14, integer=True, min_n_ticks=1))
    bar.ax.xaxis.set_major_formatter(FuncFormatter(lambda at, _: _layer_at(layers, at)))
    bar.ax.xaxis.set_minor_locator(NullLocator())


def _layer_at(layers: Sequence["LayerDiagnosis"], row: float) -> str:
    inside = 0 <= row < len(layers) and float(row).is_integer()
    return str(layers[int(row)].layer) if inside else ""


def centres(starts: Sequence[int], ends: Sequence[int]) -> np.ndarray:
    """Geometric centres of bins of whole numbers."""
    return np.sqrt(np.array(starts, dtype=float) * (np.array(ends, dtype=float) - 1))


def _span(values: np.ndarray) -> tuple[float, float]:
    """Least and greatest of the finite values above zero."""
    usable = values[np.isfinite(values) & (values > 0)]
    return (float(usable.min()), float(usable.max())) if len(usable) else (1.0, 1.0)


def _log_axis(axes: Axes, values: np.ndarray) -> None:
    """Make y logarithmic, with plain numbers, unless there is nothing above zero to show."""
    if (values > 0).any():
        axes.set_yscale("log")
        number_ticks(axes.yaxis, *axes.get_ylim())


def number_ticks(axis: Axis, low: float, high: float) -> None:
    """Plain numbers at a log axis's ticks; the less it spans, the more ticks."""
    decades = abs(math.log10(high / low)) if low > 0 and high > 0 else 1.0
    steps = (1.0,) if decades > 2.5 else (1.0, 3.0) if decades > 1.2 else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    if decades < 0.3:
        axis.set_major_locator(MaxNLocator(nbins=5))
    else:
        axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    axis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    """A tick's number: 0.001, 30, 16k, 2M, and others as powers of ten."""
    for size, unit in ((1, ""), (1e3, "k"), (1e6, "M")):
        if 1e-3 <= abs(value) < size * 1000:
            return f"{value / size:.4g}{unit}"
    if value == 0:
        return "0"
    factor, exponent = f"{value:.2e}".split("e")
    times = "" if float(factor) == 1 else rf"{float(factor):g} \times "
    return f"${times}10^{{{int(exponent)}}}$"


def diagnosis_report(diagnosis: "Diagnosis") -> Group:
    """What was measured, for a terminal of 80 columns."""
    many = "s" if diagnosis.sequences > 1 else ""
    remembrance = diagnosis.remembrance
    quarter, last = (diagnosis.positions[index] for index in (_quarter(diagnosis.positions), -1))
    notes = [f"state std: of M after {last:,} tokens; growth: its ratio to that after {quarter:,}"]
    if diagnosis.palimpsa_layers:
        notes.append("importance: largest Ibar / I_prior, here of any head")
        notes.append("metaplast.: (I_max - I_min) / I_min; variance: predictive over the prior's")
    return Group(
        Text(f"Perplexity over {diagnosis.sequences} sequence{many} of {last:,} tokens", style="bold"),
        _loss_table(diagnosis),
        Text(f"Effective remembrance at {remembrance.length:,} tokens", style="bold"),
        _remembrance_table(diagnosis),
        Text("Layers, as medians over heads", style="bold"),
        _layer_table(diagnosis),
        Text("\n".join(notes), style="dim"),
    )


def _loss_table(diagnosis: "Diagnosis") -> Table:
    """Perplexity in bins of two octaves."""
    loss = diagnosis.loss
    table = _table("positions", "perplexity")
    for low, high in loss.double_octaves():
        table.add_row(f"{low:,} to {high - 1:,}", f"{loss.perplexity_between(low, high):,.2f}")
    return table


def _remembrance_table(diagnosis: "Diagnosis") -> Table:
    """Some of the suffixes, the first and last among them."""
    remembrance = diagnosis.remembrance
    table = _table("taken away", "kept", DISTANCE_NAMES[remembrance.distance])
    count = len(remembrance.starts)
    for index in np.unique(np.linspace(0, count - 1, min(count, 9)).round().astype(int)):
        start = remembrance.starts[index]
        table.add_row(f"{start:,}", f"{remembrance.length - start:,}", f"{remembrance.values[index]:.3g}")
    return table


def _layer_table(diagnosis: "Diagnosis") -> Table:
    """Windows over all tokens, everything else at the end of the text."""
    quarter = _quarter(diagnosis.positions)
    hybrid = ("importance", "metaplast.", "variance") if diagnosis.palimpsa_layers else ()
    table = _table("layer", "window", "state std", "growth", *hybrid)
    for layer in diagnosis.layers:
        std = np.median(np.array(layer.state_std), axis=1)
        cells = [str(layer.layer), format_window(layer.median_window), f"{std[-1]:.3g}"]
        cells.append(f"{std[-1] / std[quarter]:.2f}" if std[quarter] > 0 else "")
        if layer.importance is not None:
            cells.append(f"{max(layer.importance.importance_ratio[-1]):.3g}")
            cells.append(f"{np.median(layer.importance.metaplasticity_ratio[-1]):.3g}")
            cells.append(f"{np.median(relative_variance([layer])[0, -1]):.3f}")
        table.add_row(*cells, style=None if layer.importance is None else "blue")
    return table


def _table(*columns: str) -> Table:
    table = Table()
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table
