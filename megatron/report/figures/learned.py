"""What a checkpoint has learned of its encoding: each number by head, and over training."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from megatron.errors import UserError
from megatron.report.figures.positions import colours, head_bar, style
from megatron.results.log import training_log

LAYER = re.compile(r"layer(\d+)\.(.*)")
COLUMNS = 3
GRID = "#E8E8E8"
AVERAGED = " (mean over rows)"


class Table(NamedTuple):
    """The values of one learned number: [rows, heads], and what the rows are: "row" or "layer".

    A number that is not learned by head has its entries in the place of heads.
    """

    values: Tensor
    rows: str


class Trace(NamedTuple):
    """A learned number over training: the steps, and its values at each."""

    steps: list[int]
    values: list[Tensor]


def draw_learned(learned: Mapping[str, Tensor], heads: int, title: str) -> Figure:
    """One panel for each learned number: a dot for each head, or a map of rows by head."""
    tables = by_name(learned, heads)
    layers = layers_by_name(learned)
    with style():
        figure, places = _grid(len(tables), title)
        for axes, (name, table) in zip(places, tables.items(), strict=False):
            rows, columns = table.values.shape
            by_head = columns == heads
            axes.set_title(name, loc="left")
            if rows == 1:
                _dots(axes, table.values[0], by_head=by_head)
            else:
                numbers = layers[name.removesuffix(AVERAGED)] if table.rows == "layer" else []
                _map(figure, axes, table, numbers)
            axes.set_xlabel("head" if by_head else "entry")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    return figure


def _dots(axes: Axes, values: Tensor, *, by_head: bool) -> None:
    count = len(values)
    palette = colours(count)
    inks = [palette(head) for head in range(count)] if by_head else [colours(2)(0)] * count
    axes.scatter(range(count), values, c=inks, s=16, zorder=3)
    axes.set_xlim(-0.5, count - 0.5)
    axes.set_ylabel("value")
    axes.grid(axis="y", color=GRID, linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _map(figure: Figure, axes: Axes, table: Table, layers: Sequence[int]) -> None:
    """layers: the number of each row's layer; empty where rows are no layers."""
    image = axes.imshow(
        table.values.numpy(), aspect="auto", cmap="viridis", interpolation="nearest", origin="lower"
    )
    figure.colorbar(image, ax=axes, pad=0.02, label="value")
    axes.set_ylabel(table.rows)
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    numbers = dict(enumerate(layers))
    if numbers:
        axes.yaxis.set_major_formatter(lambda row, _: str(numbers.get(round(row), "")))


def by_name(learned: Mapping[str, Tensor], heads: int) -> dict[str, Table]:
    """Learned numbers by their name without the layer.

    Where each layer has its own, layers are the rows; of several rows of a layer it is the mean.
    """
    tables_of: dict[str, list[Tensor]] = {}
    for key, value in learned.items():
        by_head = value.dim() > 0 and value.shape[-1] == heads
        shape = (-1, heads) if by_head else (1, -1)
        table = value.reshape(shape).float()
        _, name = _layer_and_name(key)
        tables_of.setdefault(name, []).append(table)
    found = {}
    for name, tables in tables_of.items():
        first = tables[0]
        if len(tables) == 1:
            found[name] = Table(first, "row")
            continue
        means = [table.mean(dim=0) for table in tables]
        averaged = f"{name}{AVERAGED}" if len(first) > 1 else name
        found[averaged] = Table(torch.stack(means), "layer")
    return found


def layers_by_name(learned: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The layers that have a learned number, by its name without the layer."""
    found: dict[str, list[int]] = {}
    for key in learned:
        layer, name = _layer_and_name(key)
        found.setdefault(name, []).append(layer)
    return found


def _layer_and_name(key: str) -> tuple[int, str]:
    """The layer of a learned number, 0 where all share it, and its name without the layer."""
    match = LAYER.fullmatch(key)
    return (int(match[1]), match[2]) if match else (0, key)


def trajectory(folder: Path, learned: Mapping[str, Tensor]) -> dict[str, Trace]:
    """Each learned number over training, from metrics.jsonl, in the shape that it has in `learned`.

    Numbers too large for the file are not in it. UserError where there is no such file.
    """
    path = folder / "metrics.jsonl"
    try:
        records = training_log(path)
    except (OSError, ValueError) as fault:
        raise UserError(
            f"{path}: cannot be read ({fault}); training writes it beside its checkpoints"
        ) from None
    found: dict[str, Trace] = {}
    for record in records:
        for name, values in record.get("position", {}).items():
            if name in learned and len(values) == learned[name].numel():
                trace = found.setdefault(name, Trace([], []))
                trace.steps.append(record["step"])
                trace.values.append(torch.tensor(values).view_as(learned[name]))
    return found


def draw_trajectory(found: Mapping[str, Trace], heads: int, title: str) -> Figure:
    """One panel for each learned number over the steps.

    It has a line for each head or layer, or the median and range of all entries.
    """
    layers_of: dict[str, list[Trace]] = {}
    for key, trace in found.items():
        layers_of.setdefault(_layer_and_name(key)[1], []).append(trace)
    with style():
        figure, places = _grid(len(layers_of), title)
        panels_of: dict[tuple[str, int], list[Axes]] = {}  # by what their colours number
        for axes, (name, layers) in zip(places, layers_of.items(), strict=False):
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color=GRID, linewidth=0.5)
            values = torch.stack(layers[0].values)  # [steps, ...]
            by_head = values.dim() > 1 and values.shape[-1] == heads
            if len(layers) > 1:
                _layers_over_steps(axes, layers, name)
                panels_of.setdefault(("layer", len(layers)), []).append(axes)
            elif by_head:
                _heads_over_steps(axes, layers[0].steps, values, name)
                panels_of.setdefault(("head", heads), []).append(axes)
            else:
                _range_over_steps(axes, layers[0].steps, values, name)
        for (kind, count), panels in panels_of.items():
            head_bar(figure, panels, count, kind)
    return figure


def _layers_over_steps(axes: Axes, layers: Sequence[Trace], name: str) -> None:
    palette = colours(len(layers))
    for layer, trace in enumerate(layers):
        means = torch.stack(trace.values).flatten(1).mean(dim=1)
        axes.plot(trace.steps, means, color=palette(layer), linewidth=1.1)
    axes.set_title(f"{name} (mean over heads)", loc="left")


def _heads_over_steps(axes: Axes, steps: Sequence[int], values: Tensor, name: str) -> None:
    heads = values.shape[-1]
    palette = colours(heads)
    by_head = values.reshape(len(steps), -1, heads).mean(dim=1)
    for head in range(heads):
        axes.plot(steps, by_head[:, head], color=palette(head), linewidth=1.1)
    axes.set_title(f"{name} (mean over rows)" if values.dim() > 2 else name, loc="left")


def _range_over_steps(axes: Axes, steps: Sequence[int], values: Tensor, name: str) -> None:
    ink = colours(2)(0)
    entries = values.reshape(len(steps), -1)
    low, high = entries.min(dim=1).values, entries.max(dim=1).values
    axes.fill_between(steps, low, high, color=ink, alpha=0.2, linewidth=0)
    axes.plot(steps, entries.median(dim=1).values, color=ink, linewidth=1.1)
    axes.set_title(f"{name} (median, range)" if entries.shape[1] > 1 else name, loc="left")


def _grid(count: int, title: str) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels, three in a row."""
    columns = min(max(count, 1), COLUMNS)
    rows = max(1, math.ceil(count / columns))
    size = (2.4 * max(columns, 2) + 0.6, 2.1 * rows + 0.3)
    figure = Figure(figsize=size, layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in places[count:]:
        unused.set_axis_off()
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure, places[:count]
