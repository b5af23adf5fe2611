"""Encodings as pictures: what they add by distance and head.

All pictures have the same scales. Distances are on the scale log(1 + distance), which has no break
at 0. Values are linear; a bias is cut at -12, where a key gets no attention any more.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from torch import Tensor

from megatron.errors import UserError
from megatron.model import GPT
from megatron.positions import Position
from megatron.report.curves import GREY, set_title, style

# KERPLE (arXiv 2205.09921), appendix A.5: the effective length ends where the bias falls below.
THRESHOLD = -2.0
NO_PICTURE = "nothing to draw, no hook of this figure depends on distance or position alone"
SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸"
CUT = -12.0  # exp(-12) is below 0.00001


class Panel(NamedTuple):
    """Lines over distance: values [lines, distances], a line for each head or one for all heads.

    is_bias: values are added to scores, and so are cut where a key gets no attention any more
    """

    title: str
    values: Tensor
    is_bias: bool = False


@torch.no_grad()
def panels(position: Position, length: int) -> list[Panel]:
    """The panels of an encoding on distances below `length`, hook by hook.

    Empty if nothing depends on distance or position alone.
    """
    drawn = []
    shape = position.shape
    bias, weight = position.distance_bias(length), position.distance_weight(length)
    if bias is not None:
        drawn += [Panel("bias", bias, is_bias=True), Panel("kernel exp(bias)", bias.exp())]
    if weight is not None:
        drawn.append(Panel("weight on q·k", weight))
    if position.has("index_bias"):
        # One query, and keys further and further back: for a near and a far query.
        for count in sorted({min(shape.train_length, length), length}):
            bias = position.index_bias(torch.tensor([count - 1]), torch.arange(count))
            drawn.append(Panel(f"bias of query {count - 1}", bias[:, 0].flip(1), is_bias=True))
    ones = torch.ones(1, shape.heads, length, shape.head_dim)
    q, k = position.on_queries_keys(ones, ones)
    product = (k[0, 0].double() @ q[0, 0, -1].double()).flip(0)  # [length]
    turned = product / product[0]
    if (turned - 1).abs().max() > 1e-5:
        drawn.append(Panel("q·k of equal vectors, relative to distance 0", turned[None]))
    embeddings = torch.zeros(1, length, shape.hidden)
    try:
        added = position.on_embeddings(embeddings)[0]
    except UserError:  # its positions end before that
        added = position.on_embeddings(embeddings[:, : shape.train_length])[0]
    if added.any():
        cosine = torch.cosine_similarity(added[-1:], added).flip(0)
        drawn.append(Panel("cosine of what two positions add", cosine[None]))
    return drawn


def sampled(length: int, count: int) -> Tensor:
    """Distances from 0 to length - 1 that look evenly spaced on a logarithmic axis.

    0, 1, 2, … and then fewer: [count + 1 or fewer] int64.
    """
    last_exponent = torch.log10(torch.tensor(float(max(length - 1, 1)))).item()
    spread = torch.logspace(0, last_exponent, count)
    with_zero = torch.cat([torch.zeros(1), spread])
    return with_zero.round().long().clamp(max=length - 1).unique()


def draw(panels: Sequence[Panel], title: str) -> Figure:
    """The panels side by side, at the width of a page; the colour bar names the heads.

    The dashed line in the panel of a bias is where effective lengths end.
    """
    columns = len(panels) if len(panels) <= 3 else 2
    rows = math.ceil(len(panels) / columns)
    heads = max(len(panel.values) for panel in panels)
    with style():
        width = 2.4 * max(columns, 2) + 0.5
        figure = Figure(figsize=(width, 2.3 * rows + 0.3), layout="constrained")
        set_title(figure, title, width, size=10)
        every_axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for unused in every_axes[len(panels) :]:
            unused.set_axis_off()
        for axes, panel in zip(every_axes, panels, strict=False):
            count, length = panel.values.shape
            distances = sampled(length, 100 if count > 1 else 500)
            axes.set_prop_cycle(color=colours(count).colors if count > 1 else ["black"])
            axes.plot(distances, panel.values[:, distances].T, linewidth=1.1)

            axes.set_xscale("function", functions=(np.log1p, np.expm1))
            axes.set_xlim(0, length)
            axes.set_xlabel("distance d (tokens), scale log(1 + d)")
            ticks = {0: "0", 1: "1", 10: "10", 100: "100"}
            ticks |= {10**power: f"10{SUPERSCRIPTS[power]}" for power in range(3, 9)}
            shown = [tick for tick in ticks if tick <= length]
            axes.set_xticks(shown, [ticks[tick] for tick in shown])
            axes.minorticks_off()
            axes.set_title(panel.title)
            axes.grid(color="#E8E8E8", linewidth=0.5)
            axes.axhline(0, color=GREY, linewidth=0.5, zorder=1)
            lowest, highest = float(panel.values.min()), float(panel.values.max())
            if panel.is_bias and lowest < THRESHOLD:
                axes.axhline(THRESHOLD, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
            if panel.is_bias and lowest < CUT:
                highest = max(highest, 0.0)
                axes.set_ylim(CUT, highest + 0.05 * (highest - CUT))
                axes.set_title(f"{panel.title}, cut at {CUT:g}")

        if heads > 1:
            # Heads are numbered from 0, as in the tensors.
            borders = BoundaryNorm(np.arange(heads + 1) - 0.5, heads)
            scale = ScalarMappable(borders, colours(heads))
            ticks = range(0, heads, math.ceil(heads / 6))
            figure.colorbar(
                scale, ax=every_axes, label="head", ticks=ticks, pad=0.01, aspect=30
            ).minorticks_off()
    return figure


def colours(count: int) -> ListedColormap:
    """A sequential map for any colour vision, without the yellow that is faint on white paper."""
    return ListedColormap(colormaps["viridis"](np.linspace(0, 0.9, count)))


def figures_of_model(model: GPT, title: str, length: int = 16384) -> dict[str, Figure]:
    """The trained encodings of a model on distances below `length`, where they can be drawn."""
    figures = {}
    for placed in model.placed:
        name, heading = "encoding", title
        if len(model.placed) > 1:
            name, heading = f"encoding-layer{placed.layers[0]}", f"{title}: {placed.label}"
        if drawn := panels(placed.position, length):
            figures[name] = draw(drawn, heading)
    return figures
