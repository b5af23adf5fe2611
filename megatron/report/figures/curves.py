"""Perplexity against length or position, as a picture."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from megatron.errors import UserError
from megatron.files import atomic_write
from megatron.report.figures.look import Look, looks
from megatron.results.files import PICTURES
from megatron.results.labels import runs
from megatron.results.row import ATTENTION_INPUTS, Row, by_setting, plain, value_of
from megatron.results.statistics import half_octaves, perplexity_of, prefix_curve
from megatron.results.table import cell, setting

GREY = "#666666"
WIDE = 4  # a logarithmic axis from this ratio of largest to smallest perplexity on
LABEL_HEIGHT = 0.05  # of the axes: labels stand at least this far apart
MARKERS_OF_A_CURVE = 8  # a curve of many points has a marker at about so many of them


@dataclass(frozen=True)
class Curve:
    """Values at rising places, and the band around them where there is one.

    encoding, variant: what the colour, marker and dashes stand for;
    band: what low and high are, such as "seeds"
    """

    label: str
    at: Sequence[float]
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    encoding: str = ""
    variant: str = ""
    band: str = ""

    def without_values(self) -> "Curve":
        """The same curve where it is not drawn; it still counts for the looks of the others."""
        return replace(self, at=[], values=[], low=None, high=None)


def variant_of(row: Row) -> str:
    """How the weights of a row were evaluated, where not in the plain way: such as "window 512"."""
    active = [key for key in ATTENTION_INPUTS if row.get(key)]
    return ", ".join(f"{key} {plain(value_of(row, key))}" for key in active)


def by_position(row: Row) -> tuple[list[int], list[float]]:
    """(edges, mean losses between them) by position; empty where a row has none."""
    return row.get("position_edges") or [], row.get("position_losses") or []


def looks_of(curves: Sequence[Curve]) -> list[Look]:
    """The looks of the curves of one figure."""
    return looks([(curve.encoding or curve.label, curve.variant) for curve in curves])


def plot_perplexity(
    rows: Sequence[Row], path: Path, *, title: str = "Perplexity beyond the training length"
) -> None:
    """Write the figure as PNG, SVG or PDF, by the suffix of `path`; UserError for another."""
    curves = [_curve_of(label, group) for label, group in runs(rows).items()]
    write(draw_perplexity(curves, rows, title=title), path)


def plot_by_position(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Draw perplexity against the position within the windows of each row, over half octaves.

    For a single row, also draw the perplexity of all tokens up to a position.
    """
    curves = []
    for label, (row, *_) in runs(rows).items():
        at, losses = half_octaves(*by_position(row))
        perplexities = [_finite_perplexity(loss) for loss in losses]
        encoding, variant = row["pos_emb"], variant_of(row)
        curves.append(Curve(label, at, perplexities, encoding=encoding, variant=variant))
    if len(rows) == 1:
        curves = [replace(curves[0], label="at the position"), _of_prefixes(rows[0])]
    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    axes = figure.add_subplot()
    draw_curves(axes, curves)
    powers = range(0, rows[0]["length"].bit_length(), 2)
    length_axis(axes, [2**power for power in powers], "position (tokens)")
    value_axis(axes, _all_values(curves), "perplexity")
    training_lengths(axes, rows)
    direct_labels(axes, curves)
    axes.set_title(title, loc="left", fontsize=12)
    footer(figure, rows)
    write(figure, path)


def _of_prefixes(row: Row) -> Curve:
    """The perplexity of all tokens up to a position, from the losses by position."""
    losses = prefix_curve(*by_position(row))
    perplexities = [_finite_perplexity(loss) for loss in losses.values()]
    return Curve("of all before it", [*losses], perplexities, encoding=row["pos_emb"])


def _finite_perplexity(loss: float) -> float:
    return perplexity_of(loss) or math.inf


def write(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix; UserError for another."""
    if path.suffix.lower() not in PICTURES:
        raise UserError(f"{path}: a plot is written as .png, .svg or .pdf - name the file so")
    with atomic_write(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lower()[1:], dpi=160)


def _curve_of(label: str, group: Sequence[Row]) -> Curve:
    lengths, perplexities = [], []
    for row in group:
        if row["perplexity"] is not None:
            lengths.append(row["length"])
            perplexities.append(row["perplexity"])
    first = group[0]
    encoding, variant = first["pos_emb"], variant_of(first)
    return Curve(label, lengths, perplexities, encoding=encoding, variant=variant)


def draw_perplexity(curves: Sequence[Curve], rows: Sequence[Row], *, title: str) -> Figure:
    """Draw perplexity against length. `rows` give the lengths and the line beneath."""
    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    axes = figure.add_subplot()
    draw_curves(axes, curves, markersize=6)
    lengths = sorted({row["length"] for row in rows})
    length_axis(axes, lengths, "evaluation length (tokens)")
    value_axis(axes, _all_values(curves), "perplexity")
    training_lengths(axes, rows)
    direct_labels(axes, curves)
    axes.set_title(title, loc="left", fontsize=12)
    footer(figure, rows)
    return figure


def footer(figure: Figure, rows: Sequence[Row]) -> None:
    """One line beneath the figure for each text and protocol of its rows."""
    settings = [setting(members) for members in by_setting(rows).values()]
    text = "\n".join(dict.fromkeys(settings))
    figure.supxlabel(text, x=0.01, ha="left", fontsize=8, color=GREY)


def draw_curves(axes: Axes, curves: Sequence[Curve], *, markersize: float = 4) -> None:
    """Lines with their bands; nothing for a curve without values."""
    for curve, look in zip(curves, looks_of(curves), strict=True):
        # An empty line that is not clipped lies at the corner, and the axes would shrink for it.
        if len(curve.at):
            _draw_curve(axes, curve, look, markersize)


def _draw_curve(axes: Axes, curve: Curve, look: Look, markersize: float) -> None:
    axes.plot(
        curve.at,
        curve.values,
        linewidth=2,
        markersize=markersize,
        markevery=max(1, len(curve.at) // MARKERS_OF_A_CURVE),
        clip_on=False,
        zorder=3,
        **look.line(),
    )
    if curve.low is not None and curve.high is not None:
        axes.fill_between(
            curve.at, curve.low, curve.high, color=look.colour, alpha=0.2, linewidth=0, zorder=2
        )


def _all_values(curves: Sequence[Curve]) -> list[float]:
    return [value for curve in curves for value in curve.values]


def length_axis(axes: Axes, ticks: Sequence[int], label: str) -> None:
    """A logarithmic axis with these ticks."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.set_xlabel(label)


def value_axis(axes: Axes, values: Sequence[float], label: str) -> None:
    """A linear axis, or a logarithmic one where the values spread far; then the label says so."""
    axes.set_ylabel(label)
    if values and max(values) > WIDE * min(values) > 0:
        axes.set_ylabel(f"{label}, log scale")
        axes.set_yscale("log")
        few_powers = max(values) < 100 * min(values)  # then 2 and 5 help the eye
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_powers else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(_tick))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _tick(value: float, _: object) -> str:
    return f"{value:g}" if value < 1e5 else f"{value:.0e}"


def training_lengths(axes: Axes, rows: Sequence[Row]) -> None:
    """A dashed line at each training length."""
    lengths = {row.get("train_length") for row in rows}
    for length in sorted(length for length in lengths if length):
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
    """Write the look, name and last value of each curve to the right, without overlaps."""
    axes.autoscale_view()  # the limits that heights depend on are not known before
    to_axes = axes.transData + axes.transAxes.inverted()
    ends, shown, heights = [], [], []
    for curve, look in zip(curves, looks_of(curves), strict=True):
        if not len(curve.at):
            continue
        end, value = curve.at[-1], curve.values[-1]
        _, height = to_axes.transform((end, value))
        ends.append(end)
        shown.append((f"{curve.label}  {form(value)}", look))
        heights.append(float(height))
    placed = _apart(heights, LABEL_HEIGHT)
    for (text, look), end, height in zip(shown, ends, placed, strict=True):
        if end < max(ends):
            text = f"{text} at {end:g}"
        _label(axes, text, look, height)


def _label(axes: Axes, text: str, look: Look, height: float) -> None:
    """A piece of the line with its marker, and the text beside it."""
    axes.plot(
        [1.02, 1.05, 1.08],
        [height] * 3,
        transform=axes.transAxes,
        clip_on=False,
        linewidth=1.5,
        markersize=4,
        markevery=[1],
        **look.line(),
    )
    axes.text(
        1.10, height, text, transform=axes.transAxes, va="center", fontsize=9, color=look.colour
    )


def _apart(heights: Sequence[float], gap: float) -> list[float]:
    """The heights, moved as little as possible (least squares) to stand `gap` apart."""
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    # Neighbours that touch share one mean of (height - rank * gap): (that mean, how many share it).
    groups: list[tuple[float, int]] = []
    for rank, number in enumerate(order):
        mean, members = heights[number] - rank * gap, 1
        while groups and groups[-1][0] > mean:
            other_mean, others = groups.pop()
            mean = (mean * members + other_mean * others) / (members + others)
            members += others
        groups.append((mean, members))
    means = [mean for mean, members in groups for _ in range(members)]
    placed = [0.0] * len(heights)
    for rank, (number, mean) in enumerate(zip(order, means, strict=True)):
        placed[number] = mean + rank * gap
    return placed
