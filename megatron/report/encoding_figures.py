"""Encodings as pictures: what they add by distance and head.

All pictures have the same scales. Distances are on the scale log(1 + distance), which has no break
at 0. Values are linear; a bias is cut at -12, where a key gets no attention any more.
"""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from megatron.errors import UserError
from megatron.evaluation.attention_probes import sampled
from megatron.model import GPT
from megatron.positions import Position
from megatron.report.curves import GREY, style

# KERPLE (arXiv 2205.09921), appendix A.5: the effective length ends where the bias falls below.
THRESHOLD = -2.0
NO_PICTURE = "nothing to draw, no hook of this figure depends on distance or position alone"
LETTER = 0.083  # inches of a letter of a title
SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸"
CUT = -12.0  # exp(-12) is below 0.00001


class Panel(NamedTuple):
    """Lines over distance: values [lines, distances], a line for each head or one for all heads.

    is_bias: values are added to scores, and so are cut where a key gets no attention any more
    labels: of the lines, if they are not heads
    """

    title: str
    values: Tensor
    is_bias: bool = False
    labels: Sequence[str] = ()


@torch.no_grad()
def panels(position: Position, length: int) -> list[Panel]:
    """The panels of an encoding on distances below `length`, hook by hook.

    Empty if nothing depends on distance or position alone.
    """
    found = []
    shape = position.shape
    bias, weight = position.distance_bias(length), position.distance_weight(length)
    if bias is not None:
        found.append(Panel("bias", bias, is_bias=True))
        found.append(Panel("kernel exp(bias)", bias.exp()))
    if weight is not None:
        found.append(Panel("weight on q·k", weight))
    if position.has("index_bias"):
        # One query, and keys further and further back: for a near and a far query.
        for count in dict.fromkeys((min(shape.train_length, length), length)):
            query, keys = torch.tensor([count - 1]), torch.arange(count)
            of_query = position.index_bias(query, keys)[:, 0]  # [heads, count]
            found.append(Panel(f"bias of query {count - 1}", of_query.flip(1), is_bias=True))
    ones = torch.ones(1, 1, 1, shape.head_dim)
    ones = ones.expand(1, shape.heads, length, shape.head_dim)
    q, k = position.on_queries_keys(ones, ones)
    last, keys = q[0, 0, -1].double(), k[0, 0].double()
    product = (last * keys).sum(dim=-1).flip(0)  # [length]
    turned = product / product[0]
    if (turned - 1).abs().max() > 1e-5:
        found.append(Panel("q·k of equal vectors, relative to distance 0", turned[None]))
    embeddings = torch.zeros(1, length, shape.hidden)
    try:
        added = position.on_embeddings(embeddings)[0]
    except UserError:  # its positions end before that
        added = position.on_embeddings(embeddings[:, : shape.train_length])[0]
    if added.any():
        cosine = torch.cosine_similarity(added[-1:], added, dim=1).flip(0)
        found.append(Panel("cosine of what two positions add", cosine[None]))
    return found


@torch.no_grad()
def derivative_panels(position: Position, length: int) -> list[Panel]:
    """A kernel, and its change from a distance to the next; empty without a bias by distance."""
    bias = position.distance_bias(length)
    if bias is None:
        return []
    kernel = bias.exp()
    return [Panel("kernel exp(bias)", kernel), Panel("K(d + 1) - K(d)", kernel.diff(dim=1))]


@torch.no_grad()
def training_panels(
    records: Sequence[Mapping[str, Any]], position: Position, length: int
) -> list[Panel]:
    """The first panel of an encoding at up to six steps of its training.

    records: of metrics.jsonl, with the learned numbers; the encoding takes them one by one
    """
    parameters = dict(position.named_parameters())
    found = []
    for index in np.linspace(0, len(records) - 1, min(6, len(records))).astype(int):
        for name, values in records[index]["position"].items():
            parameters[name].copy_(torch.tensor(values).view_as(parameters[name]))
        for panel in panels(position, length)[:1]:
            found.append(panel._replace(title=f"{panel.title}, step {records[index]['step']}"))
    return found


@torch.no_grad()
def effective_panel(positions: Mapping[str, Position], length: int) -> Panel:
    """Figure 6 of KERPLE: the number of heads whose bias has been below -2 up to a distance."""
    counts = []
    for label, position in positions.items():
        bias = position.distance_bias(length)
        if bias is None:
            raise UserError(f"{label}: adds no bias by distance - leave it out of this figure")
        ended = bias.cummin(dim=1).values < THRESHOLD
        counts.append(ended.sum(dim=0))
    title = "heads whose effective length is at most d"
    return Panel(title, torch.stack(counts), labels=tuple(positions))


def draw(found: Sequence[Panel], title: str) -> Figure:
    """The panels side by side, at the width of a page; the colour bar names the heads.

    The dashed line in the panel of a bias is where effective lengths end.
    """
    columns = len(found) if len(found) <= 3 else 2
    rows = math.ceil(len(found) / columns)
    heads = max(len(panel.values) for panel in found)
    with style():
        size = (2.4 * max(columns, 2) + 0.5, 2.3 * rows + 0.3)
        figure = Figure(figsize=size, layout="constrained")
        places = list(figure.subplots(rows, columns, squeeze=False).flat)
        for unused in places[len(found) :]:
            unused.set_axis_off()
        for axes, panel in zip(places, found, strict=False):
            count, length = panel.values.shape
            distances = sampled(length, 100 if count > 1 else 500)
            palette = colours(count) if count > 1 else ListedColormap(["black"])
            shown = panel.values[:, distances]
            labels = panel.labels or [None] * count
            for head, values in enumerate(shown):
                axes.plot(distances, values, color=palette(head), linewidth=1.1, label=labels[head])
            if panel.labels:
                axes.legend(frameon=False)

            axes.set_xscale("function", functions=(np.log1p, np.expm1))
            axes.set_xlim(0, length)
            axes.set_xlabel("distance d (tokens), scale log(1 + d)")
            ticks, labels = [0], ["0"]
            for power in range(9):
                if 10**power <= length:
                    ticks.append(10**power)
                    labels.append(str(10**power) if power < 3 else f"10{SUPERSCRIPTS[power]}")
            axes.set_xticks(ticks, labels)
            axes.minorticks_off()
            axes.set_title(panel.title, loc="left")
            axes.grid(color="#E8E8E8", linewidth=0.5)
            axes.spines[["top", "right"]].set_visible(False)
            axes.axhline(0, color=GREY, linewidth=0.5, zorder=1)
            if not panel.is_bias:
                continue
            lowest = float(panel.values.min())
            highest = max(float(panel.values.max()), 0.0)
            if lowest < THRESHOLD:
                axes.axhline(THRESHOLD, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
            if lowest < CUT:
                margin = 0.05 * (highest - CUT)
                axes.set_ylim(CUT, highest + margin)
                axes.set_title(f"{panel.title}, cut at {CUT:g}", loc="left")

        title = textwrap.fill(title, int(size[0] / LETTER))
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
        if heads > 1 and not found[0].labels:
            # Heads are numbered from 0, as in the tensors.
            borders = BoundaryNorm(np.arange(heads + 1) - 0.5, heads)
            scale = ScalarMappable(borders, colours(heads))
            ticks = list(range(0, heads, math.ceil(heads / 6)))
            bar = figure.colorbar(scale, ax=places, label="head", ticks=ticks, pad=0.01, aspect=30)
            bar.minorticks_off()
    return figure


def colours(count: int) -> ListedColormap:
    """A sequential map for any colour vision, without the yellow that is faint on white paper."""
    return ListedColormap(colormaps["viridis"](np.linspace(0, 0.9, count)))


def figures_of_model(
    model: GPT, title: str, length: int = 16384, panels: Callable[..., list[Panel]] = panels
) -> dict[str, Figure]:
    """The trained encodings of a model on distances below `length`, where they can be drawn."""
    figures = {}
    several = len(model.placed) > 1
    for one in model.placed:
        name, heading = "encoding", title
        if several:
            name = f"encoding-layer{one.layers[0]}"
            heading = f"{title}: {one.label}"
        if found := panels(one.position, length):
            figures[name] = draw(found, heading)
    return figures
