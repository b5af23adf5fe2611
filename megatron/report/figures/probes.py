"""The results of the probes of one model, as one figure."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from megatron.evaluation.probes.receptive_field import MOST
from megatron.report.figures.positions import GREY, colours, distance_axis, style
from megatron.results.probes import TASKS, ProbeRow, axis_of, cells, guesses

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
    measured = {row["probe"] for row in rows}
    names = [probe for probe in (*TASKS, *OTHERS) if probe in measured]
    columns = min(max(len(names), 1), COLUMNS)
    lines = max(1, math.ceil(len(names) / columns))
    with style():
        size = (2.9 * columns + 0.9, 2.6 * lines + 0.3)
        figure = Figure(figsize=size, layout="constrained")
        places = list(figure.subplots(lines, columns, squeeze=False).flat)
        maps = []
        for axes, name in zip(places, names, strict=False):
            axes.set_title(name.replace("_", " "), loc="left")
            if name in OTHERS:
                OTHERS[name](axes, rows)
            else:
                _map(axes, rows, name)
                maps.append(axes)
        for unused in places[len(names) :]:
            unused.set_axis_off()
        if maps:
            with_guess = any(row.get("guess") is not None for row in rows)
            _accuracy_bar(figure, maps, with_guess=with_guess)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _accuracy_bar(figure: Figure, maps: Sequence[Axes], *, with_guess: bool) -> None:
    scale = ScalarMappable(Normalize(0, 1), "viridis")
    guess = "guess rate, " if with_guess else ""
    label = f"accuracy (in a cell: accuracy, {guess}gain in nats)"
    bar = figure.colorbar(scale, ax=list(maps), label=label, pad=0.01, aspect=30)
    bar.ax.yaxis.label.set_fontsize(7)


def _map(axes: Axes, rows: Sequence[ProbeRow], task: str) -> None:
    """Lengths to the right, places downward; a cell has its accuracy, guess rate and gain."""
    by_place = cells(rows, task)
    guess_by_place = guesses(rows, task)
    places = sorted({place for place, _ in by_place})
    lengths = sorted({length for _, length in by_place})
    accuracies = np.full((len(places), len(lengths)), np.nan)
    for line, place in enumerate(places):
        for column, length in enumerate(lengths):
            pair = by_place.get((place, length))
            if pair is not None:
                accuracies[line, column] = pair[0]
            _write_cell(axes, line, column, pair, guess_by_place.get((place, length)))
    axes.imshow(
        accuracies,
        aspect="auto",
        cmap="viridis",
        norm=Normalize(0, 1),
        interpolation="nearest",
    )
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(places)), [f"{place:g}" for place in places])
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel(PLACES[axis_of(task)])


def _write_cell(
    axes: Axes, line: int, column: int, pair: tuple[float, float] | None, guess: float | None
) -> None:
    text, colour = "n/a", "black"
    if pair is not None:
        accuracy, gain = pair
        numbers = [f"{accuracy:.2f}", f"{gain:+.2f}"]
        if guess is not None:
            numbers.insert(1, f"({guess:.2g})")
        text = "\n".join(numbers)
        colour = "white" if accuracy < DARK else "black"
    axes.text(column, line, text, ha="center", va="center", fontsize=6, color=colour)


def _receptive_field(axes: Axes, rows: Sequence[ProbeRow]) -> None:
    """For each length, the fraction of the gradient within a distance."""
    measured = [row for row in rows if row["probe"] == "receptive_field" and row.get("cumulative")]
    palette = colours(len(measured))
    for number, row in enumerate(measured):
        axes.plot(
            row.get("distances", []),
            row.get("cumulative", []),
            color=palette(number),
            linewidth=1.1,
            label=f"{row['length']}: {row.get('reach')} tokens",
        )
    axes.axhline(MOST, color=GREY, linewidth=0.5, linestyle=(0, (4, 3)))
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("fraction of the gradient within d")
    if measured:
        distance_axis(axes, max(row["length"] for row in measured))
        _legend(axes, f"length: {MOST:.0%} within")


def _attention(axes: Axes, rows: Sequence[ProbeRow]) -> None:
    """For each layer at the longest length, the fraction of attention at a distance or further."""
    measured = [row for row in rows if row["probe"] == "attention" and row.get("mass")]
    if not measured:
        return
    row = max(measured, key=lambda one: one["length"])
    layers, edges = row.get("mass", []), row.get("edges", [])
    names = [f" ({name})" for name in row.get("layers", [])] or [""] * len(layers)
    palette = colours(len(layers))
    for layer, mass in enumerate(layers):
        further = [sum(mass[start:]) for start in range(len(mass))]
        axes.plot(
            edges[:-1],
            further,
            color=palette(layer),
            linewidth=1.1,
            marker=".",
            label=f"layer {layer}{names[layer]}",
        )
    distance_axis(axes, row["length"])
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("fraction of attention at d or further")
    if len(layers) <= MANY:
        _legend(axes, f"length {row['length']}")


def _legend(axes: Axes, title: str) -> None:
    box = axes.legend(title=title, fontsize=7, title_fontsize=7)
    box.get_frame().set(edgecolor="none", alpha=0.8)


OTHERS = {"receptive_field": _receptive_field, "attention": _attention}
