"""The figures of `mqar.py`, after the paper's Figs. 2 and 3."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLOURS = {"Mamba2": "#7a8590", "Palimpsa-M": "#1f6fb4"}
_WINDOW, _RATIO, _LOSS = "#1f6fb4", "#e07b00", "#d45087"


def plot_accuracy(runs: list[dict], lengths: list[int], path: Path) -> None:
    """Draw the accuracy after training at each length: mean, standard deviation over seeds, and every run (Fig. 2)."""
    figure = _figure(2.1 * len(lengths) + 0.6, 3.0)
    names = list(dict.fromkeys(run["name"] for run in runs))
    for axes, length in zip(figure.subplots(1, len(lengths), squeeze=False)[0], lengths, strict=True):
        for place, name in enumerate(names):
            scores = np.array([run["accuracies"][length] for run in runs if run["name"] == name])
            spread = scores.std(ddof=1) if len(scores) > 1 else 0.0
            axes.bar(place, scores.mean(), yerr=spread, width=0.65, color=COLOURS[name], capsize=4, zorder=2)
            dots = place + np.linspace(-0.12, 0.12, len(scores)) if len(scores) > 1 else [place]
            axes.plot(dots, scores, "o", color="black", markersize=3, zorder=3)
            axes.annotate(f"{scores.mean():.2f}", (place, 0.02), ha="center", fontsize=8, color="white")
        axes.set_ylim(0, 1.05)
        axes.set_xticks(range(len(names)), names, fontsize=8)
        axes.set_title(f"L = {length}, {length // 4} pairs", fontsize=9)
        _grid(axes)
    figure.axes[0].set_ylabel("accuracy")
    figure.suptitle("MQAR: two layers, state 16, ± standard deviation over seeds", fontsize=10)
    figure.savefig(path)


def plot_dynamics(runs: list[dict], path: Path) -> None:
    """Draw log N_t, metaplasticity ratio and loss while training, mean ± standard deviation over seeds (Fig. 3)."""
    names = list(dict.fromkeys(run["name"] for run in runs))
    figure = _figure(4.6 * len(names) + 0.4, 3.4)
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, names, strict=True):
        here = [run["history"] for run in runs if run["name"] == name]
        steps = np.array([entry["step"] for entry in here[0]])
        lengths = [entry["length"] for entry in here[0]]
        _band(axes, steps, here, lambda entry: np.mean(entry["log_windows"]), _WINDOW)
        axes.set_xlabel("step")
        axes.set_title(name, fontsize=10)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.tick_params(axis="y", colors=_WINDOW)
        _grid(axes)
        for place in np.flatnonzero(np.diff(lengths)):
            axes.axvline(steps[place], color="#9aa3ab", linewidth=0.8, linestyle=":")
        for length in dict.fromkeys(lengths):
            first = steps[lengths.index(length)]
            axes.annotate(f"L = {length}", (first, 1.0), xycoords=("data", "axes fraction"), fontsize=7,
                          xytext=(2, -9), textcoords="offset points", color="#5c666f")  # fmt: skip
        losses = axes.twinx()
        _band(losses, steps, here, lambda entry: entry["loss"], _LOSS)
        losses.set_ylim(bottom=0)
        losses.set_yticks([])
        if here[0][0]["metaplasticity_ratios"]:
            ratios = axes.twinx()
            _band(ratios, steps, here, lambda entry: np.mean(entry["metaplasticity_ratios"]), _RATIO)
            ratios.set_ylim(bottom=0)
            ratios.set_ylabel(r"$(I_{max} - I_{min}) / I_{min}$ at the end", color=_RATIO)
            ratios.tick_params(axis="y", colors=_RATIO)
    panels[0].set_ylabel(r"mean of $\log N_t$", color=_WINDOW)
    title = "MQAR while training: window (blue), metaplasticity ratio (orange), loss (pink, no scale)"
    figure.suptitle(title, fontsize=10)
    figure.savefig(path)


def _band(axes: Axes, steps: np.ndarray, runs: list[list[dict]], of: Callable[[dict], float], colour: str) -> None:
    values = np.array([[of(entry) for entry in history] for history in runs], dtype=float)
    mean, spread = values.mean(0), values.std(0, ddof=1) if len(values) > 1 else np.zeros(values.shape[1])
    axes.plot(steps, mean, color=colour, linewidth=1.5)
    axes.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _grid(axes: Axes) -> None:
    axes.grid(axis="y", color="#d9dde1", linewidth=0.6)
    axes.set_axisbelow(True)
