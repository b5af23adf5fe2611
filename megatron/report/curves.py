"""Curves over length or position, token accuracy as a heatmap, their looks and files."""

import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import matplotlib
import matplotlib.style
import numpy as np
import yaml
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
from megatron.results.row import TASK, Row, encoding_of, grouped, trained_length
from megatron.results.statistics import half_octaves
from megatron.results.table import (
    GUESSES,
    OTHER_TEXT,
    TOKENS_RIGHT,
    cell,
    mean_and_std,
    setting,
    starred,
)
from megatron.splits import TASK_PREFIX

GREY = "#666666"
WIDE = 4  # a logarithmic axis from this ratio of largest to smallest value on
MARKERS_OF_A_CURVE = 8  # a curve of many points has a marker at about so many of them
STABLE, SIZES = (Path(__file__).with_name(f"{name}.mplstyle") for name in ("stable", "sizes"))
MARK = "megatron/report"  # the creator of a picture, for the program that may replace it
# In inches: the width of a paper's text, a panel without its legend, a line of a legend, and the
# corner of the legend from that of the axes.
WIDTH, PANEL, LINE, BELOW = 5.5, 3.8, 0.19, (-0.5, -0.45)
LETTERS = 64  # of a line of a legend
LETTERS_OF_A_SETTING = 76

# A heatmap: inches of a cell and of a letter of a label, letters of a line of a label, panels side
# by side. Its colours grow dark evenly, for any colour vision and for grey print.
CELL, LETTER, LETTERS_OF_A_LABEL, ACROSS = 0.42, 0.055, 30, 3
LETTER_OF_A_HEADING, LETTER_OF_A_TITLE = 0.075, 0.1
SHADES, DARK = "Blues", 72  # a number is white from this percentage on

NEAR = "Only the curves that stay below twice the highest value of the best one."
OVER_SEEDS = (
    "Each curve is a mean over seeds. A band or bar is one standard deviation over seeds to either"
    " side; one seed has none."
)
GAINS = (
    "Percentage of targets whose loss falls (above) or rises (below) by more than so many nats from"
    " the shortest to the longest window."
)
BY_POSITION = (
    "Loss by position in the longest windows, minus the mean loss of the encoding in the title:"
    " above 0 is worse. Each point is a mean from position p to about 1.4 p. Without curves whose"
    " perplexity reaches twice the highest value of the best one."
)

# --- Looks: colour and marker for the encoding, in every figure; dashes for further curves ---

LOOKS: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("looks.yml").read_text(encoding="utf-8")
)
MARKERS = "X*ph"  # for encodings that looks.yml lacks
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)))


def looks(encodings: Sequence[str]) -> list[dict[str, Any]]:
    """Colour, marker and dashes of the curves of a figure, as arguments of matplotlib's plot.

    encodings: that of each curve. It gives marker and colour: from looks.yml or, for others, from a
    hash of the name. The first curve of a colour has it; others have what is left. When all
    colours are used, they come again with other dashes.
    """
    palette = sorted({colour for colour, _ in LOOKS.values()})
    wishes = []
    for encoding in encodings:
        number = crc32(encoding.encode())
        by_hash = palette[number % len(palette)], MARKERS[number % len(MARKERS)]
        wishes.append(LOOKS.get(encoding, by_hash))
    colours = [colour for colour, _ in wishes]

    styles: list[dict[str, Any]] = [{}] * len(wishes)
    free = set(product(range(len(wishes)), palette))  # rounds of dashes
    for number in sorted(range(len(wishes)), key=lambda n: colours[n] in colours[:n]):
        choices = [(dashes, colour != colours[number], colour) for dashes, colour in free]
        dashes, _, colour = min(choices)
        free.remove((dashes, colour))
        line, marker = DASHES[dashes % len(DASHES)], wishes[number][1]
        styles[number] = {"color": colour, "marker": marker, "linestyle": line}
    return styles


# --- Curves of rows ---

Groups = Mapping[str, Sequence[Row]]  # the rows of each curve, by its label


class Panel(NamedTuple):
    """Curves in one pair of axes: all rows by label, which give looks, and curves by label.

    joined: whether lines join the places of a curve; not where each place has its own text
    """

    groups: Groups
    curves: Mapping[str, np.ndarray]
    axis: str
    joined: bool = True


def curve(points: Iterable[tuple[float, float | None]]) -> np.ndarray:
    """The mean over seeds by place: [3, places] of place, mean, standard deviation.

    A place at which a seed has no number is left out; one seed has no deviation (nan).
    """
    values: dict[float, list[float | None]] = {}
    for place, value in points:
        values.setdefault(place, []).append(value)
    lines = [(place, *mean_and_std(values[place])) for place in sorted(values)]
    columns = np.array(lines, dtype=float).reshape(-1, 3).T
    return columns[:, ~np.isnan(columns[1])]


def losses_by_position(rows: Sequence[Row]) -> np.ndarray:
    """The curve of the loss within the longest windows that have it, over half octaves."""
    measured = [row for row in rows if row.get("position_losses")]
    longest = max((row["length"] for row in measured), default=0)
    points = []
    for row in measured:
        if row["length"] == longest:
            edges, losses = row.get("position_edges", []), row.get("position_losses", [])
            points += zip(*half_octaves(edges, losses), strict=True)
    return curve(points)


# --- Figures: each has its caption as its label ---


def plot_results(
    rows: Sequence[Row],
    path: Path,
    *,
    over_seeds: bool = False,
    over_training: bool = False,
    title: str = "",
) -> None:
    """Draw perplexity against length, or token accuracy, in a panel for each text and protocol.

    over_seeds: a curve for each encoding instead of each run
    over_training: against the step, a curve for each length

    Raises UserError for rows of tasks beside others.
    """
    if over_training:
        write(draw_over_training(rows, over_seeds=over_seeds), path)
        return
    group = kinds if over_seeds else runs
    texts = {heading: group(members) for heading, members in sections(rows).items()}
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
    panels = []
    for groups in texts:
        curves = {}
        for label in groups.keys() - without:
            curves[label] = curve((row["length"], row["perplexity"]) for row in groups[label])
        protocols = {row.get("protocol") for rows in groups.values() for row in rows}
        joined = protocols.isdisjoint(OTHER_TEXT)
        panels.append(Panel(groups, curves, "evaluation length (tokens)", joined))
    return _draw(panels, "perplexity", title, NEAR if without else "")


def draw_over_training(rows: Sequence[Row], *, over_seeds: bool = False) -> Figure:
    """Curves of perplexity by training step.

    One run has a panel with a curve for each length. Several runs have a panel for each length with
    a curve for each run.

    rows: of many steps, as `extrapolation_interval` writes them
    over_seeds: a curve for each encoding and way to train it, which have runs of several seeds
    Raises UserError if a run has two rows of one step, length and protocol.
    """
    group = kinds if over_seeds else runs
    panels = []
    for members in sections(rows).values():
        by_run = grouped(members, ("config_hash",))
        for run in by_run:
            for repeated in grouped(run, ("step", "length")):
                if len(repeated) > 1:
                    step, length = repeated[0]["step"], repeated[0]["length"]
                    raise UserError(
                        f"{encoding_of(run[0])}: two rows of step {step} at {length}"
                        " - give the rows of one way to evaluate each run"
                    )
        # A stage changes other facts of a row, so a run is called by its last one.
        run_of = {id(max(run, key=lambda row: row["step"])): run for run in by_run}
        last_rows = [row for row in members if id(row) in run_of]
        labelled = group(last_rows)
        by_axis: dict[str, dict[str, list[Row]]] = {}  # of each panel its curves' rows by label
        for label, examples in labelled.items():
            measured = [row for example in examples for row in run_of[id(example)]]
            for row in sorted(measured, key=lambda row: row["length"]):
                length = f"{row['length']} tokens"
                if len(labelled) == 1:
                    axis, name = f"step of {label}", length
                else:
                    axis, name = f"step, at {length}", label
                by_axis.setdefault(axis, {}).setdefault(name, []).append(row)
        for axis, groups in by_axis.items():
            curves = {
                name: curve((row["step"], row["perplexity"]) for row in measured)
                for name, measured in groups.items()
            }
            panels.append(Panel(groups, curves, axis))
    return _draw(panels, "perplexity", "Perplexity over training", "", places="steps")


def draw_by_position(groups: Groups, minus: str, without: Collection[str] = ()) -> Figure:
    """Curves of the loss by position; minus: the label whose mean loss is subtracted."""
    places, losses, _ = losses_by_position(groups[minus])
    curves = {}
    for label in groups.keys() - without:
        points = losses_by_position(groups[label])
        _, common, subtracted = np.intersect1d(points[0], places, return_indices=True)
        curves[label] = points[:, common]
        curves[label][1] -= losses[subtracted]
    panel = Panel(groups, curves, "position (tokens)")
    quantity = "difference in loss (nats per token)"
    return _draw([panel], quantity, f"Loss minus that of {minus}", BY_POSITION)


def draw_gains(groups: Groups) -> Figure:
    """Percentages of targets that gain, and that lose, more than so many nats by far context."""
    steps = [2.0 ** (half / 2) for half in range(-10, 7)]
    panels = []
    for sign, axis in ((1, "gain of more than (nats)"), (-1, "loss of more than (nats)")):
        curves = {}
        for label, rows in groups.items():
            points = []
            for members in runs(rows).values():
                for gain in gains_of(members)[-1:]:
                    shares = [100 * float((sign * gain.gains > least).mean()) for least in steps]
                    points += [point for point in zip(steps, shares, strict=True) if point[1]]
            curves[label] = curve(points)
        panels.append(Panel(groups, curves, axis))
    title = "Targets that far context helps, and harms"
    return _draw(panels, "targets (%)", title, GAINS, places="nats")


@matplotlib.rc_context(fname=STABLE)
def _draw(
    panels: Sequence[Panel], quantity: str, title: str, caption: str, *, places: str = "tokens"
) -> Figure:
    """Means over seeds, bands of one standard deviation, and legends with the last values.

    A legend ends with the labels that have no curve.

    quantity: what the upright axes show
    places: tokens, of which the training length is one; nats; or steps, whose axis is linear

    Width and text sizes are the same in every figure. The height grows with the legends.
    """
    figure = Figure(layout=ConstrainedLayoutEngine(h_pad=0.06))
    set_title(figure, title, WIDTH)
    height = 0.0
    has_bands = False
    for axes, panel in zip(figure.subplots(len(panels), squeeze=False).flat, panels, strict=True):
        at_places, means, stds = np.hstack([np.empty((3, 0)), *panel.curves.values()])
        has_bands = has_bands or not np.isnan(stds).all()
        lowest, highest = means.min(initial=math.inf), means.max(initial=0)
        logarithmic = highest > WIDE * lowest > 0
        encodings = [rows[0]["pos_emb"] for rows in panel.groups.values()]
        if places == "steps":  # many curves are of one encoding
            encodings = [*panel.groups]
        empty, above = [], []
        for label, look in zip(panel.groups, looks(encodings), strict=True):
            if label not in panel.curves:
                above.append(label)
                continue
            at, mean, std = panel.curves[label]
            # An empty line that is not clipped lies at the corner; the axes would shrink for it.
            if not at.size:
                empty.append(label)
                continue
            label = f"{label}: {cell(mean[-1])}"
            if at[-1] < at_places.max():
                label = f"{label} at {at[-1]:g}"
            every = max(1, len(at) // MARKERS_OF_A_CURVE)
            text = textwrap.fill(label, LETTERS)
            if not panel.joined:
                look["linestyle"] = "none"
            axes.plot(at, mean, markevery=every, clip_on=False, label=text, **look)
            low = mean - std
            if logarithmic:  # there is no place for a band that goes below zero
                low = np.maximum(low, 0.01 * mean)
            if panel.joined:
                axes.fill_between(at, low, mean + std, color=look["color"], alpha=0.2, linewidth=0)
            else:
                axes.errorbar(at, mean, [mean - low, std], ecolor=look["color"], fmt="none")
        handles = sorted(axes.lines, key=lambda line: -line.get_ydata()[-1])
        for words, labels in (("too far above to be drawn", above), ("without a number", empty)):
            if labels:
                text = textwrap.fill(f"{words}: {'; '.join(labels)}", LETTERS)
                handles.append(Line2D([], [], linestyle="none", label=text))

        rows = [row for group in panel.groups.values() for row in group]
        axes.set(xlabel=panel.axis, ylabel=quantity)
        if places != "steps":
            axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}" if places == "nats" else "{x:.0f}")
        if logarithmic:
            axes.set(ylabel=f"{quantity}, log scale", yscale="log")
            few_powers = highest < 100 * lowest  # then 2 and 5 help the eye
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few_powers else (1,)))
            axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
        axes.grid(axis="y", color="#E3E3E3", linewidth=0.8)
        axes.set_axisbelow(True)
        trained = sorted({trained_length(row) or 0 for row in rows if places == "tokens"} - {0})
        if trained:
            lengths = ", ".join(map(str, trained))
            axes.set_xlabel(f"{panel.axis}; dashed: training length {lengths}")
        for length in trained:
            axes.axvline(length, color=GREY, linestyle=(0, (4, 3)), linewidth=1, zorder=1)
        axes.set_title(textwrap.fill(setting(rows), LETTERS_OF_A_SETTING), fontsize=8, color=GREY)
        lines = "\n".join(str(handle.get_label()) for handle in handles).splitlines()
        axes.legend(
            handles=handles,
            title=f"{quantity} at the right end",
            alignment="left",
            fontsize=9,
            loc="upper left",
            bbox_to_anchor=(0, 0),
            bbox_transform=axes.transAxes + ScaledTranslation(*BELOW, figure.dpi_scale_trans),
            handlelength=3.5,
        )
        height += PANEL + LINE * len(lines)
    figure.set_size_inches(WIDTH, height)
    figure.set_label(f"{caption} {OVER_SEEDS}".strip() if has_bands else caption)
    return figure


def draw_accuracy(texts: Mapping[str, Groups], title: str = "") -> Figure:
    """A heatmap of the percentage of answer tokens that are right, with its numbers.

    texts: for each task, by its heading, the rows of each line by its label

    A column is a length, ± is one standard deviation over seeds. With a title the figure is
    complete: its caption stands below.
    """
    labels = list(dict.fromkeys(label for groups in texts.values() for label in groups))
    shown = [textwrap.fill(label, LETTERS_OF_A_LABEL) for label in labels]
    across = min(len(texts), ACROSS)
    down = math.ceil(len(texts) / across)
    counts: set[int] = set()  # of rows of a cell
    panel_width = 1.7  # inches, of the name of the axis
    with style():
        figure = Figure(layout=ConstrainedLayoutEngine(w_pad=0.08))
        panels = figure.subplots(down, across, squeeze=False).ravel()
        for unused in panels[len(texts) :]:
            unused.set_axis_off()
        for number, (axes, heading) in enumerate(zip(panels, texts, strict=False)):
            groups = texts[heading]
            rows = [row for group in groups.values() for row in group]
            lengths = sorted({row["length"] for row in rows})
            means = np.full((len(labels), len(lengths)), np.nan)
            lines = {label: [] for label in labels}  # as they are spoken
            for (line, label), (column, length) in product(enumerate(labels), enumerate(lengths)):
                measured = [row for row in groups.get(label, ()) if row["length"] == length]
                counts.add(len(measured))
                mean, std = mean_and_std([TOKENS_RIGHT.of(row) for row in measured])
                means[line, column] = mean
                words = "n/a" if measured else ""
                if mean is not None:
                    words = f"{mean:.0f}" if std is None else f"{mean:.0f}±{std:.0f}"
                lines[label].append(f"{words or '-'} at {length}")
                text = axes.text(column + 0.5, line + 0.5, words, ha="center", va="center_baseline")
                text.set(color="white" if (mean or 0) > DARK else "black", in_layout=False)
            axes.pcolormesh(means, cmap=SHADES, vmin=0, vmax=100, edgecolors="white")
            axes.set_label("; ".join(f"{label}: {', '.join(lines[label])}" for label in labels))
            axes.patch.set(hatch="/////", edgecolor="#D0D0D0")  # shows where cells are empty
            axes.invert_yaxis()
            axes.set_xticks(np.arange(len(lengths)) + 0.5, starred(rows, lengths))
            axes.set_yticks(np.arange(len(labels)) + 0.5, shown)
            axes.tick_params(length=0, labelleft=number % across == 0)
            axes.spines[:].set_visible(False)
            axes.set_xlabel("length (tokens), * in training")
            words = heading.removeprefix(TASK_PREFIX)
            if guess := GUESSES.get(rows[0].get("corpus") or ""):
                words = f"{words} (guessing: {guess} %)"
            axes.set_title(words)
            panel_width = max(panel_width, CELL * len(lengths), LETTER_OF_A_HEADING * len(words))

        caption = "% of answer tokens right"
        if max(counts) > 1:
            caption += ", mean ± standard deviation over seeds"
        if 0 in counts:
            caption += "; hatched: not measured"
        figure.set_label(caption)
        if title:
            figure.supxlabel(caption, x=0.01, ha="left", fontsize=7, wrap=True)
        lines_of_labels = [label.split("\n") for label in shown]
        letters = max(len(line) for lines in lines_of_labels for line in lines)
        width = LETTER * letters + across * (panel_width + 0.25)
        width = max(width, min(WIDTH, LETTER_OF_A_TITLE * len(title)))
        set_title(figure, title, width)
        line_height = max(0.19, 0.125 * max(map(len, lines_of_labels)))
        figure.set_size_inches(width, 0.5 + down * (line_height * len(labels) + 0.5))
    return figure


def set_title(figure: Figure, title: str, width: float, size: int = 12) -> None:
    """Write a title in lines of a width; matplotlib's own wrapping reads formulas in it."""
    text = textwrap.fill(title, int(120 * width / size))
    figure.suptitle(text, x=0.01, ha="left", fontsize=size)


def style() -> AbstractContextManager[None]:
    """Sizes for print, and SVG whose text stays text."""
    return matplotlib.style.context([STABLE, SIZES])


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
