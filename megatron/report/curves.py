"""Curves over length or position, token accuracy as a heatmap, their looks and files."""

import math
import statistics
import textwrap
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib
import numpy as np
import yaml
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator
from matplotlib.transforms import ScaledTranslation

from megatron.errors import UserError
from megatron.files import write_output
from megatron.results.files import PICTURES
from megatron.results.gain import gains_of
from megatron.results.labels import kinds, runs, sections
from megatron.results.row import TASK, Row, trained_length
from megatron.results.statistics import half_octaves
from megatron.results.table import GUESSES, TOKENS_RIGHT, cell, mean_and_std, setting, starred
from megatron.splits import TASK_PREFIX

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
MARK = "megatron/report"  # the creator of a picture, for the program that may replace it
# Dollars in a name are no formula.
STABLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megatron",
    "text.parse_math": False,
}

# In inches: the width of a paper's text, a panel without its legend, a line of a legend, and the
# corner of the legend from that of the axes.
WIDTH, PANEL, LINE, BELOW = 5.5, 3.8, 0.19, (-0.5, -0.45)
LETTERS, HALF = 64, 28  # of a line of a legend, and of one of two columns
LETTERS_OF_A_SETTING = 76

# A heatmap: inches of a cell and of a letter of a label, letters of a line of a label, panels side
# by side. Its colours grow dark evenly, for any colour vision and for grey print.
CELL, LETTER, LETTERS_OF_A_LABEL, ACROSS = 0.42, 0.055, 30, 3
LETTER_OF_A_HEADING, LETTER_OF_A_TITLE = 0.075, 0.1
SHADES, DARK = "Blues", 72  # a number is white from this percentage on

# --- Looks: colour and marker for the encoding, in every figure; dashes for further curves ---

OWN_MARKERS = "X*ph"  # for encodings that looks.yml lacks
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)))


@cache
def looks_of_encodings() -> dict[str, list[str]]:
    """Colour and marker by encoding, from looks.yml."""
    text = Path(__file__).with_name("looks.yml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


def looks(encodings: Sequence[str]) -> list[dict[str, Any]]:
    """Colour, marker and dashes of the curves of a figure, as arguments of matplotlib's plot.

    encodings: that of each curve. It gives marker and colour: from looks.yml or, for others, from a
    hash of the name. The first that wants a colour has it; others have what is left. When all
    colours are used, they come again with other dashes.
    """
    known = looks_of_encodings()
    palette = sorted({colour for colour, _ in known.values()})
    wanted, markers = [], []
    for encoding in encodings:
        number = crc32(encoding.encode())
        own = palette[number % len(palette)], OWN_MARKERS[number % len(OWN_MARKERS)]
        colour, marker = known.get(encoding, own)
        wanted.append(colour)
        markers.append(marker)

    free = list(product(DASHES, palette)) * len(wanted)
    found: list[dict[str, Any]] = [{}] * len(wanted)
    for number in sorted(range(len(wanted)), key=lambda one: wanted[one] in wanted[:one]):
        dashes, colour = free[0]
        if (dashes, wanted[number]) in free[: len(palette)]:
            colour = wanted[number]
        free.remove((dashes, colour))
        found[number] = {"color": colour, "marker": markers[number], "linestyle": dashes}
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

Groups = Mapping[str, Sequence[Row]]  # the rows of each curve, by its label


def plot_results(
    rows: Sequence[Row], path: Path, *, over_seeds: bool = False, title: str = ""
) -> None:
    """Draw perplexity against length, or token accuracy, in a panel for each text and protocol.

    over_seeds: a curve for each encoding instead of each run

    Raises UserError for rows of tasks beside others.
    """
    texts = {}
    for heading, of_text in sections(rows).items():
        texts[heading] = kinds(of_text) if over_seeds else runs(of_text)
    are_tasks = {row.get("protocol") == TASK for row in rows}
    if len(are_tasks) > 1:
        raise UserError(f"{path}: tasks and texts have no common plot - give the files of one kind")
    if True in are_tasks:
        figure = draw_accuracy(texts, title or "Token accuracy beyond the training length")
    else:
        title = title or "Perplexity beyond the training length"
        figure = draw_perplexity(*texts.values(), title=title)
    write(figure, path)


def draw_perplexity(*texts: Groups, without: Collection[str] = (), title: str = "") -> Figure:
    """Curves of perplexity by length, in a panel for each text.

    without: labels of curves to leave out; the others keep their looks
    """
    curves = []
    for groups in texts:
        drawn = groups.keys() - without
        curves.append({label: perplexities(groups[label]) for label in drawn})
    places = ["evaluation length (tokens)"] * len(texts)
    return _draw(texts, curves, places, "perplexity", title)


def draw_by_position(groups: Groups, minus: str, without: Collection[str] = ()) -> Figure:
    """Curves of the loss by position; minus: the label whose mean loss is subtracted."""
    subtracted = losses_by_position(groups[minus])
    curves = {}
    for label in groups.keys() - without:
        points = losses_by_position(groups[label])
        curves[label] = {
            at: [loss - statistics.fmean(subtracted[at]) for loss in losses]
            for at, losses in points.items()
            if at in subtracted
        }
    quantity = "difference in loss (nats per token)"
    title = f"Loss minus that of {minus}"
    return _draw([groups], [curves], ["position (tokens)"], quantity, title)


def draw_gains(groups: Groups) -> Figure:
    """Percentages of targets that gain, and that lose, more than so many nats by far context."""
    steps = [2.0 ** (half / 2) for half in range(-10, 7)]
    curves: dict[int, dict[str, Points]] = {
        sign: {label: {} for label in groups} for sign in (1, -1)
    }
    for label, rows in groups.items():
        for of_run in runs(rows).values():
            for gain in gains_of(of_run)[-1:]:
                for sign, points_of in curves.items():
                    points = points_of[label]
                    for least in steps:
                        share = 100 * float((sign * gain.gains > least).mean())
                        if share:
                            points.setdefault(least, []).append(share)
    places = ["gain of more than (nats)", "loss of more than (nats)"]
    title = "Targets that far context helps, and harms"
    return _draw([groups] * 2, list(curves.values()), places, "targets (%)", title, of_length=False)


@matplotlib.rc_context(STABLE)
def _draw(
    texts: Sequence[Groups],
    curves: Sequence[Mapping[str, Points]],
    places: Sequence[str],
    quantity: str,
    title: str,
    *,
    of_length: bool = True,
) -> Figure:
    """Means over seeds, bands of one standard deviation, and legends with the last values.

    A legend ends with the labels that have no curve.

    texts, curves: for each panel all rows, which give looks, and the points of curves, by label
    places, quantity: what the axes show
    of_length: places are tokens, so that the training length is one of them

    Width and text sizes are the same in every figure. The height grows with the legends.
    """
    figure = Figure(layout=ConstrainedLayoutEngine(h_pad=0.06))
    # Not wrapped by matplotlib, which would read a formula in it.
    title = textwrap.fill(title, int(WIDTH / LETTER_OF_A_TITLE))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    height = 0.0
    panels = figure.subplots(len(texts), squeeze=False)[:, 0]
    for axes, groups, points_of, place in zip(panels, texts, curves, places, strict=True):
        furthest = max((at for points in points_of.values() for at in points), default=0)
        last_values = {}
        values = [statistics.fmean(of) for points in points_of.values() for of in points.values()]
        lowest, highest = min(values, default=0), max(values, default=0)
        logarithmic = highest > WIDE * lowest > 0
        encodings = [rows[0]["pos_emb"] for rows in groups.values()]
        for label, look in zip(groups, looks(encodings), strict=True):
            points = points_of.get(label)
            # An empty line that is not clipped lies at the corner; the axes would shrink for it.
            if not points:
                continue
            at = list(points)
            means = np.array([statistics.fmean(values) for values in points.values()])
            label = f"{label}: {cell(means[-1])}"
            if at[-1] < furthest:
                label = f"{label} at {at[-1]:g}"
            every = max(1, len(at) // MARKERS_OF_A_CURVE)
            (line,) = axes.plot(at, means, markevery=every, clip_on=False, **look)
            line.set_label(textwrap.fill(label, LETTERS))
            last_values[line] = means[-1]
            if min(map(len, points.values())) > 1:
                stds = np.array([statistics.stdev(values) for values in points.values()])
                low = means - stds
                if logarithmic:  # there is no place for a band that goes below zero
                    low = np.maximum(low, 0.01 * means)
                axes.fill_between(
                    at, low, means + stds, color=look["color"], alpha=0.2, linewidth=0
                )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}" if of_length else "{x:g}")
        axes.set_ylabel(quantity)
        if logarithmic:
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
        trained = sorted({trained_length(row) or 0 for row in rows if of_length} - {0})
        for length in trained:
            axes.axvline(length, color=GREY, linestyle=(0, (4, 3)), linewidth=1, zorder=1)
        axes.set_xlabel(place)
        if trained:
            lengths = ", ".join(map(str, trained))
            axes.set_xlabel(f"{place}; dashed: training length {lengths}")
        text = textwrap.fill(setting(rows), LETTERS_OF_A_SETTING)
        axes.set_title(text, loc="left", fontsize=8, color=GREY)
        handles = sorted(last_values, key=lambda line: -last_values[line])
        for words, missing in (
            ("too far above to be drawn", groups.keys() - points_of),
            ("without a number", {label for label, points in points_of.items() if not points}),
        ):
            if missing:
                names = "; ".join(label for label in groups if label in missing)
                text = textwrap.fill(f"{words}: {names}", LETTERS)
                handles.append(Line2D([], [], linestyle="none", label=text))
        lines = "\n".join(line.get_label() for line in handles).split("\n")
        columns = 2 if max(map(len, lines)) < HALF else 1
        axes.legend(
            handles=handles,
            title=f"{quantity} at the right end",
            alignment="left",
            fontsize=9,
            loc="upper left",
            bbox_to_anchor=(0, 0),
            bbox_transform=axes.transAxes + ScaledTranslation(*BELOW, figure.dpi_scale_trans),
            ncols=columns,
            handlelength=3.5,
            frameon=False,
        )
        height += PANEL + LINE * math.ceil(len(lines) / columns)
    figure.set_size_inches(WIDTH, height)
    return figure


def how_to_read(texts: Mapping[str, Groups]) -> str:
    """The sentence below a heatmap: names what its cells have, a spread and hatches if any do."""
    words = "% of answer tokens right"
    labels = {label for groups in texts.values() for label in groups}
    cells = []
    for groups in texts.values():
        lengths = {row["length"] for rows in groups.values() for row in rows}
        for label, length in product(labels, lengths):
            cells.append([row for row in groups.get(label, ()) if row["length"] == length])
    if max(map(len, cells)) > 1:
        words += ", mean ± standard deviation over seeds"
    if not all(cells):
        words += "; hatched: not measured"
    return words


def draw_accuracy(texts: Mapping[str, Groups], title: str = "") -> Figure:
    """A heatmap of the percentage of answer tokens that are right, with its numbers.

    texts: for each task, by its heading, the rows of each line by its label

    A column is a length, ± is one standard deviation over seeds. With a title the figure is
    complete: a sentence below says how to read it.
    """
    labels = list(dict.fromkeys(label for groups in texts.values() for label in groups))
    shown = [textwrap.fill(label, LETTERS_OF_A_LABEL) for label in labels]
    across = min(len(texts), ACROSS)
    down = math.ceil(len(texts) / across)
    columns = heading_letters = 0
    with style():
        figure = Figure(layout=ConstrainedLayoutEngine(w_pad=0.08))
        below = how_to_read(texts) if title else ""
        figure.supxlabel(below, x=0.01, ha="left", fontsize=7, wrap=True)
        panels = figure.subplots(down, across, squeeze=False).ravel()
        for unused in panels[len(texts) :]:
            unused.set_axis_off()
        for number, (heading, groups) in enumerate(texts.items()):
            axes = panels[number]
            rows = [row for group in groups.values() for row in group]
            lengths = sorted({row["length"] for row in rows})
            columns = max(columns, len(lengths))
            for line, label in enumerate(labels):
                colours, spoken = ["none"] * len(lengths), []
                for column, length in enumerate(lengths):
                    of_seeds = [row for row in groups.get(label, ()) if row["length"] == length]
                    mean, std = mean_and_std([TOKENS_RIGHT.of(row) for row in of_seeds])
                    words, spread, ink = "", "", "black"
                    if of_seeds:
                        words = "n/a" if mean is None else f"{mean:.0f}"
                    if mean is not None:
                        colours[column] = to_hex(matplotlib.colormaps[SHADES](mean / 100))
                        ink = "white" if mean > DARK else "black"
                    if std is not None:
                        spread = f"±{std:.0f}"
                    spoken.append(f"{words or '-'}{spread} at {length}")
                    side = "right" if spread else "center"
                    for text, align, size in ((words, side, 7.5), (spread, "left", 5.5)):
                        drawn = axes.text(column, line, text, ha=align, fontsize=size, color=ink)
                        drawn.set(va="center_baseline", in_layout=False)
                at = range(len(lengths))
                name = f"{label}: {', '.join(spoken)}"
                axes.bar(at, 1, 1, line - 0.5, color=colours, edgecolor="white", label=name)
            ground = axes.axhspan(-0.5, len(labels) - 0.5, fill=False, linewidth=0, zorder=0)
            ground.set(hatch="/////", edgecolor="#D0D0D0")  # shows where cells are empty
            axes.set_xlim(-0.5, len(lengths) - 0.5)
            axes.set_ylim(len(labels) - 0.5, -0.5)
            axes.set_xticks(range(len(lengths)), starred(rows, lengths))
            axes.set_yticks(range(len(labels)), shown)
            axes.tick_params(length=0, labelleft=number % across == 0)
            axes.spines[:].set_visible(False)
            axes.set_xlabel("length (tokens), * in training")
            words = heading.removeprefix(TASK_PREFIX)
            if guess := GUESSES.get(rows[0].get("corpus") or ""):
                words = f"{words} (guessing: {guess} %)"
            heading_letters = max(heading_letters, len(words))
            axes.set_title(words, loc="left")
        letters = max(len(line) for label in shown for line in label.split("\n"))
        lines = max(label.count("\n") for label in shown) + 1
        panel = max(CELL * columns, LETTER_OF_A_HEADING * heading_letters)
        width = LETTER * letters + across * (panel + 0.25)
        width = max(width, min(WIDTH, LETTER_OF_A_TITLE * len(title)))
        title = textwrap.fill(title, int(width / LETTER_OF_A_TITLE))
        figure.suptitle(title, x=0.01, ha="left", fontsize=12)
        height = 0.5 + down * (max(0.19, 0.125 * lines) * len(labels) + 0.5)
        figure.set_size_inches(width, height)
    return figure


def style() -> AbstractContextManager[None]:
    """Sizes for print, and SVG whose text stays text."""
    return matplotlib.rc_context(SIZES | STABLE)


def write(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix; the same figure has the same bytes."""
    suffix = path.suffix.lower() or ".png"
    if suffix not in PICTURES:
        raise UserError(f"{path}: a plot is written as .png, .svg or .pdf - name the file so")
    metadata: dict[str, Any] = {"Creator": MARK}
    if suffix == ".svg":
        metadata["Date"] = None
    content = BytesIO()
    with style():
        figure.savefig(content, format=suffix[1:], dpi=200, metadata=metadata)
    write_output(path, content.getvalue(), MARK.encode())
