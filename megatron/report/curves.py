"""Curves over length, step or position, accuracy as a heatmap, and the files of figures."""

import math
import textwrap
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
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator

from megatron.errors import UserError
from megatron.files import write_output
from megatron.protocols import TASK
from megatron.results.files import PICTURES
from megatron.results.labels import in_words, kinds, matching, runs, sections, select
from megatron.results.row import Row, encoding_of, grouped, trained_length
from megatron.results.statistics import half_octaves
from megatron.results.table import (
    OTHER_TEXT,
    PERPLEXITY,
    TOKENS_RIGHT,
    cell,
    mean_and_std,
    setting,
    starred,
)
from megatron.splits import TASK_PREFIX

GREY, FAINT = "#666666", "#BBBBBB"
MARK = "megatron/report"  # the creator of a picture, for the program that may replace it
# In inches: a README's column, a panel, what a panel needs beneath its axes, a line of a name.
WIDTH, PANEL, BENEATH, LINE = 6.5, 3.5, 0.8, 0.165
LETTERS = 28  # of a line of a name
CURVES = 7  # of a panel, which has their names at their ends
FAR = 2  # a perplexity that rises this many times above the lowest curve may leave the axes
FIRST = 64  # the first position that is drawn: before it, few targets make much noise

OVER_SEEDS = "A band or a bar is one standard deviation over seeds to either side of their mean."
TASKS = "% of answer tokens right"
ORDERED = (
    "Lines are in the order of their means, where a missing number counts as 0; with several tasks"
    " a cell is the mean over all lengths beyond the training's. ± is one standard deviation over"
    " seeds, where above 2."
)
DARK = 60  # % from which a cell is so dark that its number is white
CELL, HEIGHT, LETTER = 0.72, 0.24, 0.08  # inches of a cell's sides, and of a letter of a label


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
    used = []
    for number, encoding in enumerate(encodings):
        colour, marker = LOOKS.get(encoding, (GREY, "X"))
        if len({*encodings}) == 1 < len(encodings):
            colour = COLOURS[number % len(COLOURS)]
        dashes = DASHES[used.count((colour, marker)) % len(DASHES)]
        used.append((colour, marker))
        styles.append({"color": colour, "marker": marker, "linestyle": dashes})
    return styles


# --- Curves of rows ---

Groups = Mapping[str, Sequence[Row]]  # the rows of each curve, by its label


class Panel(NamedTuple):
    """Curves in one pair of axes.

    axis, quantity: what the level and the upright axis show
    groups: all rows by label, which give looks
    means, stds: over seeds, with a line for each place and a column for each label
    heading: above the axes
    joined: whether lines join the places of a curve; not where each place has its own text
    shades: colours from light to dark, in place of those of encodings
    """

    axis: str
    quantity: str
    groups: Groups
    means: pd.DataFrame
    stds: pd.DataFrame
    heading: str = ""
    joined: bool = True
    shades: bool = False


def mean_and_spread(points: Iterable[tuple]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Means and standard deviations of (label, place, value), by place and label.

    A mean is nan where a seed has no number, the deviation of one seed is nan.
    """
    frame = pd.DataFrame(points, columns=["label", "place", "value"]).astype({"value": float})
    seeds: Any = frame.groupby(["place", "label"])["value"]
    means = seeds.agg(lambda values: values.mean(skipna=False))
    return means.unstack(), seeds.std().unstack()


def by_key(axis: str, groups: Groups, key: str) -> Panel:
    """Perplexity by a key of rows, of a task token accuracy."""
    protocol = next(iter(groups.values()))[0].get("protocol")
    quantity = TOKENS_RIGHT if protocol == TASK else PERPLEXITY
    points = []
    for label, group in groups.items():
        points += [(label, row[key], quantity.of(row)) for row in group]
    frames = mean_and_spread(points)
    return Panel(axis, quantity.name, groups, *frames, joined=protocol not in OTHER_TEXT)


def by_length(groups: Groups) -> Panel:
    """Perplexity by evaluation length."""
    return by_key("evaluation length (tokens)", groups, "length")


def by_position(groups: Groups, minus: str | None = None) -> Panel | None:
    """Perplexity by position in the longest windows of rows that have it, or None.

    minus: the label whose mean loss is subtracted; then the curves are losses
    """
    longest = max(row["length"] for group in groups.values() for row in group)
    points = []
    for label, group in groups.items():
        for row in group:
            losses = row.get("position_losses")
            if losses and row["length"] == longest:
                middles, means = half_octaves(row.get("position_edges", []), losses)
                values = means if minus else np.exp(means)
                points += [(label, *point) for point in zip(middles, values, strict=True)]
    if not points:
        return None
    means, stds = mean_and_spread(points)
    quantity = PERPLEXITY.name
    if minus:
        reference = select(minus, groups)
        means = means.sub(means[reference], axis=0)
        quantity = f"loss minus that of {reference} (nats per token)"
    return Panel("position (tokens)", quantity, groups, means.loc[FIRST:], stds.loc[FIRST:])


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
        figure = draw_over_training(rows, group, design)
    elif all(row.get("protocol") == TASK for row in rows):
        figure = draw_accuracy(texts, design)
    else:
        panels = []
        for heading, groups in texts.items():
            panel = by_position(groups, against) or by_length(groups)
            panels.append(panel._replace(heading=in_words(heading) if len(texts) > 1 else ""))
        figure = draw(panels, design)
    write(figure, path, design)


def draw_accuracy(texts: Mapping[str, Groups], design: Design = AS_USUAL) -> Figure:
    """A heatmap of the percentage of answer tokens that are right; texts: tasks by their headings.

    A column is a length; of several tasks a task, with the mean over lengths beyond the training's.
    """
    several = len(texts) > 1
    keys = ("seed",) if several else ("seed", "length")
    points = []
    for heading, groups in texts.items():
        task = heading.removeprefix(TASK_PREFIX).partition(":")[0].replace("_", " ")
        for label, group in groups.items():
            beyond = [row for row in group if row["length"] > (trained_length(row) or 0)]
            for rows in grouped((several and beyond) or group, keys):
                right, _ = mean_and_std([TOKENS_RIGHT.of(row) for row in rows])
                points.append((label, task if several else rows[0]["length"], right))
    means, stds = (frame.T for frame in mean_and_spread(points))
    order = means.fillna(0).mean(axis=1).sort_values(ascending=False, kind="stable").index
    means, stds = means.loc[order], stds.loc[order]
    lines, columns = means.shape
    width = LETTER * max(map(len, order)) + CELL * columns
    with style(design):
        size = design.size or (width, HEIGHT * lines + 1.2)
        figure = titled_figure(size, design.title or TASKS)
        axes = figure.subplots()
        axes.imshow(means, cmap="Blues", vmin=0, vmax=100, aspect="auto")
        axes.grid(visible=False)
        for (line, column), mean in np.ndenumerate(means):
            std = stds.iloc[line, column]
            text = f"{mean:.0f} ± {std:.0f}" if std > 2 else f"{mean:.0f}"
            colour = "white" if mean > DARK else "black"
            if not math.isnan(mean):
                axes.text(column, line, text, ha="center", va="center", color=colour)
        names = means.columns if several else starred(group, means.columns)
        axes.set_xticks(range(columns), names)
        axes.set_yticks(range(lines), order)
        axes.tick_params(length=0)
        axes.set_xlabel("task" if several else "length (tokens), * in training")
    figure.set_label(f"{TASKS}. {ORDERED}")
    return figure


def draw_over_training(
    rows: Sequence[Row],
    group: Callable[[Sequence[Row]], Groups] = runs,
    design: Design = AS_USUAL,
) -> Figure:
    """Curves of perplexity by training step, in a panel for each length.

    group: gives the rows of each curve by its label, when called with the last row of each run

    The lengths of a single run or encoding are the curves of one panel.
    """
    panels: dict[str, dict[str, list[Row]]] = {}  # of each panel its curves' rows by label
    for members in sections(rows).values():
        ordered = sorted(members, key=lambda row: (row["length"], row["step"]))
        # A stage changes other facts of a row, so a run is called by its last one.
        last_of = {row["config_hash"]: row for row in ordered}
        labelled = group([*last_of.values()]).items()
        label_of = {row["config_hash"]: label for label, examples in labelled for row in examples}
        for row in ordered:
            groups = panels.setdefault(f"at {row['length']} tokens", {})
            groups.setdefault(label_of[row["config_hash"]], []).append(row)
    labels = set().union(*panels.values())
    if len(labels) == 1:
        (label,) = labels
        panels = {label: {heading: groups[label] for heading, groups in panels.items()}}
    drawn = []
    for heading, groups in panels.items():
        panel = by_key("step", groups, "step")
        drawn.append(panel._replace(heading=heading, shades=len(labels) == 1))
    return draw(drawn, design)


def draw(panels: Sequence[Panel], design: Design = AS_USUAL) -> Figure:
    """Means over seeds with their spread. Each curve has its name and last value at its end.

    Of more than CURVES curves, panels show the lowest first.
    """
    parts = []
    for panel in panels:
        ranked = panel.means.ffill().iloc[-1].dropna().sort_values().index  # by the last values
        count = max(1, math.ceil(len(ranked) / CURVES))
        for number, labels in enumerate(np.array_split(ranked, count)):
            heading = panel.heading
            if count > 1:
                heading += f"  {'the next' if number else 'the lowest'} {len(labels)}"
            parts.append(panel._replace(means=panel.means[labels], heading=heading.strip()))
    size = design.size or (WIDTH, PANEL * len(parts) + 0.4)
    captions = {}
    with style(design):
        figure = titled_figure(size, design.title)
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
            lines = draw_curves(axes, panel, design.highlight)
            set_limits(axes, panel)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.minorticks_off()
            name_curves(axes, lines, size[1] / len(parts) - BENEATH)
            captions[f"{panel.quantity.capitalize()} on {setting(rows)}."] = None
    figure.set_label(" ".join([*captions, OVER_SEEDS]))
    return figure


def draw_curves(axes: Axes, panel: Panel, highlight: Sequence[str]) -> dict[str, Line2D]:
    """Lines with bands, or points with bars; returns them by the names to write at their ends."""
    encodings = [encoding_of(group[0]) for group in panel.groups.values()]
    bright = {label for text in highlight for label in matching(text, panel.groups)}
    styles = looks(encodings)
    if panel.shades:
        for look, shade in zip(styles, np.linspace(0.4, 1, len(styles)), strict=True):
            look["color"] = colormaps["Blues"](shade)
    look_of = dict(zip(panel.groups, styles, strict=True))
    lines = {}
    for label in map(str, panel.means):
        mean = panel.means[label].dropna()
        places, std = mean.index, panel.stds[label][mean.index]
        look = look_of[label]
        if bright and label not in bright:
            look["color"] = FAINT
        colour = look["color"]
        if panel.joined and len(mean) > 1:
            axes.fill_between(places, mean - std, mean + std, color=colour, alpha=0.12, linewidth=0)
        else:
            look["linestyle"] = "none"
            axes.errorbar(places, mean, std, fmt="none", ecolor=colour)
        # About eight markers on a curve.
        (line,) = axes.plot(places, mean, label=label, markevery=math.ceil(len(mean) / 8), **look)
        name = label.split(", ", 1)[-1] if len({*encodings}) == 1 else label
        at = f" at {places[-1]:g}" if places[-1] < panel.means.index[-1] else ""
        lines[textwrap.fill(f"{name}: {cell(mean.iloc[-1])}{at}", LETTERS)] = line
    return lines


def set_limits(axes: Axes, panel: Panel) -> None:
    """If most perplexities are near each other, the others leave the axes."""
    tops = panel.means.max()
    near = tops[tops < FAR * tops.min()]
    if panel.quantity != PERPLEXITY.name or len(near) == len(tops):
        return
    if len(near) >= max(2, len(tops) / 2):
        axes.set_ylim(0.95 * panel.means.min().min(), 1.05 * near.max())
    else:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")


def name_curves(axes: Axes, lines: Mapping[str, Line2D], height: float) -> None:
    """Write names at the ends of lines, apart from each other.

    lines: from the lowest end to the highest; one that leaves the axes has an arrow there
    height: of the axes, about, in inches
    """
    axes.autoscale_view()
    to_axes = axes.transData - axes.transAxes
    above = -1.0  # where the name beneath ends
    for name, line in lines.items():
        x, y = to_axes.transform(line.get_xydata()).T
        colour = line.get_color()
        end = x[-1], y[-1]
        if y[-1] > 1:
            end = np.interp(1, np.maximum.accumulate(y), x), 1
            where = axes.transAxes
            axes.plot(*end, "^", color=colour, markersize=9, transform=where, clip_on=False)
        half = (1 + name.count("\n")) * LINE / height / 2
        centre = max(end[1], above + half)
        above = centre + half
        axes.annotate(
            name,
            end,
            (1.03, centre),
            xycoords="axes fraction",
            va="center",
            fontsize="small",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "relpos": (0, 0.5)},
        )


def titled_figure(size: tuple[float, float], title: str) -> Figure:
    """A figure of these inches, with a title in lines that are as wide."""
    figure = Figure(layout="constrained", figsize=size)
    letters = int(11 * figure.get_figwidth())
    figure.suptitle(textwrap.fill(title, letters), x=0.01, ha="left")
    return figure


def style(design: Design = AS_USUAL) -> AbstractContextManager[None]:
    """Sizes for print, SVG whose text stays text, and then the user's file."""
    own = Path(__file__).with_name("figures.mplstyle")
    return matplotlib.style.context([own, design.style or {}])


def picture(figure: Figure, suffix: str, design: Design = AS_USUAL) -> bytes:
    """The content of a file of a figure; the same figure has the same bytes.

    Its metadata say what was measured and how.
    """
    about = "Subject" if suffix == ".pdf" else "Description"
    metadata: dict[str, Any] = {"Creator": MARK, about: figure.get_label()}
    if suffix == ".svg":
        metadata["Date"] = None
    content = BytesIO()
    with style(design):
        figure.savefig(content, format=suffix[1:], metadata=metadata)
    return content.getvalue()


def write(figure: Figure, path: Path, design: Design = AS_USUAL) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix."""
    suffix = path.suffix.lower() or ".png"
    if suffix not in PICTURES:
        raise UserError(f"{path}: a plot is written as .png, .svg or .pdf - name the file so")
    write_output(path, picture(figure, suffix, design), MARK.encode())
