"""Encodings as pictures: what they add by distance and head, and what was learned.

All pictures of encodings have the same scales. Distances are on the scale log(1 + distance), which
has no break at 0. Values are linear; a bias is cut at -12, where a key gets no attention any more.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from torch import Tensor

from megatron.errors import UserError
from megatron.evaluation.attention_probes import sampled
from megatron.model import GPT
from megatron.positions import Position
from megatron.report.curves import GREY, style

# KERPLE (arXiv 2205.09921), appendix A.5: the effective length ends where the bias falls below.
THRESHOLD = -2.0
CUT = -12.0  # exp(-12) is below 0.00001
LAYER = re.compile(r"layer\d+\.(.*)")  # the name of a learned number of one layer
GRID = "#E8E8E8"


# --- Shared by all pictures of panels ---


def panels_of(
    count: int, columns: int, size: tuple[float, float], title: str
) -> tuple[Figure, list[Axes]]:
    """A figure of that size with a title, and the axes of its first `count` panels."""
    figure = Figure(figsize=size, layout="constrained")
    rows = max(1, math.ceil(count / columns))
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    for unused in places[count:]:
        unused.set_axis_off()
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure, places


def colours(count: int) -> ListedColormap:
    """A sequential map for any colour vision, without the yellow that is faint on white paper."""
    shades = colormaps["viridis"](torch.linspace(0, 0.9, max(count, 2)).numpy())
    return ListedColormap(shades[:count])


def head_bar(figure: Figure, axes: Sequence[Axes], heads: int) -> None:
    """The colour of each head, numbered from 0 as in the tensors."""
    borders = [head - 0.5 for head in range(heads + 1)]
    norm = BoundaryNorm(borders, heads)
    bar = figure.colorbar(
        ScalarMappable(norm, colours(heads)),
        ax=list(axes),
        label="head",
        pad=0.01,
        aspect=30 if len(axes) <= 3 else 60,
    )
    step = math.ceil(heads / 6)
    ticks = [*range(0, heads, step)]
    bar.ax.yaxis.set_major_locator(FixedLocator(ticks))
    bar.ax.yaxis.set_minor_locator(NullLocator())


def distance_axis(axes: Axes, length: int) -> None:
    """Distances up to `length` on the scale log(1 + distance)."""
    axes.set_xscale("function", functions=(np.log1p, np.expm1))
    axes.set_xlim(0, length)
    _powers(axes.xaxis, length)
    axes.set_xlabel("distance d (tokens), scale log(1 + d)")
    axes.spines[["top", "right"]].set_visible(False)


def _powers(axis: Axis, length: int) -> None:
    """Ticks at 0 and at powers of ten, written as powers where the number is wider than a tick."""
    powers = [10**power for power in range(9) if 10**power <= length]
    axis.set_major_locator(FixedLocator([0, *powers]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(
        FuncFormatter(lambda x, _: f"{x:g}" if x < 1000 else f"$10^{len(f'{x:.0f}') - 1}$")
    )


# --- An encoding by distance and head ---


@dataclass(frozen=True)
class Panel:
    """Lines over distance: values [lines, distances], a line for each head or one for all heads.

    is_bias: values are added to scores, and so are cut where a key gets no attention any more
    is_effective: the panel has the effective lengths of this bias instead of the lines
    """

    title: str
    values: Tensor
    is_bias: bool = False
    is_effective: bool = False


def effective_length(bias: Tensor) -> Tensor:
    """The smallest distance with bias < -2: [heads, length] -> [heads]; length without one."""
    below = bias < THRESHOLD
    first = below.int().argmax(dim=1)
    return torch.where(below.any(dim=1), first, bias.shape[1])


@torch.no_grad()
def panels(position: Position, length: int) -> list[Panel]:
    """What can be drawn of an encoding on distances below `length`, hook by hook.

    Empty if nothing depends on distance or position alone.
    """
    found = []
    shape = position.shape
    bias, weight = position.distance_bias(length), position.distance_weight(length)
    if bias is not None:
        found.append(Panel("bias", bias, is_bias=True))
        found.append(Panel("kernel exp(bias)", bias.exp()))
        title = f"effective length (bias < {THRESHOLD:g})"
        found.append(Panel(title, bias, is_effective=True))
    if weight is not None:
        found.append(Panel("weight on q·k", weight))
    if position.has("index_bias"):
        # One query, and keys further and further back: for a near and a far query.
        for count in dict.fromkeys((min(shape.train_length, length), length)):
            query, keys = torch.tensor([count - 1]), torch.arange(count)
            of_query = position.index_bias(query, keys)[:, 0]  # [heads, count]
            found.append(Panel(f"bias of query {count - 1}", of_query.flip(1), is_bias=True))
    ones = torch.ones(1, 1, 1, shape.head_dim).expand(1, shape.heads, length, shape.head_dim)
    q, k = position.on_queries_keys(ones, ones)
    product = (q[0, 0, -1].double() * k[0, 0].double()).sum(dim=-1).flip(0)  # [length]
    turned = product / product[0]
    if (turned - 1).abs().max() > 1e-5:
        found.append(Panel("q·k of equal vectors, relative to distance 0", turned[None]))
    try:
        added = position.on_embeddings(torch.zeros(1, length, shape.hidden))[0]
    except UserError:  # its positions end before that
        added = position.on_embeddings(torch.zeros(1, shape.train_length, shape.hidden))[0]
    if added.any():
        cosine = torch.cosine_similarity(added[-1:], added, dim=1).flip(0)
        found.append(Panel("cosine of what two positions add", cosine[None]))
    return found


def draw(found: Sequence[Panel], title: str) -> Figure:
    """The panels side by side, at the width of a page; the colour bar names the heads."""
    columns = len(found) if len(found) <= 3 else 2
    width = 2.4 * min(max(len(found), 2), 3) + 0.5
    height = 2.3 * math.ceil(len(found) / columns) + 0.3
    with style():
        figure, places = panels_of(len(found), columns, (width, height), title)
        for axes, panel in zip(places, found, strict=False):
            axes.set_title(panel.title, loc="left")
            axes.grid(color=GRID, linewidth=0.5)
            if panel.is_effective:
                _effective_lengths(axes, panel.values)
            else:
                _lines(axes, panel)
        heads = max(len(panel.values) for panel in found)
        if heads > 1:
            head_bar(figure, places, heads)
    return figure


def _lines(axes: Axes, panel: Panel) -> None:
    lines, length = panel.values.shape
    distances = sampled(length, 100 if lines > 1 else 500)
    palette = colours(lines) if lines > 1 else ListedColormap(["black"])
    for head, values in enumerate(panel.values[:, distances]):
        axes.plot(distances, values, color=palette(head), linewidth=1.1)
    distance_axis(axes, length)
    axes.axhline(0, color=GREY, linewidth=0.5, zorder=1)
    if panel.is_bias and panel.values.min() < CUT:
        highest = max(float(panel.values.max()), 0.0)
        axes.set_ylim(CUT, highest + 0.05 * (highest - CUT))
        axes.set_title(f"{panel.title}, cut at {CUT:g}", loc="left")


def _effective_lengths(axes: Axes, bias: Tensor) -> None:
    """A dot for each head; an arrow if the bias stays above the threshold at all distances."""
    heads, length = bias.shape
    palette = colours(heads)
    for head, value in enumerate(effective_length(bias).tolist()):
        marker = "^" if value == length else "o"
        look = {"marker": marker, "markersize": 4, "color": palette(head)}
        axes.plot([head], [value], clip_on=False, zorder=3, **look)
    axes.axhline(length, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)))
    axes.text(0, 1.3 * length, f"▲ beyond {length}", fontsize=7, color=GREY)
    axes.set_yscale("function", functions=(np.log1p, np.expm1))
    axes.set_ylim(0, length * 4)
    _powers(axes.yaxis, length)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("head")
    axes.set_ylabel("tokens, scale log(1 + n)")
    axes.spines[["top", "right"]].set_visible(False)


# --- Learned numbers ---


def tables_of(learned: Mapping[str, Tensor], heads: int) -> dict[str, Tensor]:
    """Learned numbers by their name without the layer: [rows, heads].

    If each layer has its own, layers are the rows; of several rows of a layer it is the mean.
    A number that is not learned by head has its entries in the place of heads.
    """
    of_layers: dict[str, list[Tensor]] = {}
    for key, value in learned.items():
        by_head = value.dim() > 0 and value.shape[-1] == heads
        table = value.reshape((-1, heads) if by_head else (1, -1)).float()
        of_layer = LAYER.fullmatch(key)
        of_layers.setdefault(of_layer[1] if of_layer else key, []).append(table)
    found = {}
    for name, tables in of_layers.items():
        means = [table.mean(dim=0) for table in tables]
        found[name] = tables[0] if len(tables) == 1 else torch.stack(means)
    return found


def draw_learned(learned: Mapping[str, Tensor], heads: int, title: str) -> Figure:
    """One panel for each learned number: a dot for each head, or a map of rows by head."""
    tables = tables_of(learned, heads)
    columns = min(len(tables), 3)
    size = (2.4 * max(columns, 2) + 0.6, 2.1 * math.ceil(len(tables) / columns) + 0.3)
    with style():
        figure, places = panels_of(len(tables), columns, size, title)
        for axes, (name, table) in zip(places, tables.items(), strict=False):
            rows, entries = table.shape
            axes.set_title(name, loc="left")
            axes.set_xlabel("head" if entries == heads else "entry")
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
            if rows == 1:
                inks = colours(entries)(range(entries))
                axes.scatter(range(entries), table[0], c=inks, s=16, zorder=3)
                axes.set_ylabel("value")
                continue
            image = axes.imshow(
                table.numpy(), aspect="auto", interpolation="nearest", origin="lower"
            )
            figure.colorbar(image, ax=axes, pad=0.02, label="value")
            axes.set_ylabel("row" if name in learned else "layer that has it")
            axes.yaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    return figure


def figures_of_model(model: GPT, title: str, length: int = 16384) -> dict[str, Figure]:
    """The trained encodings of a model on distances below `length`, and what they learned."""
    figures = {}
    for one in model.placed:
        several = len(model.placed) > 1
        name = f"encoding-layer{one.layers[0]}" if several else "encoding"
        if found := panels(one.position, length):
            figures[name] = draw(found, f"{title}: {one.label}" if several else title)
    if learned := model.learned():
        heads = model.placed[0].position.shape.heads
        figures["learned"] = draw_learned(learned, heads, f"{title}: learned numbers")
    return figures
