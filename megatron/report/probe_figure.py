"""The results of the probes of one model, as one figure."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from megatron.evaluation.attention_probes import MOST
from megatron.report.curves import GREY, style
from megatron.report.encoding_figures import colours, distance_axis, panels_of
from megatron.results.probes import PROBES, TASKS, ProbeRow, answers, axis_of

COLUMNS = 3
PLACES = {
    "depth": "depth (0: start)",
    "hops": "assignments to follow",
    "named": "answers named before",
    "rank": "rank (1: most frequent)",
}
DARK = 0.6  # accuracies below have a dark colour, on which text is white


def draw_probes(rows: Sequence[ProbeRow], title: str) -> Figure:
    """For one model: a map of accuracy for each task, the receptive field and the attention.

    Only what was measured has a panel.
    """
    measured = {row["probe"] for row in rows}
    names = [probe for probe in PROBES if probe in measured]
    columns = min(max(len(names), 1), COLUMNS)
    size = (2.9 * columns + 0.9, 2.6 * -(-len(names) // columns) + 0.3)
    with style():
        figure, places = panels_of(len(names), columns, size, title)
        maps = []
        for axes, name in zip(places, names, strict=False):
            axes.set_title(name.replace("_", " "), loc="left")
            if name in TASKS:
                _map(axes, rows, name)
                maps.append(axes)
            else:
                _by_distance(axes, [row for row in rows if row["probe"] == name])
        if maps:
            label = "accuracy (in a cell: accuracy, (guess rate), gain in nats)"
            scale = ScalarMappable(Normalize(0, 1), "viridis")
            bar = figure.colorbar(scale, ax=maps, label=label, pad=0.01, aspect=30)
            bar.ax.yaxis.label.set_fontsize(7)
    return figure


def _map(axes: Axes, rows: Sequence[ProbeRow], task: str) -> None:
    """Lengths to the right, places downward; a cell has its accuracy, guess rate and gain."""
    found = answers(rows, task)
    places = sorted({place for place, _ in found})
    lengths = sorted({length for _, length in found})
    accuracies = np.full((len(places), len(lengths)), np.nan)
    for (place, length), one in found.items():
        line, column = places.index(place), lengths.index(length)
        text, colour = "n/a", "black"
        if one is not None:
            accuracies[line, column] = one.accuracy
            guess = "" if one.guess is None else f"({one.guess:.2g})\n"
            text = f"{one.accuracy:.2f}\n{guess}{one.gain:+.2f}"
            colour = "white" if one.accuracy < DARK else "black"
        axes.text(column, line, text, ha="center", va="center", fontsize=6, color=colour)
    axes.imshow(accuracies, aspect="auto", norm=Normalize(0, 1), interpolation="nearest")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(places)), [f"{place:g}" for place in places])
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel(PLACES[axis_of(task)])


def _by_distance(axes: Axes, rows: Sequence[ProbeRow]) -> None:
    """For each length the fraction of the gradient within a distance; for each layer at the
    longest length the fraction of attention at a distance or further."""
    longest = max(rows, key=lambda row: row["length"])
    lines = []
    for row in rows:
        label = f"{row['length']}: {row.get('reach')} tokens"
        lines.append((label, row.get("distances", []), row.get("cumulative", [])))
    title, name = f"length: {MOST:.0%} within", "fraction of the gradient within d"
    if "mass" in longest:
        title, name = f"length {longest['length']}", "fraction of attention at d or further"
        lines = []
        for layer, mass in enumerate(longest["mass"]):
            further = np.cumsum(mass[::-1])[::-1].tolist()
            lines.append((f"layer {layer}", longest.get("edges", [])[:-1], further))
    palette = colours(len(lines))
    for number, (label, distances, fractions) in enumerate(lines):
        axes.plot(distances, fractions, color=palette(number), linewidth=1.1, label=label)
    axes.axhline(MOST, color=GREY, linewidth=0.5, linestyle=(0, (4, 3)))
    distance_axis(axes, longest["length"])
    axes.set_ylim(0, 1.02)
    axes.set_ylabel(name)
    axes.legend(title=title, fontsize=7, title_fontsize=7)
