"""Comparisons for people: tables for the terminal and in Markdown, and one figure."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Group
from rich.text import Text

from palimpsa_surgery.surgery.diagnosis_plots import centres, finish, number_ticks, settled_limits
from palimpsa_surgery.surgery.plots import literal
from palimpsa_surgery.surgery.results import Score, conditions, format_score, grid, label, markdown_table
from palimpsa_surgery.surgery.results_table import rich_table

if TYPE_CHECKING:
    from palimpsa_surgery.surgery.comparison import Comparison, Subject

_COLOURS = ("#4d5a66", "#1f6fb4", "#c1272d", "#2e8b57", "#8e5ea2", "#d98c00")
_MARKERS = "osD^vP"
_PANEL = 4.4, 3.6  # width and height of a panel, in inches
_NAME = 40  # letters of a model's name in the legend

Section = tuple[str, list[list[str]], str]
"""A title, the rows of a table with its head, and a remark or ""."""


def comparison_sections(comparison: "Comparison") -> list[Section]:
    """The comparison as tables with a column for each model and, for two, the difference."""
    sections = [_models(comparison)]
    if any(subject.loss for subject in comparison.subjects):
        sections.append(_perplexities(comparison))
    return sections + [_scores(comparison, preset) for preset in comparison.presets]


def comparison_report(comparison: "Comparison") -> Group:
    """The tables for a terminal of 80 columns."""
    parts = []
    for title, rows, remark in comparison_sections(comparison):
        parts += [Text(title, style="bold"), rich_table(rows), *([Text(remark, style="dim")] if remark else [])]
    return Group(*parts)


def comparison_markdown(comparison: "Comparison") -> str:
    """The tables in Markdown, and the figure."""
    lines = [f"# {' against '.join(comparison.labels)}\n"]
    for title, rows, remark in comparison_sections(comparison):
        lines += [f"## {title}\n", *markdown_table(rows), "", *(f"{line}\n" for line in remark.splitlines())]
    return "\n".join([*lines, "![The same as a figure](comparison.png)", ""])


def _head(comparison: "Comparison", first: str) -> list[str]:
    return [first, *comparison.labels, *(["change"] if len(comparison.subjects) == 2 else [])]


def _row(name: str, values: list[float | None], form: str, *, relative: bool) -> list[str]:
    """One quantity of all models; of two, also the change, relative or not."""
    cells = [name, *("" if value is None else format(value, form) for value in values)]
    if len(values) == 2:
        first, second = values
        known = first is not None and second is not None and (first != 0 or not relative)
        change = "" if not known else f"{100 * (second / first - 1):+.1f}%" if relative else f"{second - first:+.2f}"
        cells.append(change)
    return cells


def _models(comparison: "Comparison") -> Section:
    subjects, rows = comparison.subjects, [_head(comparison, "")]

    def add(name: str, values: list[float | None], form: str) -> None:
        if any(value is not None for value in values):
            rows.append(_row(name, values, form, relative=True))

    add("parameters", [s.parameters for s in subjects], ",d")
    layers = [s.palimpsa_layers and ", ".join(map(str, s.palimpsa_layers)) for s in subjects]
    layers = ["" if s.palimpsa_layers is None else text or "none" for s, text in zip(subjects, layers, strict=True)]
    rows.append(["Palimpsa layers", *layers, *([""] if len(subjects) == 2 else [])])
    add("state, bytes a sequence", [s.state_bytes for s in subjects], ",d")
    add("prefill, tokens/s", [s.speed and s.speed.prefill for s in subjects], ",.0f")
    add("decode, tokens/s", [s.speed and s.speed.decode for s in subjects], ",.1f")
    timed = next((s.speed for s in subjects if s.speed), None)
    remark = ""
    if timed is not None:
        remark = (
            f"Speed of one sequence on {comparison.device} in {comparison.dtype}: a prompt of "
            f"{timed.prompt_tokens:,} tokens, then 32 tokens one by one; medians of three."
        )
    return "Models", rows, remark


def _perplexities(comparison: "Comparison") -> Section:
    """Perplexity in bins of two octaves."""
    losses = [subject.loss for subject in comparison.subjects]
    first = next(loss for loss in losses if loss is not None)
    text = next(subject.text for subject in comparison.subjects if subject.text is not None)
    rows = [_head(comparison, "positions")]
    for low, high in [*first.double_octaves(), (1, first.ends[-1])]:
        values = [None if loss is None else loss.perplexity_between(low, high) for loss in losses]
        rows.append(_row(f"{low:,} to {high - 1:,}", values, ",.2f", relative=True))
    many = "s" if text.sequences > 1 else ""
    return "Perplexity by position", rows, f"{text.sequences} sequence{many} of {text.length:,} tokens of text"


def _scores(comparison: "Comparison", preset: str) -> Section:
    """Every score of a preset, with the columns of its lengths one below the other."""
    evaluations = [subject.evaluations.get(preset) for subject in comparison.subjects]
    first = next(evaluation for evaluation in evaluations if evaluation is not None)
    names, columns, places = grid([score for e in evaluations if e is not None for score in e.scores])
    by_place = [grid(e.scores)[2] if e is not None else {} for e in evaluations]
    rows = [_head(comparison, "")]
    for name in names:
        for column in columns:
            if (name, column) not in places:
                continue
            found = [scores.get((name, column)) for scores in by_place]
            cells = [f"{label(places[name, column])}{f' at {column}' if column else ''}", *map(format_score, found)]
            if len(found) == 2:
                both = found[0] is not None and found[1] is not None
                cells.append(_difference(found[0], found[1]) if both else "")
            rows.append(cells)
    how = [(name, conditions(e)) for name, e in zip(comparison.labels, evaluations, strict=True) if e is not None]
    alike = len({said for _, said in how}) == 1
    remark = conditions(first) if alike else "\n".join(f"{name}: {said}" for name, said in how)
    return f"Scores, {preset}", rows, remark


def _difference(first: Score, second: Score) -> str:
    """The change of a score; two decimals, as of a percentage, would hide that of a fraction."""
    change = second.value - first.value
    return f"{change:+.2f}" if first.unit else f"{change:+.3g}"


def plot_comparison(comparison: "Comparison", path: Path) -> None:
    """Draw what there is: perplexity by position, scores, speed and state relative to the first model."""
    subjects = comparison.subjects
    panels = []
    if any(subject.loss for subject in subjects):
        panels += [_draw_perplexity, _draw_difference]
    if sum(subject.speed is not None for subject in subjects) > 1:
        panels.append(_draw_costs)
    tall = 1.2 + 0.24 * len(_drawn_scores(comparison))
    beside = tall > _PANEL[1]  # many scores: in a column of their own, the other panels one below the other
    if comparison.presets and not beside:
        panels.append(_draw_scores)
    across = 1 if beside else len(panels) if len(panels) < 4 else 2
    down = -(-len(panels) // across)
    rest = max(0.0, tall - _PANEL[1] * down) if beside else 0.0
    width, height = max(5.4, _PANEL[0] * (across + beside)), _PANEL[1] * down + rest
    names = [_clipped(name) for name in comparison.labels]
    columns = max(1, min(len(names), 3, int(width // (0.5 + 0.08 * max(map(len, names))))))
    figure = Figure(figsize=(width, height + 0.2 + 0.2 * -(-len(names) // columns)), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    heights = [*[_PANEL[1]] * down, *([rest] if rest else [])]
    places = figure.add_gridspec(len(heights), across + beside, height_ratios=heights)
    for index, draw in enumerate(panels):
        draw(figure.add_subplot(places[index // across, index % across]), comparison)
    if beside:
        _draw_scores(figure.add_subplot(places[:, -1] if panels else places[:, :]), comparison)
    first = figure.axes[0]
    handles = [first.plot([], [], **style, linewidth=1.5, markersize=4)[0] for _, style in _each(comparison)]
    legend = [literal(name) for name in names]
    figure.legend(handles, legend, loc="outside upper center", ncols=columns, frameon=False, fontsize=9)
    figure.savefig(path)


def _clipped(name: str) -> str:
    """A long name without its middle: its ends tell it from others."""
    return name if len(name) <= _NAME else f"{name[: _NAME // 2]}…{name[-(_NAME // 2) :]}"


def _each(comparison: "Comparison") -> "list[tuple[Subject, dict[str, str]]]":
    """The models, and the colour and marker of each."""
    kinds = len(_COLOURS)
    return [
        (subject, {"color": _COLOURS[i % kinds], "marker": _MARKERS[(i + i // kinds) % kinds]})
        for i, subject in enumerate(comparison.subjects)
    ]


def _draw_perplexity(axes: Axes, comparison: "Comparison") -> None:
    curves, last = [], 1
    for subject, style in _each(comparison):
        if subject.loss is None:
            continue
        loss = subject.loss
        at, perplexity = centres(loss.starts, loss.ends), np.array(loss.perplexity)
        # The first is broad, to be seen below others that lie on it.
        axes.plot(at, perplexity, **style, linewidth=1.2 if curves else 3.2, markersize=3, alpha=0.9)
        curves.append((at, perplexity))
        last = loss.ends[-1]
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(0.9, last * 1.1)
    axes.set_ylim(settled_limits(curves, 1.3))
    number_ticks(axes.xaxis, 1, last)
    number_ticks(axes.yaxis, *axes.get_ylim())
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("perplexity")
    axes.set_title("perplexity by position", fontsize=9)
    finish(axes)


def _draw_difference(axes: Axes, comparison: "Comparison") -> None:
    """Change of perplexity against the first model: what the text itself does to both cancels."""
    first = next(subject.loss for subject in comparison.subjects if subject.loss is not None)
    at = centres(first.starts, first.ends)
    for subject, style in _each(comparison):
        if subject.loss is not None:
            with np.errstate(over="ignore"):  # of a model that is broken: infinity, which is left out
                change = 100 * np.expm1(np.array(subject.loss.nll) - np.array(first.nll))
            axes.plot(at, change, **style, linewidth=1.4, markersize=3)
    axes.set_xscale("log")
    axes.set_xlim(0.9, first.ends[-1] * 1.1)
    number_ticks(axes.xaxis, 1, first.ends[-1])
    axes.set_xlabel("position (tokens)")
    axes.set_ylabel("change of perplexity (%)")
    axes.set_title("perplexity against the first", fontsize=9)
    finish(axes)


def _drawn_scores(comparison: "Comparison") -> dict[tuple[str, str, str], Score]:
    """By preset, name and column, one of each score to draw: perplexities only if there is nothing else.

    On one axis with perplexities, accuracies would all lie at zero, and fractions do beside percentages.
    """
    found = {
        (preset, score.name, score.column): score
        for preset in comparison.presets
        for subject in comparison.subjects
        if preset in subject.evaluations
        for score in subject.evaluations[preset].scores
    }
    for unit in ("%", ""):
        if chosen := {place: score for place, score in found.items() if score.unit == unit}:
            return chosen
    return found


def _draw_scores(axes: Axes, comparison: "Comparison") -> None:
    """A row for each score, a mark for each model."""
    places = _drawn_scores(comparison)
    for subject, style in _each(comparison):
        rows, values = [], []
        for row, (preset, name, column) in enumerate(places):
            scores = grid(subject.evaluations[preset].scores)[2] if preset in subject.evaluations else {}
            if (name, column) in scores:
                rows.append(row)
                values.append(scores[name, column].value)
        axes.plot(values, rows, **style, linestyle="none", markersize=5 if axes.lines else 8, alpha=0.85)
    names = [literal(f"{name} {column}".strip()) for _, name, column in places]
    axes.set_yticks(range(len(places)), names, fontsize=8)
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.set_xlabel("score (%)" if all(score.unit == "%" for score in places.values()) else "score")
    axes.set_title("scores", fontsize=9)
    finish(axes)


def _draw_costs(axes: Axes, comparison: "Comparison") -> None:
    """Bars of speed and state, relative to the first model that was measured."""
    measured = [(s, style["color"]) for s, style in _each(comparison) if s.speed is not None]
    first = measured[0][0]
    quantities = (
        ("prefill\nspeed", lambda s: s.speed.prefill),
        ("decode\nspeed", lambda s: s.speed.decode),
        ("state\nbytes", lambda s: s.state_bytes),
    )
    width = 0.8 / len(measured)
    highest = 1.0
    for index, (subject, colour) in enumerate(measured):
        ratios = [read(subject) / read(first) for _, read in quantities]
        highest = max(highest, *ratios)
        at = np.arange(len(quantities)) + (index - (len(measured) - 1) / 2) * width
        bars = axes.bar(at, ratios, 0.92 * width, color=colour)
        turned = 90 if len(measured) > 3 else 0
        axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], fontsize=7, padding=2, rotation=turned)
    axes.axhline(1, color="#9aa3ab", linewidth=0.8, zorder=0)
    axes.set_ylim(0, 1.15 * highest)
    axes.set_xticks(range(len(quantities)), [name for name, _ in quantities])
    axes.set_ylabel("relative to the first")
    axes.set_title(f"speed and state, on {comparison.device}", fontsize=9)
    finish(axes)
