"""Curves over length, position or step: colours and markers, one way to draw them, and files."""

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
)

from megatron.errors import UserError
from megatron.files import atomic_write
from megatron.results.files import PICTURES
from megatron.results.labels import runs
from megatron.results.row import ATTENTION_INPUTS, Question, Row, by_text, plain, value_of
from megatron.results.statistics import half_octaves
from megatron.results.table import cell, setting

GREY = "#666666"
WIDE = 4  # a logarithmic axis from this ratio of largest to smallest value on
LABEL_HEIGHT = 0.05  # of the axes: labels stand at least this far apart
MARKERS_OF_A_CURVE = 8  # a curve of many points has a marker at about so many of them
SIZES: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}
STABLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "megatron"}

# --- Looks: colour and marker for the encoding, in every figure; dashes for variants ---

# Okabe and Ito's colours without yellow, and Tol's wine: distinct for any colour vision.
BLUE, RED, GREEN, PINK = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
SKY, ORANGE, BLACK, WINE = "#56B4E9", "#E69F00", "#000000", "#882255"
COLOURS = (BLUE, RED, GREEN, PINK, SKY, ORANGE, BLACK, WINE)

# One marker for each family. The pairs of colour and marker are unique.
ENCODINGS: dict[str, tuple[str, str]] = {
    "mep_free": (BLACK, "o"),
    "mep_param": (BLUE, "o"),
    "mep_param_t5": (GREEN, "o"),
    "mep": (ORANGE, "o"),
    "gaussian": (SKY, "o"),
    "kerple_log": (SKY, "s"),
    "kerple_power": (ORANGE, "s"),
    "kerple_log_3para": (BLUE, "s"),
    "kerple_bias_2para": (BLACK, "s"),
    "kerple_bias_3para": (GREEN, "s"),
    "kerple_bias_wht": (RED, "s"),
    "kerple_wht_1para": (PINK, "s"),
    "kerple_wht_2para": (WINE, "s"),
    "alibi": (PINK, "^"),
    "tanh": (BLUE, "^"),
    "sandwich": (RED, "^"),
    "bam": (GREEN, "^"),
    "scaled_distance": (ORANGE, "^"),
    "t5": (GREEN, "D"),
    "fire": (RED, "D"),
    "cable": (SKY, "D"),
    "rotary": (RED, "v"),
    "xpos": (ORANGE, "v"),
    "sinusoidal": (WINE, "P"),
    "learned": (BLUE, "P"),
    "randomized": (GREEN, "P"),
    "none": (BLACK, "P"),
}
OWN = tuple(product(COLOURS, ("X", "*", "p", "h")))  # for encodings that the table lacks
DASHES = ("-", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)))
WINDOW = "--"


@dataclass(frozen=True)
class Look:
    """The colour, marker and dashes of a curve."""

    colour: str
    marker: str
    dashes: Any

    def line(self) -> dict[str, Any]:
        """As arguments of matplotlib's plot."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.dashes}


def looks(curves: Sequence[tuple[str, str]]) -> list[Look]:
    """A look for each (encoding, variant) of a figure.

    The encoding gives colour and marker: from the table or, for others, from a hash of the name.
    Without a variant the line is solid, with a window it is dashed. Further curves of an encoding
    get other dashes.
    """
    used: dict[str, list[Any]] = {}
    found = []
    for encoding, variant in curves:
        digest = hashlib.sha256(encoding.encode()).digest()
        ink = ENCODINGS.get(encoding, OWN[digest[0] % len(OWN)])
        patterns = [*DASHES[1:], *DASHES] if variant else list(DASHES)
        if variant.startswith("window"):
            patterns = [WINDOW, *DASHES]
        used_here = used.setdefault(encoding, [])
        free = [pattern for pattern in patterns if pattern not in used_here]
        dashes = (free or patterns)[0]
        used_here.append(dashes)
        found.append(Look(*ink, dashes))
    return found


# --- Curves of rows ---


@dataclass(frozen=True)
class Curve:
    """Values at rising places, and a band of one standard deviation over seeds, or none.

    encoding, variant: what the colour, marker and dashes stand for
    """

    label: str
    at: Sequence[float]
    values: Sequence[float]
    std: Sequence[float] = ()
    encoding: str = ""
    variant: str = ""


def curve_of(
    label: str, rows: Sequence[Question], points: Mapping[float, Sequence[float]]
) -> Curve:
    """The mean at each place over seeds, whose values are given there."""
    at = sorted(points)
    means = [statistics.fmean(points[place]) for place in at]
    std = []
    if points and min(map(len, points.values())) > 1:
        std = [statistics.stdev(points[place]) for place in at]
    active = [key for key in ATTENTION_INPUTS if rows[0].get(key)]
    variant = ", ".join(f"{key} {plain(value_of(rows[0], key))}" for key in active)
    return Curve(label, at, means, std, rows[0]["pos_emb"], variant)


def perplexity_curves(groups: Mapping[str, Sequence[Row]]) -> list[Curve]:
    """Perplexity by length; a length at which a seed has no number is left out."""
    curves = []
    for label, rows in groups.items():
        points: dict[float, list[float]] = {}
        for length in {row["length"] for row in rows}:
            values = [row["perplexity"] for row in rows if row["length"] == length]
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                points[length] = known
        curves.append(curve_of(label, rows, points))
    return curves


def position_curves(groups: Mapping[str, Sequence[Row]]) -> list[Curve]:
    """Loss by position within the longest windows that have it, over half octaves."""
    curves = []
    for label, rows in groups.items():
        with_losses = [row for row in rows if row.get("position_losses")]
        longest = max((row["length"] for row in with_losses), default=0)
        points: dict[float, list[float]] = {}
        for row in with_losses:
            if row["length"] == longest:
                edges, losses = row.get("position_edges", []), row.get("position_losses", [])
                for place, loss in zip(*half_octaves(edges, losses), strict=True):
                    points.setdefault(place, []).append(loss)
        curves.append(curve_of(label, rows, points))
    return curves


# --- Figures ---


def plot_perplexity(
    rows: Sequence[Row], path: Path, *, title: str = "Perplexity beyond the training length"
) -> None:
    """Draw perplexity against length, a curve for each run on each text."""
    write(draw_by_length(perplexity_curves(runs(rows)), rows, title), path)


def draw_by_length(curves: Sequence[Curve], rows: Sequence[Row], title: str = "") -> Figure:
    """Curves of perplexity; `rows` give the lengths and the lines beneath."""
    lengths = sorted({row["length"] for row in rows})
    return draw_curves(
        curves, "evaluation length (tokens)", "perplexity", lengths, rows=rows, title=title
    )


def plot_by_position(rows: Sequence[Row], path: Path, *, title: str) -> None:
    """Draw the loss against the position within the windows of each row, over half octaves."""
    write(draw_by_position(position_curves(runs(rows)), rows, title), path)


def draw_by_position(curves: Sequence[Curve], rows: Sequence[Row], title: str = "") -> Figure:
    """Curves of the loss by position; `rows` give the training lengths and the lines beneath."""
    longest = max((curve.at[-1] for curve in curves if curve.at), default=1)
    ticks = [2**power for power in range(0, int(longest).bit_length() + 1, 2)]
    value = "loss (nats per token)"
    return draw_curves(curves, "position (tokens)", value, ticks, rows=rows, title=title)


def draw_curves(
    curves: Sequence[Curve],
    place: str,
    value: str,
    ticks: Sequence[int] = (),
    *,
    rows: Sequence[Row] = (),
    title: str = "",
) -> Figure:
    """Lines with their bands, and the name and last value of each to its right.

    place, value: what the axes show; ticks: of a logarithmic axis of lengths, none: a linear one
    rows: give training lengths, and a line beneath for each text and protocol
    """
    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    axes = figure.add_subplot()
    shown = []
    of_all = looks([(curve.encoding or curve.label, curve.variant) for curve in curves])
    for curve, look in zip(curves, of_all, strict=True):
        # An empty line that is not clipped lies at the corner, and the axes would shrink for it.
        if not curve.at:
            continue
        shown.append((curve, look))
        every = max(1, len(curve.at) // MARKERS_OF_A_CURVE)
        axes.plot(
            curve.at, curve.values, linewidth=2, markevery=every, clip_on=False, **look.line()
        )
        if curve.std:
            pairs = list(zip(curve.values, curve.std, strict=True))
            # A logarithmic axis has no place for a band that goes below zero.
            low = [max(mean - std, 0.01 * mean) for mean, std in pairs]
            high = [mean + std for mean, std in pairs]
            axes.fill_between(curve.at, low, high, color=look.colour, alpha=0.2, linewidth=0)
    if ticks:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel(place)
    axes.set_ylabel(value)
    values = [value for curve, _ in shown for value in curve.values]
    if values and max(values) > WIDE * min(values) > 0:
        axes.set_ylabel(f"{value}, log scale")
        axes.set_yscale("log")
        few_powers = max(values) < 100 * min(values)  # then 2 and 5 help the eye
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_powers else (1,)))
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda y, _: f"{y:g}" if y < 1e5 else f"{y:.0e}")
        )
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    for length in sorted({row.get("train_length") or 0 for row in rows} - {0}):
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
    _direct_labels(axes, shown)
    axes.set_title(title, loc="left", fontsize=12)
    below = "\n".join(dict.fromkeys(setting(members) for members in by_text(rows)))
    figure.supxlabel(below, x=0.01, ha="left", fontsize=8, color=GREY)
    return figure


def _direct_labels(axes: Axes, shown: Sequence[tuple[Curve, Look]]) -> None:
    """A piece of each line with its marker, name and last value, to the right of the axes."""
    axes.autoscale_view()  # the limits that heights depend on are not known before
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [(curve.at[-1], curve.values[-1]) for curve, _ in shown]
    heights = [float(to_axes.transform(end)[1]) for end in ends]
    furthest = max((place for place, _ in ends), default=0)
    for (curve, look), height in zip(shown, apart(heights, LABEL_HEIGHT), strict=True):
        text = f"{curve.label}  {cell(curve.values[-1])}"
        if curve.at[-1] < furthest:
            text = f"{text} at {curve.at[-1]:g}"
        axes.plot(
            [1.02, 1.05, 1.08],
            [height] * 3,
            transform=axes.transAxes,
            clip_on=False,
            markersize=4,
            markevery=[1],
            **look.line(),
        )
        axes.text(
            1.10,
            height,
            text,
            transform=axes.transAxes,
            va="center",
            fontsize=9,
            color=look.colour,
        )


def apart(heights: Sequence[float], gap: float) -> list[float]:
    """The heights, moved upward and then together downward so that they stand `gap` apart."""
    placed = [0.0] * len(heights)
    highest = -math.inf
    for number in sorted(range(len(heights)), key=lambda number: heights[number]):
        highest = placed[number] = max(heights[number], highest + gap)
    beyond = max(0.0, highest - max([1.0, *heights]))
    return [height - beyond for height in placed]


def style() -> AbstractContextManager[None]:
    """Sizes for print, and SVG whose text stays text."""
    return matplotlib.rc_context(SIZES | STABLE)


def write(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix; the same figure has the same bytes."""
    suffix = path.suffix.lower()
    if suffix not in PICTURES:
        raise UserError(f"{path}: a plot is written as .png, .svg or .pdf - name the file so")
    metadata = {"Date": None, "Creator": None} if suffix == ".svg" else None
    with style(), atomic_write(path) as temporary:
        figure.savefig(temporary, format=suffix[1:], dpi=160, metadata=metadata)
