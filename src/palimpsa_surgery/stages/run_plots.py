"""Figures of a stage, drawn from what it left in its folder and in `run.json`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from palimpsa_surgery.stages.reporting import LAYERS_FILE, LOG_FILE, read_lines
from palimpsa_surgery.surgery.outputs import writing

_LOSS, _RATE, _BEFORE, _AFTER = "#1f6fb4", "#9aa3ab", "#9aa3ab", "#e07b00"
_SMOOTHED = 50
"""Points of the smoothed loss at most: its window is this fraction of the steps."""


def plot_stage(folder: Path, entry: dict) -> None:
    """Draw what there is to draw of a stage, whether it is finished or not.

    `loss.png` from `log.jsonl`, `layers.png` from `layers.jsonl`, `positions.png` from the held-out results.

    Args:
        folder: the stage's.
        entry: the stage's entry of `run.json`.
    """
    log = read_lines(folder / LOG_FILE)
    if any(line["loss"] is not None for line in log):
        plot_loss(log, entry, folder / "loss.png")
    layers = read_lines(folder / LAYERS_FILE)
    if layers:
        plot_layers(layers, entry["name"], folder / "layers.png")
    if entry.get("before"):
        plot_positions(entry, folder / "positions.png")


def plot_loss(log: list[dict], entry: dict, path: Path) -> None:
    """Draw the training loss of every step and its running mean, the held-out losses and the learning rate."""
    figure, axes = _figure(7.2, 4.0)
    kept = [line for line in log if line["loss"] is not None]
    steps, loss = (np.array([line[name] for line in kept], dtype=float) for name in ("step", "loss"))
    window = max(1, len(loss) // _SMOOTHED)
    axes.plot(steps, loss, color=_LOSS, linewidth=0.8, alpha=0.35 if window > 1 else 1.0, label="training")
    if window > 1:
        smooth = np.convolve(loss, np.ones(window) / window, mode="valid")
        axes.plot(steps[window - 1 :], smooth, color=_LOSS, linewidth=1.6, label=f"mean of {window} steps")
    for at, name, colour in ((0, "before", _BEFORE), (entry["steps"], "after", _AFTER)):
        if entry.get(name):
            axes.plot([at], [entry[name]["loss"]], "D", color=colour, markersize=5, label=f"held-out, {name}", zorder=4)
    skipped = [line["step"] for line in log if line["loss"] is None]
    for step in skipped:
        axes.axvline(
            step, color="#d45087", linewidth=0.8, linestyle=":", label="skipped" if step == skipped[0] else None
        )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    rates = axes.twinx()
    rates.plot([line["step"] for line in log], [line["learning_rate"] for line in log], color=_RATE, linewidth=1.0)
    rates.set_ylim(bottom=0)
    rates.set_ylabel("learning rate", color=_RATE)
    rates.tick_params(axis="y", colors=_RATE)
    rates.ticklabel_format(axis="y", scilimits=(0, 0))
    axes.set_zorder(rates.get_zorder() + 1)
    axes.patch.set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    _finish(figure, axes, f"Loss of stage {entry['name']}", path)


def plot_layers(lines: list[dict], stage: str, path: Path) -> None:
    """Draw median window, importance ratio and metaplasticity ratio of the replaced layers by step."""
    figure, panels = _figure(10.5, 3.4, columns=3)
    steps = [line["step"] for line in lines]
    layers = [layer["layer"] for layer in lines[0]["layers"]]
    named = (
        ("median_window", "median window $N_t$ (tokens)"),
        ("importance_ratio", r"largest $\bar{I} / I_{prior}$"),
        ("metaplasticity_ratio", r"$(I_{max} - I_{min}) / I_{min}$, mean over heads"),
    )
    for axes, (name, label) in zip(panels, named, strict=True):
        values = np.array([[layer[name] for layer in line["layers"]] for line in lines], dtype=float)  # None: NaN
        for order, layer in enumerate(layers):
            colour = colormaps["viridis"](order / max(1, len(layers) - 1) * 0.9)
            axes.plot(
                steps, values[:, order], "o-", color=colour, linewidth=1.3, markersize=2.5, label=f"layer {layer}"
            )
        positive = values[values > 0]
        if len(positive) and positive.max() > 10 * positive.min():
            _log_axis(axes)
        axes.set_xlabel("step")
        axes.set_title(label, fontsize=9)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        _grid(axes)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=8, frameon=False, fontsize=8
    )
    figure.suptitle(f"Replaced layers of stage {stage}, on one held-out sequence", fontsize=11)
    with writing(path):
        figure.savefig(path)


def plot_positions(entry: dict, path: Path) -> None:
    """Draw held-out perplexity by the number of tokens read since the memory was last empty, before and after."""
    figure, axes = _figure(6.0, 3.8)
    longest = 1
    for name, colour in (("before", _BEFORE), ("after", _AFTER)):
        bins = (entry.get(name) or {}).get("positions")
        if not bins:
            continue
        centres = np.sqrt(np.array(bins["starts"]) * (np.array(bins["ends"]) - 1.0))
        axes.plot(centres, bins["perplexity"], "o-", color=colour, linewidth=1.5, markersize=3.5, label=name)
        longest = max(longest, bins["ends"][-1])
    axes.set_xscale("log", base=2)
    _log_axis(axes)
    axes.set_xlim(0.9, longest)
    axes.xaxis.set_major_formatter(_plain())
    axes.set_xlabel("tokens read since the memory was empty")
    axes.set_ylabel("held-out perplexity")
    axes.legend(frameon=False, fontsize=8)
    _finish(figure, axes, f"Held-out perplexity by position, stage {entry['name']}", path)


def _log_axis(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_plain())
    axes.yaxis.set_minor_formatter(_plain(sparse=True))


def _plain(sparse: bool = False) -> Callable[[float, int], str]:
    def text(value: float, _: int) -> str:
        if sparse and f"{value:e}"[0] not in "25":
            return ""
        return f"{value:,.0f}" if 10 <= value < 1e6 else f"{value:g}"

    return text


def _figure(width: float, height: float, columns: int = 1) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def _grid(axes: Axes) -> None:
    axes.grid(axis="y", color="#d9dde1", linewidth=0.6)
    axes.set_axisbelow(True)


def _finish(figure: Figure, axes: Axes, title: str, path: Path) -> None:
    _grid(axes)
    figure.suptitle(title, fontsize=11)
    with writing(path):
        figure.savefig(path)
