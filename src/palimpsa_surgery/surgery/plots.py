"""Analyses and replacements for people: the figure of the paper's appendix (Fig. 6), and tables."""

import math
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    import torch

    from palimpsa_surgery.surgery.analysis import Analysis
    from palimpsa_surgery.surgery.ledger import Ledger
    from palimpsa_surgery.surgery.replacement import Replacement

_SELECTED, _OTHER, _PALIMPSA = "#c1272d", "#4d5a66", "#1f6fb4"
_LEVELS_SHOWN = ("0.05", "0.25", "0.75", "0.95")


def format_window(window: float) -> str:
    """A number of tokens in at most five characters: 1.00, 87.2, 12.3k, 4.5M, 2e11, ∞."""
    if math.isinf(window):
        return "∞"
    for size, unit in ((1, ""), (1e3, "k"), (1e6, "M")):
        digits = f"{window / size:#.3g}"
        if "e" not in digits:
            return digits.rstrip(".") + unit
    return f"{window:.0e}".replace("e+", "e")


def window_table(analysis: "Analysis", selected: Collection[int] = ()) -> Table:
    """A Rich table of the layers, 80 columns wide at most: score, quantiles, the paper's score and rank.

    Args:
        selected: layers to mark. Palimpsa layers are named as such and have no rank.
    """
    table = Table(title=f"Memory windows in tokens, over {analysis.tokens:,} tokens of text", title_style="bold")
    for name in ("layer", "median", *(f"p{round(float(level) * 100)}" for level in _LEVELS_SHOWN), "paper", "rank"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    rank = {layer: place for place, layer in enumerate(analysis.top_layers(len(analysis.layers)), start=1)}
    for row in analysis.layers:
        palimpsa, chosen = row.kind == "palimpsa", row.layer in selected
        numbers = [row.median_window, *(row.quantiles[level] for level in _LEVELS_SHOWN), row.paper_median_window]
        table.add_row(
            str(row.layer),
            *map(format_window, numbers),
            str(rank.get(row.layer, "")),
            "Palimpsa" if palimpsa else "● selected" if chosen else "",
            style="blue" if palimpsa else "bold red" if chosen else None,
        )
    return table


def selection_note(analysis: "Analysis", k: int) -> str:
    """Which `k` layers have the longest windows, and whether the paper's score (A.10) would select others."""
    paper = _paper_note(analysis, k) or "The paper's score selects the same."
    return f"Longest windows: {_count(analysis.top_layers(k))}. {paper}"


def _paper_note(analysis: "Analysis", k: int) -> str | None:
    """How the paper's top `k` differ from ours, or None if they are the same."""
    ours, paper = (set(analysis.top_layers(k, paper=paper)) for paper in (False, True))
    if ours == paper:
        return None
    return f"The paper's score would select {_count(paper - ours)} instead of {_count(ours - paper)}."


def _count(layers: Collection[int]) -> str:
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, sorted(layers)))}"


def ledger_table(ledger: "Ledger", dtype: "torch.dtype") -> Table:
    """A Rich table of the parameters of each kind before and after, and of the tensors that make the change.

    Args:
        dtype: type in which both are stored.
    """
    table = Table(title="Parameters", title_style="bold", show_footer=True)
    sizes = [sum(counts.values()) for counts in (ledger.before, ledger.after)]
    footers = [f"{size:,}\n{size * dtype.itemsize / 1e6:,.1f} MB" for size in sizes]
    change = sizes[1] - sizes[0]
    table.add_column("kind", footer=f"total\nin {str(dtype).removeprefix('torch.')}", no_wrap=True)
    for name, footer in zip(("before", "after", "change"), (*footers, f"{change:+,}" if change else ""), strict=True):
        table.add_column(name, footer=footer, justify="right", no_wrap=True)
    for kind, before in ledger.before.items():
        after = ledger.after[kind]
        table.add_row(kind, f"{before:,}", f"{after:,}", f"{after - before:+,}" if after != before else "")
    return table


def key_lines(ledger: "Ledger") -> list[str]:
    """What becomes of the tensors, in a few lines: how many are copied, and which are new or dropped."""
    lines = [f"copied bit for bit: {len(ledger.copied)} tensors"]
    for name, rules in (("new", ledger.new), ("dropped", ledger.dropped)):
        if not rules:
            lines.append(f"{name}: none")
            continue
        lines.append(f"{name}: {len(rules)} tensors")
        layers: dict[str, list[str]] = {}  # of each name and shape, since they repeat from layer to layer
        for rule in rules:
            layer, _, rest = rule.key.removeprefix("backbone.layers.").partition(".")
            pattern = f"backbone.layers.{{}}.{rest}" if layer.isdecimal() else rule.key
            layers.setdefault(f"  {pattern} {list(rule.shape)}", []).append(layer)
        lines += [pattern.replace("{}", f"{{{','.join(found)}}}") for pattern, found in layers.items()]
    return lines


def replacement_report(done: "Replacement") -> Group:
    """What a replacement did, for a terminal of 80 columns: layers, parameters, drift and notes."""
    config = done.source.config
    layers = f"{_count(done.layers)} of {config.num_hidden_layers}" if done.layers else "none (converted untouched)"
    lines = [f"replaced: {layers}"]
    if done.layers and done.analysis is not None:
        windows = (format_window(done.analysis.median_windows[layer]) for layer in done.layers)
        lines.append(f"median windows: {', '.join(windows)} tokens")
        by_length = set(done.layers) == set(done.analysis.top_layers(len(done.layers)))
        if by_length and (note := _paper_note(done.analysis, len(done.layers))):
            lines.append(note)
    if done.init:
        settings = (f"{name} {value}" for name, value in done.init.items() if name != "kind")
        lines.append(f"init: {done.init['kind']}, {', '.join(settings)}")
    why = "not measured, for want of text to measure it on" if done.layers else "none, since nothing was replaced"
    drift = [f"drift: {why}"]
    if done.drift is not None:
        drift = [
            f"drift over {done.drift.tokens:,} tokens, before any training:",
            f"  logits                    {done.drift.relative:.2e} relative (RMS)",
            f"  KL(source ‖ hybrid)       {done.drift.kl:.2e} nats per token",
            f"  largest importance ratio  {done.drift.max_importance_ratio:.3g}",
        ]
    return Group(
        Text("\n".join(lines)),
        ledger_table(done.ledger, done.source.dtype),
        Text("\n".join(key_lines(done.ledger))),
        Text("\n".join(drift)),
        *(Text(f"note: {note}", style="dim") for note in done.notes),
    )


def plot_windows(analysis: "Analysis", selected: Collection[int], path: str | os.PathLike) -> None:
    """Draw the windows like the paper's Fig. 6 and save them as a PNG.

    Left, the median of each layer on a log axis that grows to the left, with the middle half of its values
    and the selected layers marked; right, the median over heads by layer and position.

    Args:
        selected: layers to mark.
        path: file to write.
    """
    depth = len(analysis.layers)
    figure = Figure(figsize=(9.2, min(max(2.4 + 0.14 * depth, 3.6), 9.0)), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1, 1.45))
    legend = _draw_medians(left, analysis, selected)
    _draw_positions(figure, right, analysis, selected)
    left.set_ylim(depth - 0.5, -0.5)
    left.yaxis.set_major_locator(MaxNLocator(nbins=min(depth, 17), integer=True, min_n_ticks=1))
    figure.suptitle(f"Effective memory window of each layer of {shortened(analysis.model)}", fontsize=11)
    figure.legend(handles=legend, loc="outside lower left", ncols=len(legend), fontsize=8, frameon=False)
    figure.savefig(path)


def _draw_medians(axes: Axes, analysis: "Analysis", selected: Collection[int]) -> list[Line2D]:
    """Draw the left panel and return what its legend shows."""
    medians = np.array(analysis.median_windows)
    low, high = (np.array([layer.quantiles[level] for layer in analysis.layers]) for level in ("0.25", "0.75"))
    finite, lowest, highest = _finite_range(np.concatenate([medians, low, high]))
    edge = highest * 1.3
    if not finite.all():  # infinite windows stand apart, to the left of all others
        beyond = max(3.0, (highest / lowest) ** 0.1)
        edge = highest * beyond**1.8
        for layer in np.flatnonzero(np.isinf(medians)):
            axes.annotate("∞", (highest * beyond, layer), xytext=(-14, 0), textcoords="offset points", va="center")
        medians, low, high = (np.where(np.isinf(values), highest * beyond, values) for values in (medians, low, high))
    palimpsa = [layer in analysis.palimpsa_layers for layer in range(len(medians))]
    chosen = [layer in selected for layer in range(len(medians))]
    kinds = (
        ("Palimpsa layer", _PALIMPSA, "s", np.array(palimpsa)),
        ("selected", _SELECTED, "o", np.array(chosen)),
        ("not selected", _OTHER, "o", ~np.logical_or(palimpsa, chosen)),
    )
    legend = []
    for label, colour, marker, here in kinds:
        rows = np.flatnonzero(here)
        if len(rows) == 0:
            continue
        axes.hlines(rows, low[rows], high[rows], color=colour, alpha=0.35, linewidth=2.2, zorder=2)
        axes.plot(medians[rows], rows, marker, color=colour, markersize=5, linestyle="none", zorder=3)
        legend.append(Line2D([], [], color=colour, marker=marker, markersize=5, linestyle="none", label=label))
    legend.append(Line2D([], [], color=_OTHER, alpha=0.35, linewidth=2.2, label="25% to 75% of tokens and heads"))
    axes.set_xscale("log")
    axes.set_xlim(edge, lowest / 1.3)
    _token_ticks(axes.xaxis, lowest, highest)
    axes.set_xlabel("median window $N_t$ (tokens)")
    axes.set_ylabel("layer")
    axes.grid(axis="x", color="#d9dde1", linewidth=0.6)
    axes.set_axisbelow(True)
    return legend


def _draw_positions(figure: Figure, axes: Axes, analysis: "Analysis", selected: Collection[int]) -> None:
    values = np.array([layer.position_medians for layer in analysis.layers])
    _, lowest, highest = _finite_range(values)
    norm = LogNorm(vmin=lowest, vmax=max(highest, lowest * 1.1))
    step = analysis.positions[-1] - analysis.positions[-2] if len(analysis.positions) > 1 else 1
    edges = [*analysis.positions, analysis.positions[-1] + step]
    rows = np.arange(len(values) + 1) - 0.5
    mesh = axes.pcolormesh(edges, rows, np.minimum(values, norm.vmax), norm=norm, cmap="viridis", rasterized=True)
    margin = axes.get_yaxis_transform()  # x in fractions of the panel, y in layers
    for layer in selected:
        axes.plot(-0.014, layer, ">", color=_SELECTED, markersize=4, transform=margin, clip_on=False)
    axes.set_xlim(edges[0], edges[-1])
    axes.set_xlabel("token position")
    axes.tick_params(axis="y", left=False, labelleft=False)
    bar = figure.colorbar(mesh, ax=axes, pad=0.02, aspect=28)
    bar.set_label("median over heads of $N_t$ (tokens)")
    bar.outline.set_visible(False)
    _token_ticks(bar.ax.yaxis, norm.vmin, norm.vmax)


def _finite_range(values: np.ndarray) -> tuple[np.ndarray, float, float]:
    """Which values are finite, and the least and greatest of those."""
    finite = np.isfinite(values)
    return finite, values[finite].min(initial=math.inf) if finite.any() else 1.0, values[finite].max(initial=1.0)


def _token_ticks(axis: Axis, low: float, high: float) -> None:
    """Plain numbers of tokens at a log axis's ticks; the less it spans, the more ticks."""
    decades = math.log10(high / low)
    steps = (1.0,) if decades > 2.5 else (1.0, 3.0) if decades > 1.2 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=steps, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _plain(value) if value <= high * 1.3 else ""))
    axis.set_minor_formatter(NullFormatter())


def _plain(value: float) -> str:
    for size, unit in ((1, ""), (1e3, "k"), (1e6, "M")):
        if value < size * 1000:
            return f"{value / size:g}{unit}"
    return f"{value:.0e}".replace("e+", "e")


def shortened(model: str) -> str:
    """A Hub id as it is, a folder without the folders around it."""
    name = model if model.count("/") == 1 and len(model) <= 48 else Path(model).resolve().name[:48]
    return literal(name)


def literal(text: str) -> str:
    """Text that matplotlib draws as it is: a dollar would start a formula, and what its font lacks is a square."""
    drawable = get_font(findfont(FontProperties())).get_charmap()
    return "".join(letter if ord(letter) in drawable else "\N{WHITE SQUARE}" for letter in text).replace("$", r"\$")
