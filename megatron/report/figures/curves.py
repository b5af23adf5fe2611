"""Perplexity against length or position, as a picture."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from megatron.errors import UserError
from megatron.files import Beside
from megatron.results.files import PICTURES
from megatron.results.labels import runs
from megatron.results.row import Row
from megatron.results.statistics import half_octaves, perplexity_of, prefix_curve
from megatron.results.table import cell, setting

# Okabe and Ito's colours without the yellow, told apart with every kind of colour vision; the markers repeat it.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"
WIDE = 4  # a logarithmic axis from this ratio of largest to smallest perplexity on
LABEL_HEIGHT = 0.05  # of the axes: labels stand at least this far apart


@dataclass(frozen=True)
class Curve:
    """Values at rising places, and between which values each may lie; bands are left out where they say nothing."""

    label: str
    at: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def plot_perplexity(
    rows: Sequence[Row], path: Path, *, title: str = "Perplexity beyond the training length"
) -> None:
    """Write the figure as PNG, SVG or PDF, by the suffix of `path`; UserError for another suffix."""
    _write(
        draw_perplexity(
            [_curve_of(label, group) for label, group in runs(rows).items()], rows, title=title
        ),
        path,
    )


def plot_by_position(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Perplexity against position within the windows of each row, over half octaves; of a single row also that of all
    tokens before."""
    told = {
        label: (row["position_edges"], row["position_losses"])
        for label, (row, *_) in runs(rows).items()
    }
    curves = [Curve(label, *half_octaves(*both)) for label, both in told.items()]
    if len(rows) == 1:
        (both,) = told.values()
        prefixes = prefix_curve(*both)
        curves = [replace(curves[0], label="at the position")]
        curves.append(Curve("of all before it", [*prefixes], [*prefixes.values()]))
    curves = [
        Curve(one.label, one.at, [perplexity_of(loss) or math.inf for loss in one.values])
        for one in curves
    ]
    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        draw_curve(axes, curve, number)
    length_axis(
        axes,
        [2**power for power in range(0, rows[0]["length"].bit_length(), 2)],
        "position (tokens)",
    )
    value_axis(axes, [value for curve in curves for value in curve.values], "perplexity")
    training_lengths(axes, rows)
    direct_labels(axes, curves)
    axes.set_title(title, loc="left", fontsize=12)
    figure.supxlabel(setting(rows), x=0.01, ha="left", fontsize=8, color=GREY)
    _write(figure, path)


def _write(figure: Figure, path: Path) -> None:
    if path.suffix.lower() not in PICTURES:
        raise UserError(f"{path}: a plot is written as .png, .svg or .pdf - name the file so")
    with Beside(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lower()[1:], dpi=160)


def _curve_of(label: str, group: Sequence[Row]) -> Curve:
    known = [row for row in group if row["perplexity"] is not None]
    return Curve(label, [row["length"] for row in known], [row["perplexity"] for row in known])


def draw_perplexity(curves: Sequence[Curve], rows: Sequence[Row], *, title: str) -> Figure:
    """Perplexity against length; rows: what was measured, for the lengths and the line beneath."""
    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        draw_curve(axes, curve, number, markersize=6)
    lengths = sorted({row["length"] for row in rows})
    length_axis(axes, lengths, "evaluation length (tokens)")
    value_axis(axes, [value for curve in curves for value in curve.values], "perplexity")
    training_lengths(axes, rows)
    direct_labels(axes, curves)
    axes.set_title(title, loc="left", fontsize=12)
    figure.supxlabel(setting(rows), x=0.01, ha="left", fontsize=8, color=GREY)
    return figure


def _style(number: int) -> dict[str, Any]:
    """Colour, marker and, once the colours are used up, another kind of line."""
    dashes = ("-", "--", ":", "-.")[number // len(COLOURS) % 4]
    return {
        "color": COLOURS[number % len(COLOURS)],
        "marker": MARKERS[number % len(MARKERS)],
        "linestyle": dashes,
    }


def draw_curve(axes: Axes, curve: Curve, number: int, *, markersize: float = 0) -> None:
    """A line with its band, in the colour of its number; nothing of a curve without values."""
    if not len(
        curve.at
    ):  # an empty line that is not clipped has a place at the figure's corner, for which axes shrink
        return
    look = _style(number)
    axes.plot(
        curve.at, curve.values, linewidth=2, markersize=markersize, clip_on=False, zorder=3, **look
    )
    if curve.low is not None and curve.high is not None:
        axes.fill_between(
            curve.at, curve.low, curve.high, color=look["color"], alpha=0.2, linewidth=0, zorder=2
        )


def length_axis(axes: Axes, ticks: Sequence[int], label: str) -> None:
    """A logarithmic axis with these ticks."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.set_xlabel(label)


def value_axis(axes: Axes, values: Sequence[float], label: str) -> None:
    """Logarithmic only where the values spread far."""
    axes.set_ylabel(label)
    if values and max(values) > WIDE * min(values) > 0:
        axes.set_yscale("log")
        near = max(values) < 100 * min(values)  # few powers of ten: 2 and 5 help the eye
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if near else (1,)))
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda y, _: f"{y:g}" if y < 1e5 else f"{y:.0e}")
        )
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def training_lengths(axes: Axes, rows: Sequence[Row]) -> None:
    """A dashed line at each length that was trained at."""
    for length in sorted({row["train_length"] for row in rows if row.get("train_length")}):
        axes.axvline(length, color=GREY, linestyle=(0, (4, 3)), linewidth=1, zorder=1)
        axes.annotate(
            f"trained at {length}",
            (length, 1),
            xycoords=axes.get_xaxis_transform(),
            xytext=(5, -2),
            textcoords="offset points",
            va="top",
            fontsize=8,
            color=GREY,
        )


def direct_labels(axes: Axes, curves: Sequence[Curve], form: Callable[[float], str] = cell) -> None:
    """The name and last value of each curve to the right of all of them, pushed apart where they would overlap."""
    ends = [(number, curve) for number, curve in enumerate(curves) if len(curve.at)]
    longest = max((curve.at[-1] for _, curve in ends), default=0)
    axes.autoscale_view()  # the limits that heights depend on are not known before
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [float(to_axes.transform((curve.at[-1], curve.values[-1]))[1]) for _, curve in ends]
    for (number, curve), height in zip(ends, _apart(heights, LABEL_HEIGHT), strict=True):
        short = f" at {curve.at[-1]:g}" if curve.at[-1] < longest else ""
        text, colour = f"{curve.label}  {form(curve.values[-1])}{short}", _style(number)["color"]
        axes.text(
            1.02, height, text, transform=axes.transAxes, va="center", fontsize=9, color=colour
        )


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """The heights, in the order given, moved as little as possible (least squares) to stand `gap` apart."""
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    groups: list[
        tuple[float, int]
    ] = []  # mean of height - rank * gap, members: neighbours that touch share one mean
    for rank, number in enumerate(order):
        mean, members = heights[number] - rank * gap, 1
        while groups and groups[-1][0] > mean:
            before, others = groups.pop()
            mean, members = (
                (mean * members + before * others) / (members + others),
                members + others,
            )
        groups.append((mean, members))
    means = [mean for mean, members in groups for _ in range(members)]
    placed = {
        number: mean + rank * gap
        for rank, (number, mean) in enumerate(zip(order, means, strict=True))
    }
    return [placed[number] for number in range(len(heights))]
