"""Curves over length, step or position, accuracy as a heatmap, and the files of figures."""

import math
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.style
import numpy as np
import pandas as pd
import yaml
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from megatron.errors import UserError
from megatron.files import write_output
from megatron.protocols import TASK
from megatron.results.files import PICTURES
from megatron.results.labels import in_words, kinds, matching, runs, sections, select
from megatron.results.row import Row, encoding_of, trained_length
from megatron.results.statistics import half_octaves
from megatron.results.table import (
    OTHER_TEXT,
    PERPLEXITY,
    TOKENS_RIGHT,
    cell,
    quantities_of,
    setting,
    starred,
)
from megatron.splits import TASK_PREFIX

GREY, FAINT = "#666666", "#BBBBBB"
MARK = "megatron/report"  # the creator of a picture, for the program that may replace it
# In inches: a README's column, a panel, what a panel needs beneath its axes, a line of a name.
WIDTH, PANEL, BENEATH, LINE = 6.5, 3.5, 0.8, 0.165
LETTERS = 28  # of a line of a name
DPI = 200
CURVES = 7  # of a panel, which has their names at their ends
FAR = math.log(2)  # nats: a curve that rises this far above the lowest one may leave the axes
FIRST = 64  # the first position that is drawn: before it, few targets make much noise

OVER_SEEDS = "A band or a bar is one standard deviation over seeds to either side of their mean."
TASKS = "% of answer tokens right"
ORDERED = (
    "Lines are in the order of their means, where a missing number counts as 0; with several tasks"
    " a cell is the mean over all lengths beyond the training's. ± is one standard deviation over"
    " seeds, where above 2."
)
DARK = 60  # % from which a cell is so dark that its number is white
CELL, LETTER = (0.72, 0.24), 0.08  # inches of a cell, and of a letter of a label


class Design(NamedTuple):
    """What a user chose of a figure.

    size: width and height in inches; highlight: labels, all other curves are grey
    style: a file of matplotlib's settings
    """

    title: str = ""
    size: tuple[float, float] | None = None
    highlight: Sequence[str] = ()
    style: Path | None = None


AS_USUAL = Design()
# --- Looks: colour and marker stand for the encoding in every figure ---

LOOKS: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("looks.yml").read_text(encoding="utf-8")
)
COLOURS = sorted({colour for colour, _ in LOOKS.values()})
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)))


def looks(encodings: Sequence[str]) -> list[dict[str, Any]]:
    """Colour, marker and dashes of the curves of a figure, as arguments of matplotlib's plot.

    encodings: that of each curve. It gives marker and colour, grey for what looks.yml lacks;
    further curves of a look have other dashes. Curves of one encoding have a colour each.
    """
    styles = []
    uses: Counter[tuple[str, str]] = Counter()
    for number, encoding in enumerate(encodings):
        colour, marker = LOOKS.get(encoding, (GREY, "X"))
        if len({*encodings}) == 1 < len(encodings):
            colour = COLOURS[number % len(COLOURS)]
        dashes = DASHES[uses[colour, marker] % len(DASHES)]
        uses[colour, marker] += 1
        styles.append({"color": colour, "marker": marker, "linestyle": dashes})
    return styles


# --- Curves of rows ---

Groups = Mapping[str, Sequence[Row]]  # the rows of each curve, by its label


class Panel(NamedTuple):
    """Curves in one pair of axes.

    axis, quantity: what the level and the upright axis show
    groups: all rows by label, which give looks; curves: by label, as `curve` makes them
    heading: above the axes
    nats: from the quantity to nats, in which curves are near each other or far apart
    joined: whether lines join the places of a curve; not where each place has its own text
    shades: colours from light to dark, in place of those of encodings
    """

    axis: str
    quantity: str
    groups: Groups
    curves: Mapping[str, pd.DataFrame]
    heading: str = ""
    nats: Callable[[Any], Any] = np.log
    joined: bool = True
    shades: bool = False


def curve(points: Iterable[tuple[float, float | None]]) -> pd.DataFrame:
    """Mean and standard deviation over seeds by place; without places where a seed has no number.

    One seed has no deviation (nan).
    """
    frame = pd.DataFrame(points, columns=["place", "value"]).astype(float)
    places = frame.groupby("place")["value"]
    means = places.agg(lambda values: values.mean(skipna=False))
    return pd.DataFrame({"mean": means, "std": places.std()}).dropna(subset="mean")


def losses_by_position(row: Row) -> pd.Series:
    """The losses of a row's windows from position FIRST on, over half octaves."""
    middles, losses = half_octaves(row.get("position_edges", []), row.get("position_losses", []))
    return pd.Series(losses, middles).loc[FIRST:]


# --- Figures ---


def plot_results(
    rows: Sequence[Row],
    path: Path,
    *,
    over_seeds: bool = False,
    over_training: bool = False,
    against: str | None = None,
    design: Design = AS_USUAL,
) -> None:
    """Draw perplexity against length, or token accuracy, in a panel for each text and protocol.

    Of rows by position, perplexity by position.

    over_seeds: a curve for each encoding instead of each run
    over_training: against the step, in a panel for each length
    against: by position, the label whose loss is subtracted
    """
    group = kinds if over_seeds else runs
    texts = {heading: group(members) for heading, members in sections(rows).items()}
    if over_training:
        figure = draw_over_training(rows, over_seeds=over_seeds, design=design)
    elif all(row.get("protocol") == TASK for row in rows):
        figure = draw_accuracy(texts, design)
    else:
        panels = []
        for heading, groups in texts.items():
            panel = by_position(groups, against) or by_length(groups)
            panels.append(panel._replace(heading=in_words(heading) if len(texts) > 1 else ""))
        figure = draw(panels, design)
    write(figure, path, design)


def by_key(axis: str, groups: Groups, key: str, heading: str = "") -> Panel:
    """Perplexity by a key of rows, of a task token accuracy."""
    rows = [row for group in groups.values() for row in group]
    quantity, *_ = quantities_of(rows)
    curves = {}
    for label, group in groups.items():
        curves[label] = curve((row[key], quantity.of(row)) for row in group)
    nats = np.log if quantity is PERPLEXITY else np.zeros_like
    protocols = {row.get("protocol") for row in rows}
    joined = protocols.isdisjoint(OTHER_TEXT)
    return Panel(axis, quantity.name, groups, curves, heading, nats, joined)


def by_length(groups: Groups) -> Panel:
    """Perplexity by evaluation length."""
    return by_key("evaluation length (tokens)", groups, "length")


def by_position(groups: Groups, minus: str | None = None) -> Panel | None:
    """Perplexity by position in the longest windows of rows that have it, or None.

    minus: the label whose mean loss is subtracted; then the curves are losses
    """
    longest = max(row["length"] for group in groups.values() for row in group)
    losses_of = {}
    for label, group in groups.items():
        rows = [row for row in group if row["length"] == longest]
        losses_of[label] = [losses_by_position(row) for row in rows if row.get("position_losses")]
    if not any(losses_of.values()):
        return None
    subtracted: Any = 0
    axis, quantity, nats = "position (tokens)", PERPLEXITY.name, np.log
    if minus:
        minus = select(minus, groups)
        subtracted = pd.concat(losses_of[minus], axis=1).mean(axis=1)
        quantity, nats = f"loss minus that of {minus} (nats per token)", np.positive
    curves = {}
    for label, losses in losses_of.items():
        values = [series - subtracted if minus else np.exp(series) for series in losses]
        curves[label] = curve(pair for series in values for pair in series.items())
    return Panel(axis, quantity, groups, curves, nats=nats)


def draw_accuracy(texts: Mapping[str, Groups], design: Design = AS_USUAL) -> Figure:
    """A heatmap of the percentage of answer tokens that are right; texts: tasks by their headings.

    A column is a length; of several tasks a task, with the mean over lengths beyond the training's.
    """
    points = []
    for heading, groups in texts.items():
        task = heading.removeprefix(TASK_PREFIX).partition(":")[0].replace("_", " ")
        for label, group in groups.items():
            beyond = [row for row in group if row["length"] > (trained_length(row) or 0)]
            for row in (beyond or group) if len(texts) > 1 else group:
                column = task if len(texts) > 1 else row["length"]
                points.append((label, column, str(row.get("seed")), TOKENS_RIGHT.of(row)))
    frame = pd.DataFrame(points, columns=["label", "column", "seed", "right"])
    of_seeds = frame.astype({"right": float}).groupby(["label", "column", "seed"])["right"]
    cells = of_seeds.agg(lambda right: right.mean(skipna=False)).groupby(["label", "column"])
    means = cells.agg(lambda right: right.mean(skipna=False)).unstack()
    best_first = means.fillna(0).mean(axis=1).sort_values(ascending=False, kind="stable").index
    means, spreads = means.loc[best_first], cells.std().unstack().loc[best_first]
    size = (
        LETTER * max(map(len, means.index)) + CELL[0] * means.shape[1],
        CELL[1] * len(means) + 1.2,
    )
    with style(design):
        figure = Figure(layout="constrained", figsize=design.size or size)
        set_title(figure, design.title or TASKS, size[0])
        axes = figure.subplots()
        axes.imshow(means, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        for (line, column), mean in np.ndenumerate(means.to_numpy()):
            spread = spreads.iloc[line, column]
            text = f"{mean:.0f} ± {spread:.0f}" if spread > 2 else f"{mean:.0f}"
            colour = "white" if mean > DARK else "black"
            if not math.isnan(mean):
                axes.text(column, line, text, ha="center", va="center", color=colour)
        names = means.columns if len(texts) > 1 else starred(group, means.columns)
        axes.set_xticks(range(means.shape[1]), names)
        axes.set_yticks(range(len(means)), means.index)
        axes.tick_params(length=0)
        axes.set_xlabel("task" if len(texts) > 1 else "length (tokens), * in training")
    figure.set_label(f"{TASKS}. {ORDERED}")
    return figure


def draw_over_training(
    rows: Sequence[Row], *, over_seeds: bool = False, design: Design = AS_USUAL
) -> Figure:
    """Curves of perplexity by training step, in a panel for each length.

    The lengths of a single run or encoding are the curves of one panel.
    """
    panels: dict[str, dict[str, list[Row]]] = {}  # of each panel its curves' rows by label
    for members in sections(rows).values():
        # A stage changes other facts of a row, so a run is called by its last one.
        last_of = {row["config_hash"]: row for row in sorted(members, key=lambda row: row["step"])}
        group = kinds if over_seeds else runs
        labelled = group([*last_of.values()]).items()
        label_of = {row["config_hash"]: label for label, examples in labelled for row in examples}
        for row in sorted(members, key=lambda row: row["length"]):
            groups = panels.setdefault(f"at {row['length']} tokens", {})
            groups.setdefault(label_of[row["config_hash"]], []).append(row)
    labels = {label for groups in panels.values() for label in groups}
    if len(labels) == 1:
        (label,) = labels
        lengths = {heading: groups[label] for heading, groups in panels.items()}
        drawn = [by_key("step", lengths, "step", label)._replace(shades=True)]
    else:
        drawn = [by_key("step", groups, "step", heading) for heading, groups in panels.items()]
    return draw(drawn, design)


def draw(panels: Sequence[Panel], design: Design = AS_USUAL) -> Figure:
    """Means over seeds with their spread. Each curve has its name and last value at its end.

    Of more than CURVES curves, panels show the lowest first.
    """
    parts = []
    for panel in panels:
        measured = {label: points for label, points in panel.curves.items() if not points.empty}
        ranked = sorted(measured, key=lambda label: measured[label]["mean"].iloc[-1])
        count = max(1, math.ceil(len(ranked) / CURVES))
        for number, labels in enumerate(np.array_split(ranked, count)):
            curves = {label: measured[label] for label in labels}
            parts.append(panel._replace(curves=curves))
            if count > 1:
                ranks = f"{'the next' if number else 'the lowest'} {len(labels)}"
                parts[-1] = parts[-1]._replace(heading=f"{panel.heading}  {ranks}".strip())
    size = design.size or (WIDTH, PANEL * len(parts) + 0.4)
    captions = {}
    with style(design):
        figure = Figure(layout="constrained", figsize=size, dpi=DPI)
        what, by = (words.split(" (")[0] for words in (panels[0].quantity, panels[0].axis))
        set_title(figure, design.title or f"{what.capitalize()} by {by}", size[0])
        upright = figure.subplots(len(parts), squeeze=False).flat
        for axes, panel in zip(upright, parts, strict=True):
            rows = [row for group in panel.groups.values() for row in group]
            if panel.axis == "step":
                marked = {end for row in rows for end in row.get("stage_ends", [])}
                meaning = "ends of stages"
            else:
                axes.set_xscale("log", base=2)
                marked = {trained_length(row) or 0 for row in rows} - {0}
                meaning = f"training length {', '.join(map(str, sorted(marked)))}"
            for place in marked:
                axes.axvline(place, color=GREY, linestyle="dashed", linewidth=1, zorder=1)
            level = f"{panel.axis}; dashed: {meaning}" if marked else panel.axis
            axes.set(xlabel=level, ylabel=panel.quantity, title=panel.heading)
            draw_curves(axes, panel, design.highlight)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.minorticks_off()
            axes.grid(axis="y", color="#E3E3E3", linewidth=0.8)
            name_curves(axes, panel, size[1] / len(parts) - BENEATH)
            captions[f"{panel.quantity.capitalize()} on {setting(rows)}."] = None
        for _ in range(2):  # until the names have their room, which later drawings keep
            figure.draw_without_rendering()
        figure.set_layout_engine("none")
    figure.set_label(" ".join([*captions, OVER_SEEDS]))
    return figure


def draw_curves(axes: Axes, panel: Panel, highlight: Sequence[str]) -> None:
    """Lines with bands or points with bars.

    If most curves are near each other, the others leave the axes.
    """
    encodings = [encoding_of(group[0]) for group in panel.groups.values()]
    look_of = dict(zip(panel.groups, looks(encodings), strict=True))
    bright = {label for text in highlight for label in matching(text, panel.groups)}
    tops = {label: panel.nats(points["mean"].max()) for label, points in panel.curves.items()}
    near = [label for label in tops if tops[label] < min(tops.values()) + FAR]
    limits = {}
    for number, label in enumerate(sorted(tops, key=lambda label: label not in near), 1):
        points = panel.curves[label]
        look: dict[str, Any] = look_of[label] | {"label": label}
        if panel.shades:
            look["color"] = colormaps["Blues"](0.3 + 0.7 * number / len(tops))
        elif bright and label not in bright:
            look["color"] = FAINT
        band = {"color": look["color"], "linestyle": "none"}
        mean, std = points["mean"], points["std"]
        if panel.joined and len(points) > 1:
            axes.fill_between(points.index, mean - std, mean + std, alpha=0.12, **band)
        else:
            look["linestyle"] = "none"
            axes.errorbar(points.index, mean, std, **band)
        every = math.ceil(len(points) / 8)  # about eight markers on a curve
        axes.plot(points.index, mean, markevery=every, **look)
        if number == len(near) >= max(2, len(tops) / 2):
            limits["ylim"] = axes.get_ylim()
    axes.set(**limits)
    if len(near) < len(tops) and not limits and panel.nats is np.log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")


def name_curves(axes: Axes, panel: Panel, height: float) -> None:
    """Write the name and the last value of each curve at its end, apart from each other.

    A curve that leaves the axes has an arrow there. height: of the axes, about, in inches
    """
    encodings = {encoding_of(group[0]) for group in panel.groups.values()}
    last = max((points.index[-1] for points in panel.curves.values()), default=0)
    axes.autoscale_view()
    to_axes = axes.transData - axes.transAxes
    ends = []
    for line in [line for line in axes.lines if line.get_label() in panel.curves]:
        label = str(line.get_label())
        points = panel.curves[label]
        if len(encodings) == 1 < len(panel.groups):
            label = label.split(", ", 1)[-1]
        x, y = to_axes.transform(line.get_xydata()).T
        end = y[-1], x[-1]
        if y[-1] > 1:
            end = 1, np.interp(1, np.maximum.accumulate(y), x)
            arrow = {"marker": "^", "markersize": 9, "color": line.get_color()}
            axes.plot(end[1], 1, transform=axes.transAxes, clip_on=False, **arrow)
        at = f" at {points.index[-1]:g}" if points.index[-1] < last else ""
        text = f"{label}: {cell(points['mean'].iloc[-1])}{at}"
        ends.append((*end, textwrap.fill(text, LETTERS), line.get_color()))
    above = -1.0  # where the name beneath ends
    for end, place, text, colour in sorted(ends, key=lambda end: end[0]):
        half = (1 + text.count("\n")) * LINE / height / 2
        centre = max(end, above + half)
        above = centre + half
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "relpos": (0, 0.5)}
        where = dict.fromkeys(("xycoords", "textcoords"), "axes fraction")
        look = {"arrowprops": leader, "va": "center", "fontsize": "small"}
        axes.annotate(text, (place, end), (1.03, centre), **where, **look)


def set_title(figure: Figure, title: str, width: float) -> None:
    """Write a title in lines of a width in inches."""
    text = textwrap.fill(title, int(11 * width))
    figure.suptitle(text, x=0.01, ha="left")


def style(design: Design = AS_USUAL) -> AbstractContextManager[None]:
    """Sizes for print, SVG whose text stays text, and then the user's file."""
    own = Path(__file__).with_name("figures.mplstyle")
    return matplotlib.style.context([own, *filter(None, [design.style])])


def picture(figure: Figure, suffix: str, design: Design = AS_USUAL) -> bytes:
    """The content of a file of a figure; the same figure has the same bytes.

    Its metadata say what was measured and how.
    """
    about = "Subject" if suffix == ".pdf" else "Description"
    metadata: dict[str, Any] = {"Creator": MARK, about: str(figure.get_label())}
    if suffix == ".svg":
        metadata["Date"] = None
    content = BytesIO()
    with style(design):
        figure.savefig(content, format=suffix[1:], dpi=DPI, metadata=metadata)
    return content.getvalue()


def write(figure: Figure, path: Path, design: Design = AS_USUAL) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix."""
    suffix = path.suffix.lower() or ".png"
    if suffix not in PICTURES:
        raise UserError(f"{path}: a plot is written as .png, .svg or .pdf - name the file so")
    write_output(path, picture(figure, suffix, design), MARK.encode())
