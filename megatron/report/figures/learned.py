"""What a checkpoint has learned of its encoding: each number by head, and on the way there."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from megatron.errors import UserError
from megatron.report.figures.positions import colours, head_bar, style

LAYER = re.compile(r"layer(\d+)\.(.*)")
COLUMNS = 3


def draw_learned(learned: Mapping[str, Tensor], heads: int, title: str) -> Figure:
    """One panel for each learned number: a dot for each head, or a map where it has rows or layers beside heads."""
    tables = by_name(learned, heads)
    with style():
        figure, places = _grid(len(tables), title)
        for axes, (name, (table, rows)) in zip(places, tables.items(), strict=False):
            axes.set_title(name, loc="left")
            if len(table) == 1:
                _dots(axes, table[0], by_head=table.shape[1] == heads)
            else:
                image = axes.imshow(
                    table.numpy(),
                    aspect="auto",
                    cmap="viridis",
                    interpolation="nearest",
                    origin="lower",
                )
                figure.colorbar(image, ax=axes, pad=0.02)
                axes.set_ylabel(rows)
                axes.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
            axes.set_xlabel("head" if table.shape[1] == heads else "entry")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    return figure


def _dots(axes: Axes, values: Tensor, *, by_head: bool) -> None:
    palette = colours(len(values))
    colour = [palette(head) if by_head else colours(2)(0) for head in range(len(values))]
    axes.scatter(range(len(values)), values.tolist(), c=colour, s=16, zorder=3)
    axes.set_xlim(-0.5, len(values) - 0.5)
    axes.grid(axis="y", color="#E8E8E8", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def by_name(learned: Mapping[str, Tensor], heads: int) -> dict[str, tuple[Tensor, str]]:
    """Learned numbers without their layer: {name: ([rows, heads], what the rows are)}; layers become rows.

    A number without heads keeps its entries in place of them; of layers with a table each, the mean over its rows.
    """
    layers: dict[str, list[Tensor]] = {}
    for key, value in learned.items():
        match = LAYER.fullmatch(key)
        table = (
            value.reshape(-1, heads)
            if value.dim() and value.shape[-1] == heads
            else value.reshape(1, -1)
        )
        layers.setdefault(match[2] if match else key, []).append(table.float())
    found = {}
    for name, tables in layers.items():
        several = len(tables) > 1
        table = (
            torch.cat([one.mean(dim=0, keepdim=True) for one in tables]) if several else tables[0]
        )
        averaged = several and len(tables[0]) > 1
        found[f"{name} (mean over rows)" if averaged else name] = (
            table,
            "layer" if several else "row",
        )
    return found


def trajectory(
    folder: Path, learned: Mapping[str, Tensor]
) -> dict[str, tuple[list[int], list[Tensor]]]:
    """From metrics.jsonl, {name: (steps, values at each step, shaped as in `learned`)}; UserError where there is none.

    Numbers too large for the file are not in it.
    """
    path = folder / "metrics.jsonl"
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as fault:
        raise UserError(
            f"{path}: cannot be read ({fault}); training writes it beside its checkpoints"
        ) from None
    found: dict[str, tuple[list[int], list[Tensor]]] = {}
    for record in records:
        for name, values in record.get("position", {}).items():
            if name in learned and len(values) == learned[name].numel():
                steps, tensors = found.setdefault(name, ([], []))
                steps.append(record["step"])
                tensors.append(torch.tensor(values).view_as(learned[name]))
    return found


def draw_trajectory(
    found: Mapping[str, tuple[list[int], list[Tensor]]], heads: int, title: str
) -> Figure:
    """One panel for each learned number over the steps: a line per head, per layer, or the spread of its entries."""
    names: dict[str, list[tuple[list[int], Tensor]]] = {}
    for key, (steps, tensors) in found.items():
        match = LAYER.fullmatch(key)
        names.setdefault(match[2] if match else key, []).append((steps, torch.stack(tensors)))
    with style():
        figure, places = _grid(len(names), title)
        shown: dict[
            str, tuple[int, list[Axes]]
        ] = {}  # what the colours of these panels number, and how many
        for axes, (name, layers) in zip(places, names.items(), strict=False):
            axes.set_title(name, loc="left")
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
            axes.spines[["top", "right"]].set_visible(False)
            axes.grid(color="#E8E8E8", linewidth=0.5)
            kind, count = _over_steps(axes, layers, heads)
            if kind:
                shown.setdefault(kind, (count, []))[1].append(axes)
        for kind, (count, panels) in shown.items():
            head_bar(figure, panels, count, kind)
    return figure


def _over_steps(axes: Axes, layers: list[tuple[list[int], Tensor]], heads: int) -> tuple[str, int]:
    """Draw one number; what its colours number ("" for none), and how many."""
    steps, values = layers[0]  # [steps, ...]
    if len(layers) > 1:
        palette = colours(len(layers))
        for layer, (at, several) in enumerate(layers):
            axes.plot(at, several.flatten(1).mean(dim=1), color=palette(layer), linewidth=1.1)
        axes.set_title(axes.get_title(loc="left") + " (mean over heads)", loc="left")
        return "layer", len(layers)
    if values.dim() > 1 and values.shape[-1] == heads:
        palette, by_head = colours(heads), values.reshape(len(steps), -1, heads).mean(dim=1)
        for head in range(heads):
            axes.plot(steps, by_head[:, head], color=palette(head), linewidth=1.1)
        if values.dim() > 2:
            axes.set_title(axes.get_title(loc="left") + " (mean over rows)", loc="left")
        return "head", heads
    flat = values.reshape(len(steps), -1)
    axes.fill_between(
        steps,
        flat.min(dim=1).values,
        flat.max(dim=1).values,
        color=colours(2)(0),
        alpha=0.2,
        linewidth=0,
    )
    axes.plot(steps, flat.median(dim=1).values, color=colours(2)(0), linewidth=1.1)
    if flat.shape[1] > 1:
        axes.set_title(axes.get_title(loc="left") + " (median, range)", loc="left")
    return "", 0


def _grid(count: int, title: str) -> tuple[Figure, list[Axes]]:
    """A figure with `count` panels, three in a row."""
    columns = min(max(count, 1), COLUMNS)
    rows = -(-max(count, 1) // columns)
    figure = Figure(figsize=(2.4 * max(columns, 2) + 0.6, 2.1 * rows + 0.3), layout="constrained")
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in places[count:]:
        unused.set_axis_off()
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure, places[:count]
