"""An encoding as a picture: what it adds by distance and head, the kernel, and how far each head sees."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
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
from megatron.evaluation.probes.receptive_field import sampled
from megatron.files import Beside
from megatron.positions import Position

GREY = "#666666"
THRESHOLD = (
    -2.0
)  # KERPLE (arXiv 2205.09921), appendix A.5: a head sees no further than where its bias falls below
WIDE = 30  # a logarithmic axis for values that spread further
TEXT = 256  # tokens of the random text that an encoding which looks at content is shown
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
    """Lines over distance: values [lines, distances], one line for each head or one for all heads."""

    title: str
    values: Tensor
    reach: Tensor | None = (
        None  # [heads]: the effective length of each head, for the panel that shows it
    )

    @property
    def by_head(self) -> bool:
        return len(self.values) > 1


def effective_length(bias: Tensor) -> Tensor:
    """The smallest distance with bias < -2: [heads, length] -> [heads]; length where there is none."""
    below = bias < THRESHOLD
    return torch.where(below.any(dim=1), below.int().argmax(dim=1), bias.shape[1])


@torch.no_grad()
def panels(position: Position, length: int) -> list[Panel]:
    """What can be drawn of an encoding on distances below `length`, hook by hook; empty where no hook does anything."""
    found = []
    bias, weight = position.distance_bias(length), position.distance_weight(length)
    if bias is not None:
        found += [Panel("bias", bias), Panel("kernel exp(bias)", bias.exp())]
        found.append(Panel("effective length", bias, effective_length(bias)))
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
    if position.has("on_scores"):
        found.append(Panel("added to the scores of a random text", _content(position)))
    return found


def _by_query(position: Position, length: int) -> list[Panel]:
    """The bias that one query gives to keys further and further back, for a near and a far query."""
    found = []
    for count in dict.fromkeys((min(position.shape.train_length, length), length)):
        bias = position.index_bias(torch.tensor([count - 1]), torch.arange(count))[:, 0].flip(
            1
        )  # by distance
        found.append(Panel(f"bias of query {count - 1}", bias))
    return found


def _turned(position: Position, length: int) -> Tensor:
    """q·k between equal vectors of ones, by distance from the last position, relative to distance 0: [length]."""
    shape = position.shape
    ones = torch.ones(1, 1, 1, shape.head_dim).expand(1, shape.heads, length, shape.head_dim)
    q, k = position.on_queries_keys(ones, ones)
    product = (q[0, 0, -1].double() * k[0, 0].double()).sum(dim=-1).flip(0)
    return product / product[0]


def _added(position: Position, length: int) -> Tensor | None:
    """Cosine of what the last position and those before it add to the embedding: [length]; None where nothing is."""
    hidden = position.shape.hidden
    try:
        added = position.on_embeddings(torch.zeros(1, length, hidden))[0]
    except UserError:  # it ends before that
        added = position.on_embeddings(torch.zeros(1, position.shape.train_length, hidden))[0]
    return torch.cosine_similarity(added[-1:], added, dim=1).flip(0) if added.any() else None


def _content(position: Position) -> Tensor:
    """What the last of some random tokens adds to zero scores, by distance: [heads, TEXT]."""
    torch.manual_seed(0)
    x = torch.randn(1, TEXT, position.shape.hidden)
    return position.on_scores(torch.zeros(1, position.shape.heads, TEXT, TEXT), x, {})[
        0, :, -1
    ].flip(1)


def draw(found: Sequence[Panel], title: str) -> Figure:
    """The panels side by side, at the width of a page; heads are told apart by the colour bar."""
    with style():
        columns = len(found) if len(found) <= 3 else 2
        rows = -(-len(found) // columns)
        figure = Figure(
            figsize=(2.4 * min(max(len(found), 2), 3) + 0.5, 2.2 * rows + 0.3), layout="constrained"
        )
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        heads = max(len(panel.values) for panel in found)
        for place, panel in zip(axes, found, strict=False):
            (_lines if panel.reach is None else _reach)(place, panel)
        for unused in axes[len(found) :]:
            unused.set_axis_off()
        if heads > 1:
            head_bar(figure, axes, heads)
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def save(figure: Figure, path: Path) -> list[Path]:
    """Write a figure as PNG and as SVG beside it, the same bytes for the same figure."""
    paths = [path.with_name(f"{path.name}.{suffix}") for suffix in ("png", "svg")]
    for one in paths:
        write(figure, one)
    return paths


def write(figure: Figure, path: Path) -> None:
    """One picture in the format of its suffix."""
    kind = path.suffix[1:]
    with style(), Beside(path) as temporary:
        figure.savefig(
            temporary,
            format=kind,
            dpi=220,
            metadata={"Date": None, "Creator": None} if kind == "svg" else None,
        )


def style() -> AbstractContextManager[None]:
    """Sizes for print, and SVG whose text stays text."""
    return matplotlib.rc_context(SIZES | STABLE)


def colours(count: int) -> ListedColormap:
    """A sequential map that every kind of colour vision orders, without the yellow that white paper swallows."""
    return ListedColormap(
        colormaps["viridis"](torch.linspace(0, 0.9, max(count, 2)).numpy())[:count]
    )


def head_bar(figure: Figure, axes: Sequence[Axes], heads: int, label: str = "head") -> None:
    """The colour of each head, numbered from 0 as in the tensors."""
    norm = BoundaryNorm([head - 0.5 for head in range(heads + 1)], heads)
    bar = figure.colorbar(
        ScalarMappable(norm, colours(heads)),
        ax=list(axes),
        label=label,
        pad=0.01,
        aspect=30 if len(axes) <= 3 else 60,
    )
    bar.ax.yaxis.set_major_locator(FixedLocator([*range(0, heads, max(1, -(-heads // 6)))]))
    bar.ax.yaxis.set_minor_locator(NullLocator())


def _lines(axes: Axes, panel: Panel) -> None:
    length = panel.values.shape[1]
    at = sampled(length, 100 if panel.by_head else 500)
    palette = colours(len(panel.values))
    for head, values in enumerate(panel.values[:, at].tolist()):
        axes.plot(
            at.tolist(), values, color=palette(head) if panel.by_head else "black", linewidth=1.1
        )
    distance_axis(axes, length)
    axes.set_title(panel.title, loc="left")
    axes.grid(color="#E8E8E8", linewidth=0.5)
    axes.axhline(0, color=GREY, linewidth=0.5, zorder=1)
    lowest, highest = float(panel.values.min()), float(panel.values.max())
    if highest - lowest > WIDE:
        axes.set_yscale("symlog", linthresh=1)
        axes.set_ylim(min(lowest * 1.5, -0.3 if lowest < 0 else 0), max(highest * 1.5, 0.3))
        largest = max(-lowest, highest)
        powers = [
            10**power for power in range(0, 12, 1 if largest < 1e5 else 2) if 10**power <= largest
        ]
        ticks = [*(-power for power in powers), 0, *powers]
        axes.yaxis.set_major_locator(
            FixedLocator([tick for tick in ticks if lowest <= tick <= max(highest, 0)])
        )
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: _power(y)))


def _reach(axes: Axes, panel: Panel) -> None:
    """A dot for each head at its effective length; an arrow where the bias stays above the threshold."""
    assert panel.reach is not None
    length, heads = panel.values.shape[1], len(panel.reach)
    palette = colours(heads)
    for head, reach in enumerate(panel.reach.tolist()):
        marker = "^" if reach == length else "o"
        axes.plot(
            [head],
            [reach],
            marker=marker,
            markersize=4,
            color=palette(head),
            clip_on=False,
            zorder=3,
        )
    axes.axhline(length, color=GREY, linewidth=0.7, linestyle=(0, (4, 3)))
    axes.annotate(
        f"▲ beyond {length}",
        (0, length),
        xytext=(0, 4),
        textcoords="offset points",
        fontsize=7,
        color=GREY,
    )
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0, length * 4)
    _powers(axes.yaxis, length)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("head")
    axes.set_title("effective length (bias < -2)", loc="left")
    axes.grid(axis="y", color="#E8E8E8", linewidth=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def distance_axis(axes: Axes, length: int) -> None:
    """0, then powers of ten, up to `length`."""
    axes.set_xscale("symlog", linthresh=1)
    axes.set_xlim(0, length)
    _powers(axes.xaxis, length)
    axes.set_xlabel("distance (tokens)")
    axes.spines[["top", "right"]].set_visible(False)


def _powers(axis: Axis, length: int) -> None:
    axis.set_major_locator(
        FixedLocator([0, *(10**power for power in range(9) if 10**power <= length)])
    )
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: _power(value)))


def _power(value: float) -> str:
    """0, 1, 10, then powers: ten thousand is wider than its tick."""
    size = abs(value)
    if size < 1000:
        return f"{value:g}"
    exponent = len(f"{size:.0f}") - 1
    return f"{'-' if value < 0 else ''}$10^{exponent}$"
