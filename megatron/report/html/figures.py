"""The figures of the page, each under the name of its file."""

import io
import math
import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron.report.evidence import Found
from megatron.report.figures.curves import (
    GREY,
    Curve,
    direct_labels,
    draw_curves,
    draw_perplexity,
    length_axis,
    training_lengths,
    value_axis,
)
from megatron.report.figures.learned import draw_learned
from megatron.report.figures.positions import draw, panels, style
from megatron.report.groups import Group
from megatron.report.series import position_curve, position_differences, training_curve
from megatron.results.row import Row
from megatron.results.table import cell

KERNEL_LENGTH = 16384
NEAR = 2  # the second figure has the curves below this many times the lowest value
# Black, greys and grid take the page's colours, so that a figure can be read on a dark page too.
INK = {
    "#000000": "currentColor",
    GREY: "var(--muted)",
    "#e3e3e3": "var(--line)",
    "#e8e8e8": "var(--line)",
}


def perplexity(curves: Sequence[Curve], rows: Sequence[Row]) -> Figure | None:
    """Perplexity against length, where there are two lengths or more."""
    if len({row["length"] for row in rows}) < 2:
        return None
    with style():
        return draw_perplexity(curves, rows, title="")


def perplexity_near(curves: Sequence[Curve], rows: Sequence[Row]) -> Figure | None:
    """The curves that stay below twice the lowest value, where others hide how they differ."""
    lowest = min((value for curve in curves for value in curve.values), default=0.0)
    limit = NEAR * lowest
    near = [max(curve.values, default=math.inf) < limit for curve in curves]
    if not 2 <= near.count(True) < len(curves):
        return None
    shown = []
    for curve, is_near in zip(curves, near, strict=True):
        shown.append(curve if is_near else curve.without_values())
    return perplexity(shown, rows)


def by_position(found: Sequence[Group], rows: Sequence[Row]) -> Figure | None:
    """Loss against position, where rows have it."""
    curves = [position_curve(group) for group in found]
    return _against_position(curves, rows, "loss (nats per token)")


def by_position_from(found: Sequence[Group], rows: Sequence[Row], reference: str) -> Figure | None:
    """The same minus the reference's, where another encoding has it on the same text."""
    curves = position_differences(found, reference)
    label = f"loss - {reference} (nats per token)"
    return _against_position(curves, rows, label, differences=True)


def _against_position(
    curves: Sequence[Curve], rows: Sequence[Row], label: str, *, differences: bool = False
) -> Figure | None:
    ends = [int(curve.at[-1]) for curve in curves if len(curve.at)]
    if not ends:
        return None
    powers = [2**power for power in range(4, 24, 2)]
    ticks = [power for power in powers if power <= 2 * max(ends)]
    values = [value for curve in curves for value in curve.values]
    with style():
        figure, axes = _canvas()
        draw_curves(axes, curves)
        length_axis(axes, ticks, "position (tokens)")
        if differences:  # they are on a linear axis even where all are above zero
            value_axis(axes, [], label)
            axes.axhline(0, color=GREY, linewidth=1, zorder=1)
        else:
            value_axis(axes, values, label)
        training_lengths(axes, rows)
        direct_labels(axes, curves, "{:+.3f}".format if differences else cell)
    return figure


def training(found: Sequence[Group], evidence: Found, kind: str) -> Figure | None:
    """Loss by step, where training left its log; kind is train or valid."""
    curves = []
    for group in found:
        curve = training_curve(group, evidence, kind)
        if curve is not None:
            curves.append(curve)
    if not curves:
        return None
    values = [value for curve in curves for value in curve.values]
    with style():
        figure, axes = _canvas()
        draw_curves(axes, curves)
        value_axis(axes, values, f"{kind} loss (nats per token)")
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("step")
        direct_labels(axes, curves)
    return figure


def kernels(group: Group, evidence: Found) -> dict[str, Figure]:
    """The encoding of the group's first checkpoint that was loaded, and what it learned."""
    loaded = [one for one in group.evidence(evidence) if one.positions]
    if not loaded:
        return {}
    one = loaded[0]
    several = len(one.positions) > 1
    figures = {}
    for placed in one.positions:
        shown = panels(placed.position, KERNEL_LENGTH)
        if shown:
            name = f"kernel-layer{placed.layers[0]}" if several else "kernel"
            title = f"{group.label}: {placed.label}" if several else group.label
            figures[name] = draw(shown, title)
    if one.learned:
        heads = one.positions[0].position.shape.heads
        title = f"{group.label}: learned numbers"
        figures["learned"] = draw_learned(one.learned, heads, title)
    return figures


def _canvas() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    return figure, figure.add_subplot()


def svg(figure: Figure, number: int, title: str) -> str:
    """A figure as an element of the page, in its colours; `number` keeps its ids its own."""
    file = io.StringIO()
    with style():
        figure.savefig(
            file,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None},
        )
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>f{number}-", text)
    for ink, colour in INK.items():
        text = re.sub(rf"(stroke|fill): {ink}", rf"\1: {colour}", text, flags=re.IGNORECASE)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
