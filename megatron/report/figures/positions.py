"""An encoding as a picture: what it adds by distance and head, the kernel, effective lengths.

All pictures have the same scales. Distances are on the scale log(1 + distance), which has no break
at 0. Values are linear; a bias is cut at -12, where a key gets no attention any more. Falls per
token are logarithmic, because those of two heads may differ by a factor of 200.
"""

import copy
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
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

from megatron.conformance.effects import content_bias
from megatron.errors import UserError
from megatron.evaluation.probes.receptive_field import sampled
from megatron.files import atomic_write
from megatron.positions import Position

GREY = "#666666"
# KERPLE (arXiv 2205.09921), appendix A.5: the effective length ends where the bias falls below.
THRESHOLD = -2.0
CUT = -12.0  # exp(-12) is below 0.00001
LEAST_FALL = 1e-8  # what the panels of falls end at
TEXT = 256  # tokens of the random text for an encoding that looks at content
SIZES: dict[Any, Any] = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
}
STABLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "megatron"}


@dataclass(frozen=True)
class Panel:
    """Lines over distance: values [lines, distances], a line for each head or one for all heads.

    is_bias: values are added to scores, and so are cut where a key gets no attention any more;
    is_fall: values are shown by their size, dashed where they are negative
    effective: [heads], the effective lengths, for the panel that shows these instead of the lines
    """

    title: str
    values: Tensor
    is_bias: bool = False
    is_fall: bool = False
    effective: Tensor | None = None

    @property
    def by_head(self) -> bool:
        return len(self.values) > 1


def effective_length(bias: Tensor) -> Tensor:
    """The smallest distance with bias < -2: [heads, length] -> [heads]; length without one."""
    below = bias < THRESHOLD
    first = below.int().argmax(dim=1)
    return torch.where(below.any(dim=1), first, bias.shape[1])


@torch.no_grad()
def panels(position: Position, length: int) -> list[Panel]:
    """What can be drawn of an encoding on distances below `length`, hook by hook.

    Empty where no hook does anything.
    """
    found = []
    bias, weight = position.distance_bias(length), position.distance_weight(length)
    if bias is not None:
        found.append(Panel("bias", bias, is_bias=True))
        found.append(Panel("kernel exp(bias)", bias.exp()))
        found.append(Panel("effective length", bias, effective=effective_length(bias)))
    if weight is not None:
        found.append(Panel("weight on q·k", weight))
    if position.has("index_bias"):
        found += _by_query(position, length)
    turned = _turned(position, length)
    if (turned - 1).abs().max() > 1e-5:
        found.append(Panel("q·k of equal vectors, relative to distance 0", turned[None]))
    added = _added(position, length)
    if added is not None:
        found.append(Panel("cosine of what two positions add", added[None]))
    if position.has("on_queries_keys_by_content"):
        turned = _turned(position, TEXT, by_content=True)
        found.append(Panel("q·k of equal vectors in a random text", turned[None]))
    if position.has("score_bias") or position.has("on_scores"):
        title = "added to the scores of a random text"
        found.append(Panel(title, _content(position), is_bias=True))
    return found


@torch.no_grad()
def falls(position: Position, length: int) -> list[Panel]:
    """How fast bias and kernel fall: -Δ/Δd of both from each distance to the next, for each head.

    Empty without a bias by distance. In float64, because neighbours differ by little.
    """
    bias = copy.deepcopy(position).double().distance_bias(length)
    if bias is None:
        return []
    fall = bias[:, :-1] - bias[:, 1:]
    of_kernel = bias[:, :-1].exp() * -torch.expm1(-fall)
    return [
        Panel("fall of the bias per token", fall, is_fall=True),
        Panel("fall of exp(bias) per token", of_kernel, is_fall=True),
    ]


def _by_query(position: Position, length: int) -> list[Panel]:
    """The bias of one query for keys further and further back, for a near and a far query."""
    near = min(position.shape.train_length, length)
    found = []
    for count in dict.fromkeys((near, length)):
        query, keys = torch.tensor([count - 1]), torch.arange(count)
        bias = position.index_bias(query, keys)[:, 0]  # [heads, count]
        by_distance = bias.flip(1)
        title = f"bias of query {count - 1}"
        found.append(Panel(title, by_distance, is_bias=True))
    return found


def _turned(position: Position, length: int, *, by_content: bool = False) -> Tensor:
    """q·k of equal vectors of ones from the last position, relative to distance 0: [length].

    by_content: what a random text does to them
    """
    shape = position.shape
    ones = torch.ones(1, 1, 1, shape.head_dim).expand(1, shape.heads, length, shape.head_dim)
    q, k = position.on_queries_keys(ones, ones)
    if by_content:
        torch.manual_seed(0)
        x = torch.randn(1, length, shape.hidden)
        q, k = position.on_queries_keys_by_content(q, k, x, {})
    product = (q[0, 0, -1].double() * k[0, 0].double()).sum(dim=-1).flip(0)
    return product / product[0]


def _added(position: Position, length: int) -> Tensor | None:
    """Cosine of what the last position and those before it add to the embedding: [length].

    None where nothing is added.
    """
    hidden = position.shape.hidden
    try:
        added = position.on_embeddings(torch.zeros(1, length, hidden))[0]
    except UserError:  # its positions end before that
        added = position.on_embeddings(torch.zeros(1, position.shape.train_length, hidden))[0]
    return torch.cosine_similarity(added[-1:], added, dim=1).flip(0) if added.any() else None


def _content(position: Position) -> Tensor:
    """What the last token of a random text adds to zero scores, by distance: [heads, TEXT]."""
    torch.manual_seed(0)
    shape = position.shape
    x = torch.randn(1, TEXT, shape.hidden)
    scores = torch.zeros(1, shape.heads, TEXT, TEXT)
    if position.has("score_bias"):
        scores = scores + content_bias(position, x)
    if position.has("on_scores"):
        q, k = torch.randn(2, 1, shape.heads, TEXT, shape.head_dim)
        position.on_queries_keys(q, k)  # where an encoding may keep q for on_scores
        scores = position.on_scores(scores, x, {})
    return scores[0, :, -1].flip(1)


def draw(found: Sequence[Panel], title: str) -> Figure:
    """The panels side by side, at the width of a page; the colour bar names the heads."""
    columns = len(found) if len(found) <= 3 else 2
    rows = -(-len(found) // columns)
    width = 2.4 * min(max(len(found), 2), 3) + 0.5
    with style():
        figure = Figure(figsize=(width, 2.3 * rows + 0.3), layout="constrained")
        places = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, panel in zip(places, found, strict=False):
            if panel.effective is None:
                _lines(axes, panel)
            else:
                _effective_lengths(axes, panel.effective, panel.values.shape[1])
        for unused in places[len(found) :]:
            unused.set_axis_off()
        heads = max(len(panel.values) for panel in found)
        if heads > 1:
            head_bar(figure, places, heads)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and as SVG, the same bytes for the same figure."""
    paths = [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "svg")]
    for one in paths:
        write(figure, one)
    return paths


def write(figure: Figure, path: Path) -> None:
    """One picture in the format of its suffix."""
    kind = path.suffix[1:]
    metadata = {"Date": None, "Creator": None} if kind == "svg" else None
    with style(), atomic_write(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=220, metadata=metadata)


def style() -> AbstractContextManager[None]:
    """Sizes for print, and SVG whose text stays text."""
    return matplotlib.rc_context(SIZES | STABLE)


def colours(count: int) -> ListedColormap:
    """A sequential map for any colour vision, without the yellow that is faint on white paper."""
    shades = colormaps["viridis"](torch.linspace(0, 0.9, max(count, 2)).numpy())
    return ListedColormap(shades[:count])


def head_bar(figure: Figure, axes: Sequence[Axes], heads: int, label: str = "head") -> None:
    """The colour of each head, numbered from 0 as in the tensors."""
    borders = [head - 0.5 for head in range(heads + 1)]
    norm = BoundaryNorm(borders, heads)
    bar = figure.colorbar(
        ScalarMappable(norm, colours(heads)),
        ax=list(axes),
        label=label,
        pad=0.01,
        aspect=30 if len(axes) <= 3 else 60,
    )
    step = math.ceil(heads / 6)
    ticks = [*range(0, heads, step)]
    bar.ax.yaxis.set_major_locator(FixedLocator(ticks))
    bar.ax.yaxis.set_minor_locator(NullLocator())


def _lines(axes: Axes, panel: Panel) -> None:
    length = panel.values.shape[1]
    count = 100 if panel.by_head else 500
    distances = sampled(length, count)
    lines = panel.values[:, distances]
    palette = colours(len(lines))
    for head, values in enumerate(lines):
        colour = palette(head) if panel.by_head else "black"
        if panel.is_fall:
            _fall(axes, distances, values, colour)
        else:
            axes.plot(distances, values, color=colour, linewidth=1.1)
    distance_axis(axes, length)
    axes.set_title(panel.title, loc="left")
    axes.grid(color="#E8E8E8", linewidth=0.5)
    if panel.is_fall:
        if (panel.values < -LEAST_FALL).any():
            axes.set_title(f"{panel.title}, dashed: rise", loc="left")
        return
    axes.axhline(0, color=GREY, linewidth=0.5, zorder=1)
    lowest = float(panel.values.min())
    highest = max(float(panel.values.max()), 0.0)
    if panel.is_bias and lowest < CUT:
        margin = 0.05 * (highest - CUT)
        axes.set_ylim(CUT, highest + margin)
        axes.set_title(f"{panel.title}, cut at {CUT:g}", loc="left")


def _fall(axes: Axes, distances: Tensor, values: Tensor, colour: Any) -> None:
    """A line of sizes on a logarithmic scale, dashed where the bias rises."""
    axes.set_yscale("log")
    for sign, dashes in ((1, "-"), (-1, (0, (2, 1.5)))):
        sizes = sign * values
        shown = torch.where(sizes > LEAST_FALL, sizes, math.nan)
        axes.plot(distances, shown, color=colour, linewidth=1.1, linestyle=dashes)


def _effective_lengths(axes: Axes, effective: Tensor, length: int) -> None:
    """A dot for each head; an arrow where the bias stays above the threshold up to `length`."""
    palette = colours(len(effective))
    for head, value in enumerate(effective.tolist()):
        marker = "^" if value == length else "o"
        look = {"marker": marker, "markersize": 4, "color": palette(head)}
        axes.plot([head], [value], clip_on=False, zorder=3, **look)
    axes.axhline(length, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)))
    axes.annotate(
        f"▲ beyond {length}",
        (0, length),
        xytext=(0, 4),
        textcoords="offset points",
        fontsize=7,
        color=GREY,
    )
    axes.set_yscale("function", functions=(np.log1p, np.expm1))
    axes.set_ylim(0, length * 4)
    _powers(axes.yaxis, length)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("head")
    axes.set_ylabel("tokens, scale log(1 + n)")
    axes.set_title(f"effective length (bias < {THRESHOLD:g})", loc="left")
    axes.grid(axis="y", color="#E8E8E8", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def distance_axis(axes: Axes, length: int) -> None:
    """Distances up to `length` on the scale log(1 + distance)."""
    axes.set_xscale("function", functions=(np.log1p, np.expm1))
    axes.set_xlim(0, length)
    _powers(axes.xaxis, length)
    axes.set_xlabel("distance d (tokens), scale log(1 + d)")
    axes.spines[["top", "right"]].set_visible(False)


def _powers(axis: Axis, length: int) -> None:
    """Ticks at 0 and at powers of ten."""
    powers = [10**power for power in range(9) if 10**power <= length]
    axis.set_major_locator(FixedLocator([0, *powers]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_power))


def _power(value: float, _: object) -> str:
    """0, 1, 10, then powers: ten thousand is wider than its tick."""
    if value < 1000:
        return f"{value:g}"
    exponent = len(f"{value:.0f}") - 1
    return f"$10^{exponent}$"
