"""Encodings as pictures: what they add by distance and head.

All pictures have the same scales. Distances are logarithmic from 1 on, values are linear; a bias is
cut at -12, where a key gets no attention any more.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from torch import Tensor

from megatron.errors import UserError
from megatron.positions import Position
from megatron.report.curves import GREY, style, titled_figure

# KERPLE (arXiv 2205.09921), appendix A.5: the effective length ends where the bias falls below.
THRESHOLD = -2.0
CUT = -12.0  # exp(-12) is below 0.00001
NO_PICTURE = "nothing to draw, no hook of this figure depends on distance or position alone"


class Panel(NamedTuple):
    """Lines over distance: values [lines, distances], a line for each head or one for all heads."""

    title: str
    values: Tensor


@torch.no_grad()
def panels(position: Position, length: int) -> list[Panel]:
    """The panels of an encoding on distances below `length`, hook by hook.

    Empty if nothing depends on distance or position alone.
    """
    drawn = []
    shape = position.shape
    bias, weight = position.distance_bias(length), position.distance_weight(length)
    if bias is not None:
        drawn += [Panel("bias", bias), Panel("kernel exp(bias)", bias.exp())]
    if weight is not None:
        drawn.append(Panel("weight on q·k", weight))
    if position.has("index_bias"):
        # One query, and keys further and further back: for a near and a far query.
        for count in sorted({min(shape.train_length, length), length}):
            bias = position.index_bias(torch.tensor([count - 1]), torch.arange(count))
            drawn.append(Panel(f"bias of query {count - 1}", bias[:, 0].flip(1)))
    ones = torch.ones(1, shape.heads, length, shape.head_dim)
    q, k = position.on_queries_keys(ones, ones)
    product = (k[0, 0].double() @ q[0, 0, -1].double()).flip(0)  # [length]
    if product.std() > 1e-5 * product[0]:
        relative = product[None] / product[0]
        drawn.append(Panel("q·k of equal vectors, relative to distance 0", relative))
    embeddings = torch.zeros(1, length, shape.hidden)
    try:
        added = position.on_embeddings(embeddings)[0]
    except UserError:  # its positions end before that
        added = position.on_embeddings(embeddings[:, : shape.train_length])[0]
    if added.any():
        cosine = torch.cosine_similarity(added[-1:], added).flip(0)
        drawn.append(Panel("cosine of what two positions add", cosine[None]))
    return drawn


def draw(panels: Sequence[Panel], title: str) -> Figure:
    """The panels side by side; the colour bar names the heads.

    The dashed line in the panel of a bias is where effective lengths end.
    """
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    last_head = max(len(panel.values) for panel in panels) - 1
    colours = ScalarMappable(Normalize(0, 1.15 * last_head or 1), "viridis")
    with style():
        width = 2.4 * max(columns, 2) + 0.5
        figure = titled_figure((width, 2.3 * rows + 0.3), title)
        for number, (heading, values) in enumerate(panels, 1):
            axes = figure.add_subplot(rows, columns, number)
            heads, length = values.shape
            # Every near distance, then fewer: evenly spaced on a logarithmic axis.
            spread = torch.logspace(0, math.log10(length - 1), 100 if heads > 1 else 40)
            distances = torch.cat([torch.zeros(1), spread]).round().long().unique()
            if heads > 1:
                axes.set_prop_cycle(color=colours.to_rgba(np.arange(heads)))
                axes.plot(distances, values[:, distances].T, linewidth=1.1)
            else:
                # All distances up to the next: single ones would alias what turns fast.
                distances = distances[:-1]
                parts = np.split(values[0].numpy(), distances[1:])
                low, high = [*map(min, parts)], [*map(max, parts)]
                axes.fill_between(distances, low, high, color="black", alpha=0.25, linewidth=0)
                axes.plot(distances, [*map(np.mean, parts)], color="black")
            axes.set_xscale("symlog", linthresh=1)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set(xlim=(0, length), xlabel="distance d (tokens)", title=heading)
            axes.grid(color="#E8E8E8", linewidth=0.5)
            if heading.startswith("bias") and values.min() < THRESHOLD:
                axes.axhline(THRESHOLD, color=GREY, linewidth=0.7, linestyle="dashed", zorder=1)
                if values.min() < CUT:
                    axes.set(ylim=(CUT, max(0.5, 1.05 * float(values.max()))))
                    axes.set_title(f"{heading}, cut at {CUT:g}")
        if last_head:
            bar = figure.colorbar(colours, ax=figure.axes, label="head", pad=0.01, aspect=30)
            bar.ax.set_ylim(0, last_head)  # without the yellow, which is faint on white paper
    return figure
