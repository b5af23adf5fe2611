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
from megatron.results.probes import TASKS, ProbeRow, answers, axis_of

COLUMNS = 3
PLACES = {
    "depth": "depth (0: start)",
    "hops": "assignments to follow",
    "named": "answers named before",
    "rank": "rank (1: most frequent)",
}
DARK = 0.6  # accuracies below have a dark colour, on which text is white
MANY = 6  # layers, from which on there is no legend


def draw_probes(rows: Sequence[ProbeRow], title: str) -> Figure:
    """For one model: a map of accuracy for each task, the receptive field and the attention.

    Only what was measured has a panel.
    """
    others = {"receptive_field": _receptive_field, "attention": _attention}
    measured = {row["probe"] for row in rows}
    names = [probe for probe in (*TASKS, *others) if probe in measured]
    columns = min(max(len(names), 1), COLUMNS)
    size = (2.9 * columns + 0.9, 2.6 * -(-len(names) // columns) + 0.3)
    with style():
        figure, places = panels_of(len(names), columns, size, title)
        maps = []
        for axes, name in zip(places, names, strict=False):
            axes.set_title(name.replace("_", " "), loc="left")
            if name in others:
                others[name](axes, rows)
            else:
                _map(axes, rows, name)
                maps.append(axes)
        if maps:
            with_guess = any(row.get("guess") is not None for row in rows)
            guess = "guess rate, " if with_guess else ""
            label = f"accuracy (in a cell: accuracy, {guess}gain in nats)"
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
    for line, place in enumerate(places):
        for column, length in enumerate(lengths):
            one = found.get((place, length))
            text, colour = "n/a", "black"
            if one is not None:
                accuracies[line, column] = one.accuracy
                guess = [] if one.guess is None else [f"({one.guess:.2g})"]
                text = "\n".join([f"{one.accuracy:.2f}", *guess, f"{one.gain:+.2f}"])
                colour = "white" if one.accuracy < DARK else "black"
            look = {"ha": "center", "va": "center", "fontsize": 6, "color": colour}
            axes.text(column, line, text, **look)
    axes.imshow(accuracies, aspect="auto", norm=Normalize(0, 1), interpolation="nearest")
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(places)), [f"{place:g}" for place in places])
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel(PLACES[axis_of(task)])


def _receptive_field(axes: Axes, rows: Sequence[ProbeRow]) -> None:
    """For each length, the fraction of the gradient within a distance."""
    measured = [row for row in rows if row["probe"] == "receptive_field" and row.get("cumulative")]
    palette = colours(len(measured))
    for number, row in enumerate(measured):
        distances, cumulative = row.get("distances", []), row.get("cumulative", [])
        label = f"{row['length']}: {row.get('reach')} tokens"
        axes.plot(distances, cumulative, color=palette(number), linewidth=1.1, label=label)
    axes.axhline(MOST, color=GREY, linewidth=0.5, linestyle=(0, (4, 3)))
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("fraction of the gradient within d")
    if measured:
        distance_axis(axes, max(row["length"] for row in measured))
        axes.legend(title=f"length: {MOST:.0%} within", fontsize=7, title_fontsize=7)


def _attention(axes: Axes, rows: Sequence[ProbeRow]) -> None:
    """For each layer at the longest length, the fraction of attention at a distance or further."""
    measured = [row for row in rows if row["probe"] == "attention" and row.get("mass")]
    if not measured:
        return
    row = max(measured, key=lambda one: one["length"])
    layers = row.get("mass", [])
    names = row.get("layers") or [""] * len(layers)
    palette = colours(len(layers))
    for layer, (mass, name) in enumerate(zip(layers, names, strict=True)):
        further = np.cumsum(mass[::-1])[::-1]
        label = f"layer {layer} {name}".strip()
        look = {"color": palette(layer), "linewidth": 1.1, "marker": "."}
        axes.plot(row.get("edges", [])[:-1], further, label=label, **look)
    distance_axis(axes, row["length"])
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("fraction of attention at d or further")
    if len(layers) <= MANY:
        axes.legend(title=f"length {row['length']}", fontsize=7, title_fontsize=7)
