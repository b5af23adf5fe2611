"""Curves over length, step or position, accuracy as a heatmap, and the files of figures."""

import math
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.style
import numpy as np
import pandas as pd
import yaml
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from matplotlib.transforms import ScaledTranslation

from megatron.errors import UserError
from megatron.files import write_output
from megatron.protocols import TASK
from megatron.results.files import PICTURES
from megatron.results.labels import kinds, runs, sections
from megatron.results.row import Row, grouped, trained_length
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

GREY = "#666666"
WIDE = 4  # a logarithmic axis from this ratio of largest to smallest value on
MARK = "megatron/report"  # the creator of a picture, for the program that may replace it
# In inches: the width of a paper's text, a panel without its legend, a line of a legend.
WIDTH, PANEL, LINE = 5.5, 3.6, 0.17
LETTERS = 72  # of a line of a legend

OVER_SEEDS = "Each curve is a mean over seeds. A bar is one standard deviation to either side."
DARK = 60  # % from which a cell is so dark that its number is white
CELL, LETTER = (0.42, 0.17), 0.06  # inches of a cell, and of a letter of a label
BY_POSITION = (
    "Above 0 is worse. Each point is a mean from position p to about 1.4 p of the longest windows."
)

# --- Looks: colour and marker stand for the encoding in every figure ---

LOOKS: dict[str, list[str]] = yaml.safe_load(
    Path(__file__).with_name("looks.yml").read_text(encoding="utf-8")
)
COLOURS = sorted({colour for colour, _ in LOOKS.values()})
DASHES = ("-", "--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (8, 3)))


def looks(encodings: Sequence[str]) -> list[dict[str, Any]]:
    """Colour, marker and dashes of the curves of a figure, as arguments of matplotlib's plot.

    encodings: that of each curve. It gives marker and colour, grey for what looks.yml lacks;
    further curves of a colour have other dashes. Curves of one encoding have a colour each.
    """
    styles = []
    uses: Counter[str] = Counter()
    for number, encoding in enumerate(encodings):
        colour, marker = LOOKS.get(encoding, (GREY, "X"))
        if len({*encodings}) == 1 < len(encodings):
            colour = COLOURS[number % len(COLOURS)]
        dashes = DASHES[uses[colour] % len(DASHES)]
        uses[colour] += 1
        styles.append({"color": colour, "marker": marker, "linestyle": dashes})
    return styles


# --- Curves of rows ---

Groups = Mapping[str, Sequence[Row]]  # the rows of each curve, by its label


class Panel(NamedTuple):
    """Curves in one pair of axes.

    axis, quantity: what the level and the upright axis show
    groups: all rows by label, which give looks; curves: by label, as `curve` makes them
    joined: whether lines join the places of a curve; not where each place has its own text
    """

    axis: str
    quantity: str
    groups: Groups
    curves: Mapping[str, pd.DataFrame]
    joined: bool = True


def curve(points: Iterable[tuple[float, float | None]]) -> pd.DataFrame:
    """Mean and standard deviation over seeds by place; without places where a seed has no number.

    One seed has no deviation (nan).
    """
    frame = pd.DataFrame(points, columns=["place", "value"]).astype(float)
    places = frame.groupby("place")["value"]
    means = places.agg(lambda values: values.mean(skipna=False))
    return pd.DataFrame({"mean": means, "std": places.std()}).dropna(subset="mean")


def losses_by_position(rows: Sequence[Row]) -> pd.DataFrame:
    """The curve of the loss within the longest windows that have it, over half octaves."""
    measured = [row for row in rows if row.get("position_losses")]
    longest = max((row["length"] for row in measured), default=0)
    points = []
    for row in measured:
        if row["length"] == longest:
            edges, losses = row.get("position_edges", []), row.get("position_losses", [])
            points += zip(*half_octaves(edges, losses), strict=True)
    return curve(points)


# --- Figures ---


def plot_results(
    rows: Sequence[Row],
    path: Path,
    *,
    over_seeds: bool = False,
    over_training: bool = False,
) -> None:
    """Draw perplexity against length, or token accuracy, in a panel for each text and protocol.

    Of rows by position, the loss by position.

    over_seeds: a curve for each encoding instead of each run
    over_training: against the step, in a panel for each length
    """
    group = kinds if over_seeds else runs
    texts = {heading: group(members) for heading, members in sections(rows).items()}
    if over_training:
        figure = draw_over_training(rows, over_seeds=over_seeds)
    elif all(row.get("protocol") == TASK for row in rows):
        figure = draw_accuracy(texts, "Token accuracy beyond the training length")
    elif all(row.get("position_losses") for row in rows):
        figure = draw_by_position(*texts.values())
    else:
        figure = draw_perplexity(*texts.values(), title="Results beyond the training length")
    write(figure, path)


def by_key(axis: str, groups: Groups, key: str, without: Collection[str] = ()) -> Panel:
    """Perplexity by a key of rows, of a task token accuracy; without: labels to leave out."""
    rows = [row for group in groups.values() for row in group]
    quantity, *_ = quantities_of(rows)
    curves = {}
    for label in groups.keys() - without:
        curves[label] = curve((row[key], quantity.of(row)) for row in groups[label])
    protocols = {row.get("protocol") for row in rows}
    return Panel(axis, quantity.name, groups, curves, protocols.isdisjoint(OTHER_TEXT))


def draw_perplexity(*texts: Groups, without: Collection[str] = (), title: str = "") -> Figure:
    """Curves by length, in a panel for each text; without: labels to leave out."""
    axis = "evaluation length (tokens)"
    return draw([by_key(axis, groups, "length", without) for groups in texts], title)


def draw_accuracy(texts: Mapping[str, Groups], title: str = "") -> Figure:
    """A heatmap of the percentage of answer tokens that are right, for each task by its heading."""
    across = min(len(texts), 3)
    down = math.ceil(len(texts) / across)
    labels = [label for groups in texts.values() for label in groups]
    width = across * (LETTER * max(map(len, labels)) + 6 * CELL[0])
    height = down * (CELL[1] * max(map(len, texts.values())) + 0.7) + 0.4
    with style():
        figure = Figure(layout="constrained", figsize=(width, height))
        set_title(figure, title, width)
        panels = figure.subplots(down, across, squeeze=False).ravel()
        for unused in panels[len(texts) :]:
            unused.set_axis_off()
        for axes, (heading, groups) in zip(panels, texts.items(), strict=False):
            rows = [row for group in groups.values() for row in group]
            points = {}
            for label, group in groups.items():
                points[label] = curve((row["length"], TOKENS_RIGHT.of(row)) for row in group)
            means = pd.DataFrame({label: frame["mean"] for label, frame in points.items()}).T
            means = means.loc[means.mean(axis=1).sort_values(ascending=False).index]
            axes.imshow(means, cmap="Blues", vmin=0, vmax=100, aspect="auto")
            for (line, column), mean in np.ndenumerate(means.to_numpy()):
                if math.isnan(mean):
                    continue
                spread = points[means.index[line]]["std"].get(means.columns[column], 0)
                text = f"{mean:.0f}±{spread:.0f}" if spread > 2 else f"{mean:.0f}"
                colour = "white" if mean > DARK else "black"
                axes.text(column, line, text, ha="center", va="center", color=colour, fontsize=7)
            axes.set_xticks(range(means.shape[1]), starred(rows, means.columns.astype(int)))
            axes.set_yticks(range(len(means)), means.index)
            axes.tick_params(length=0, labelsize=7)
            axes.set_xlabel("length (tokens), * in training")
            axes.set_title(heading.removeprefix(TASK_PREFIX).partition(":")[0], fontsize=9)
    figure.set_label(
        "% of answer tokens right. ± is one standard deviation over seeds, where above 2."
    )
    return figure


def draw_over_training(rows: Sequence[Row], *, over_seeds: bool = False) -> Figure:
    """Curves of perplexity by training step, in a panel for each length."""
    panels: dict[str, dict[str, list[Row]]] = {}  # of each panel its curves' rows by label
    for members in sections(rows).values():
        # A stage changes other facts of a row, so a run is called by its last one.
        run_of = {}
        for run in grouped(members, ("config_hash",)):
            run_of[id(max(run, key=lambda row: row["step"]))] = run
        last_rows = [row for row in members if id(row) in run_of]
        labelled = kinds(last_rows) if over_seeds else runs(last_rows)
        for label, examples in labelled.items():
            measured = [row for example in examples for row in run_of[id(example)]]
            for row in sorted(measured, key=lambda row: row["length"]):
                axis = f"step, at {row['length']} tokens"
                panels.setdefault(axis, {}).setdefault(label, []).append(row)
    drawn = [by_key(axis, groups, "step") for axis, groups in panels.items()]
    return draw(drawn, "Results over training", by_step=True)


def draw_by_position(*texts: Groups, minus: str = "", without: Collection[str] = ()) -> Figure:
    """Curves of the loss by position, in a panel for each text; without: labels to leave out.

    minus: the label whose mean loss is subtracted; default: the first of each text
    """
    panels = []
    for groups in texts:
        subtracted = minus or next(iter(groups))
        reference = losses_by_position(groups[subtracted])["mean"]
        curves = {}
        for label in groups.keys() - without:
            points = losses_by_position(groups[label])
            points["mean"] -= reference
            curves[label] = points.dropna(subset="mean")
        quantity = f"loss minus that of {subtracted} (nats per token)"
        panels.append(Panel("position (tokens)", quantity, groups, curves))
    return draw(panels, "Loss by position", BY_POSITION)


def draw(
    panels: Sequence[Panel], title: str, caption: str = "", *, by_step: bool = False
) -> Figure:
    """Means over seeds with their spread, and legends in the order of the last values.

    by_step: places are steps, on a linear axis
    """
    height = 0.0
    with style():
        figure = Figure(layout="constrained")
        below = ScaledTranslation(-0.4, -0.4, figure.dpi_scale_trans)  # inches, whatever the height
        set_title(figure, title, WIDTH)
        upright = figure.subplots(len(panels), squeeze=False).flat
        for axes, panel in zip(upright, panels, strict=True):
            rows = [row for group in panel.groups.values() for row in group]
            encodings = [group[0]["pos_emb"] for group in panel.groups.values()]
            look_of = dict(zip(panel.groups, looks(encodings), strict=True))
            curves = {label: at for label, at in panel.curves.items() if not at.empty}
            means = pd.concat([pd.Series(dtype=float), *(at["mean"] for at in curves.values())])
            for label in sorted(curves, key=lambda label: -curves[label]["mean"].iloc[-1]):
                points = curves[label]
                mean = points["mean"]
                text = f"{label}: {cell(mean.iloc[-1])}"
                if points.index[-1] < means.index.max():
                    text = f"{text} at {points.index[-1]:g}"
                look = look_of[label] if panel.joined else look_of[label] | {"linestyle": "none"}
                every = math.ceil(len(points) / 8)  # about eight markers on a curve
                look |= {"label": textwrap.fill(text, LETTERS), "markevery": every}
                axes.errorbar(points.index, mean, points["std"], errorevery=every, **look)
            heading = f"{panel.quantity} at the right end"
            if left_out := [label for label in panel.groups if label not in curves]:
                heading = f"{heading}; not drawn: {'; '.join(left_out)}"

            lowest, highest = min(means, default=0), max(means, default=0)
            if panel.quantity == PERPLEXITY.name and highest > WIDE * lowest > 0:
                axes.set_yscale("log")
                if highest < 1000 * lowest:
                    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_major_formatter("{x:g}")
            axes.set(xlabel=panel.axis, ylabel=panel.quantity)
            if not by_step:
                axes.set_xscale("log", base=2)
                trained = sorted({trained_length(row) or 0 for row in rows} - {0})
                for length in trained:
                    axes.axvline(length, color=GREY, linestyle="dashed", linewidth=1, zorder=1)
                if trained:
                    lengths = ", ".join(map(str, trained))
                    axes.set_xlabel(f"{panel.axis}; dashed: training length {lengths}")
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.minorticks_off()
            axes.grid(axis="y", color="#E3E3E3", linewidth=0.8)
            axes.set_title(textwrap.fill(setting(rows), 90), fontsize=8, color=GREY)
            legend = axes.legend(
                handles=axes.containers,
                title=textwrap.fill(heading, LETTERS),
                alignment="left",
                loc="upper left",
                bbox_to_anchor=(0, 0),
                bbox_transform=axes.transAxes + below,
                handlelength=3.5,
            )
            texts = [legend.get_title(), *legend.get_texts()]
            lines = [line for text in texts for line in text.get_text().split("\n")]
            height += PANEL + LINE * len(lines)
        figure.set_size_inches(WIDTH, height)
    has_spread = any(points["std"].any() for panel in panels for points in panel.curves.values())
    figure.set_label(f"{caption} {OVER_SEEDS if has_spread else ''}".strip())
    return figure


def set_title(figure: Figure, title: str, width: float) -> None:
    """Write a title in lines of a width in inches."""
    text = textwrap.fill(title, int(12 * width))
    figure.suptitle(text, x=0.01, ha="left", fontsize=10)


def style() -> AbstractContextManager[None]:
    """Sizes for print, and SVG whose text stays text."""
    return matplotlib.style.context(Path(__file__).with_name("figures.mplstyle"))


def picture(figure: Figure, suffix: str) -> bytes:
    """The content of a file of a figure; the same figure has the same bytes."""
    metadata: dict[str, Any] = {"Creator": MARK}
    if suffix == ".svg":
        metadata["Date"] = None
    content = BytesIO()
    with style():
        figure.savefig(content, format=suffix[1:], dpi=200, metadata=metadata)
    return content.getvalue()


def write(figure: Figure, path: Path) -> None:
    """Write a figure as PNG, SVG or PDF, by the suffix."""
    suffix = path.suffix.lower() or ".png"
    if suffix not in PICTURES:
        raise UserError(f"{path}: a plot is written as .png, .svg or .pdf - name the file so")
    write_output(path, picture(figure, suffix), MARK.encode())
