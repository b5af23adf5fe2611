"""Curves over length or position: colours and markers, one way to draw them, and files."""

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from megatron.errors import UserError
from megatron.files import atomic_write
from megatron.results.files import PICTURES
from megatron.results.labels import runs
from megatron.results.row import Row, by_text
from megatron.results.statistics import half_octaves
from megatron.results.table import cell, setting

GREY = "#666666"
WIDE = 4  # a logarithmic axis from this ratio of largest to smallest value on
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

OWN_MARKERS = "X*ph"  # for encodings that looks.yml lacks
WINDOW = "--"
DASHES = ("-", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (8, 3)))


@cache
def looks_of_encodings() -> dict[str, list[str]]:
    """Colour and marker by encoding, from looks.yml."""
    text = Path(__file__).with_name("looks.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def looks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Colour, marker and dashes of the curve of each row, as arguments of matplotlib's plot.

    The encoding gives colour and marker: from looks.yml or, for others, from a hash of the name.
    A line is dashed with a window, and else solid. Further curves of an encoding get other dashes.
    """
    known = looks_of_encodings()
    colours = sorted({colour for colour, _ in known.values()})
    used: dict[str, list[Any]] = {}
    found = []
    for row in rows:
        encoding = row["pos_emb"]
        first, second, *_ = hashlib.sha256(encoding.encode()).digest()
        own = colours[first % len(colours)], OWN_MARKERS[second % len(OWN_MARKERS)]
        colour, marker = known.get(encoding, own)
        patterns = [WINDOW, *DASHES] if row.get("window") else DASHES
        used_here = used.setdefault(encoding, [])
        free = [pattern for pattern in patterns if pattern not in used_here]
        used_here.append((free or patterns)[0])
        found.append({"color": colour, "marker": marker, "linestyle": used_here[-1]})
    return found


# --- Points of rows ---

Points = dict[float, list[float]]  # values of all seeds by length or position


def perplexities(rows: Sequence[Row]) -> Points:
    """Perplexity by length; a length at which a seed has no number is left out."""
    points: Points = {}
    for length in sorted({row["length"] for row in rows}):
        values = [row["perplexity"] for row in rows if row["length"] == length]
        known = [value for value in values if value is not None]
        if len(known) == len(values):
            points[length] = known
    return points


def losses_by_position(rows: Sequence[Row]) -> Points:
    """Loss by position within the longest windows that have it, over half octaves."""
    with_losses = [row for row in rows if row.get("position_losses")]
    longest = max((row["length"] for row in with_losses), default=0)
    points: Points = {}
    for row in with_losses:
        if row["length"] == longest:
            edges, losses = row.get("position_edges", []), row.get("position_losses", [])
            for place, loss in zip(*half_octaves(edges, losses), strict=True):
                points.setdefault(place, []).append(loss)
    return points


# --- Figures ---


def plot_perplexity(
    rows: Sequence[Row], path: Path, *, title: str = "Perplexity beyond the training length"
) -> None:
    """Draw perplexity against length, a curve for each run on each text."""
    write(draw_perplexity(runs(rows), title), path)


def draw_perplexity(groups: Mapping[str, Sequence[Row]], title: str = "") -> Figure:
    """Curves of perplexity by length; groups: the rows of each curve, by its label."""
    curves = {label: perplexities(rows) for label, rows in groups.items()}
    ticks = sorted({row["length"] for rows in groups.values() for row in rows})
    return _draw(groups, curves, ticks, "evaluation length (tokens)", "perplexity", title)


def draw_by_position(groups: Mapping[str, Sequence[Row]], title: str = "") -> Figure:
    """Curves of the loss by position; groups: the rows of each curve, by its label."""
    curves = {label: losses_by_position(rows) for label, rows in groups.items()}
    longest = max((place for points in curves.values() for place in points), default=1)
    ticks = [2**power for power in range(0, int(longest).bit_length() + 1, 2)]
    return _draw(groups, curves, ticks, "position (tokens)", "loss (nats per token)", title)


def _draw(
    groups: Mapping[str, Sequence[Row]],
    curves: Mapping[str, Points],
    ticks: Sequence[int],
    place: str,
    quantity: str,
    title: str,
) -> Figure:
    """Means over seeds, bands of one standard deviation, and a legend with the last values.

    groups: the rows of each curve, which give looks, training lengths and the lines beneath
    place, quantity: what the axes show
    """
    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    axes = figure.add_subplot()
    furthest = max((at for points in curves.values() for at in points), default=0)
    last_values = []
    lines = []
    lowest, highest = math.inf, -math.inf
    for (label, points), look in zip(
        curves.items(), looks([rows[0] for rows in groups.values()]), strict=True
    ):
        # An empty line that is not clipped lies at the corner, and the axes would shrink for it.
        if not points:
            continue
        at = list(points)
        means = [statistics.fmean(values) for values in points.values()]
        lowest, highest = min(lowest, *means), max(highest, *means)
        label = f"{label}  {cell(means[-1])}"
        if at[-1] < furthest:
            label = f"{label} at {at[-1]:g}"
        every = max(1, len(at) // MARKERS_OF_A_CURVE)
        last_values.append(means[-1])
        lines += axes.plot(
            at, means, label=label, linewidth=2, markevery=every, clip_on=False, **look
        )
        if min(map(len, points.values())) > 1:
            stds = [statistics.stdev(values) for values in points.values()]
            # A logarithmic axis has no place for a band that goes below zero.
            low = [max(mean - std, 0.01 * mean) for mean, std in zip(means, stds, strict=True)]
            high = [mean + std for mean, std in zip(means, stds, strict=True)]
            axes.fill_between(at, low, high, color=look["color"], alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel(place)
    axes.set_ylabel(quantity)
    if highest > WIDE * lowest > 0:
        axes.set_ylabel(f"{quantity}, log scale")
        axes.set_yscale("log")
        few_powers = highest < 100 * lowest  # then 2 and 5 help the eye
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_powers else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
    axes.minorticks_off()
    axes.grid(axis="y", color="#E3E3E3", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    rows = [row for group in groups.values() for row in group]
    for length in sorted({row.get("train_length") or 0 for row in rows} - {0}):
        axes.axvline(length, color=GREY, linestyle=(0, (4, 3)), linewidth=1, zorder=1)
        at_the_top = axes.get_xaxis_transform()
        axes.text(length, 1, f" trained at {length}", transform=at_the_top, va="top", color=GREY)
    if lines:
        highest_first = sorted(range(len(lines)), key=lambda one: -last_values[one])
        axes.legend(
            handles=[lines[one] for one in highest_first],
            labelcolor="linecolor",
            loc="center left",
            bbox_to_anchor=(1, 0.5),
            frameon=False,
        )
    axes.set_title(title, loc="left", fontsize=12)
    below = "\n".join(dict.fromkeys(setting(members) for members in by_text(rows)))
    figure.supxlabel(below, x=0.01, ha="left", fontsize=8, color=GREY)
    return figure


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
