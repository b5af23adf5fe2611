"""The figures of the page, each under the name of its file."""

import io
import math
import re
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron.report.figures.curves import (
    GREY,
    Curve,
    direct_labels,
    draw_curve,
    draw_perplexity,
    length_axis,
    training_lengths,
    value_axis,
)
from megatron.report.figures.learned import draw_learned
from megatron.report.figures.positions import draw, panels, style
from megatron.report.groups import (
    Found,
    Group,
    position_curve,
    position_differences,
    training_curve,
)
from megatron.results.row import Row
from megatron.results.table import cell

KERNEL_LENGTH = 16384
NEAR = 2
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
    near = [
        curve if max(curve.values, default=math.inf) < NEAR * lowest else Curve("", [], [])
        for curve in curves
    ]
    if (
        not 2 <= sum(bool(curve.at) for curve in near) < len(curves)
        or len({row["length"] for row in rows}) < 2
    ):
        return None
    with style():
        return draw_perplexity(near, rows, title="")  # what is left out keeps its colour


def by_position(found: Sequence[Group], rows: Sequence[Row]) -> Figure | None:
    """Loss against position, where rows have it."""
    return _against_position(
        [position_curve(group) for group in found], rows, "loss (nats per token)"
    )


def by_position_from(found: Sequence[Group], rows: Sequence[Row], reference: str) -> Figure | None:
    """The same minus the reference's, where another encoding has it on the same text."""
    curves, label = position_differences(found, reference), f"loss - {reference} (nats per token)"
    return _against_position(curves, rows, label, differences=True)


def _against_position(
    curves: Sequence[Curve], rows: Sequence[Row], label: str, *, differences: bool = False
) -> Figure | None:
    if not any(len(curve.at) for curve in curves):
        return None
    with style():
        figure, axes = _canvas()
        for number, curve in enumerate(curves):
            draw_curve(axes, curve, number)
        last = int(max(curve.at[-1] for curve in curves if len(curve.at)))
        length_axis(
            axes,
            [2**power for power in range(4, 24, 2) if 2**power <= 2 * last],
            "position (tokens)",
        )
        # Differences are linear even where all are above zero, and smaller than the digits of a perplexity.
        value_axis(
            axes,
            [] if differences else [value for curve in curves for value in curve.values],
            label,
        )
        if differences:
            axes.axhline(0, color=GREY, linewidth=1, zorder=1)
        training_lengths(axes, rows)
        direct_labels(axes, curves, "{:+.3f}".format if differences else cell)
    return figure


def training(found: Sequence[Group], evidence: Found, kind: str) -> Figure | None:
    curves = [curve for group in found if (curve := training_curve(group, evidence, kind))]
    if not curves:
        return None
    with style():
        figure, axes = _canvas()
        for number, curve in enumerate(curves):
            draw_curve(axes, curve, number, markersize=0 if len(curve.at) > 20 else 4)
        value_axis(
            axes,
            [value for curve in curves for value in curve.values],
            f"{kind} loss (nats per token)",
        )
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.set_xlabel("step")
        direct_labels(axes, curves)
    return figure


def kernels(group: Group, evidence: Found) -> dict[str, Figure]:
    """The encoding of the group's first checkpoint that was found, and what it learned: {name: figure}."""
    told = next(
        (evidence[c] for c in group.checkpoints if c in evidence and evidence[c].positions), None
    )
    if told is None:
        return {}
    several, figures = len(told.positions) > 1, {}
    for layer, position in enumerate(told.positions):
        shown = panels(position, KERNEL_LENGTH)
        if shown:
            name = f"kernel-layer{layer}" if several else "kernel"
            figures[name] = draw(shown, f"{group.label}, layer {layer}" if several else group.label)
    if told.learned:
        heads = told.positions[0].shape.heads
        figures["learned"] = draw_learned(told.learned, heads, f"{group.label}: learned numbers")
    return figures


def _canvas() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.2, 4.0), layout="constrained")
    return figure, figure.add_subplot()


def svg(figure: Figure, number: int, title: str) -> str:
    """A figure as an element of the page, in its colours; `number` keeps the ids of several apart."""
    file = io.StringIO()
    with style():
        figure.savefig(
            file, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>f{number}-", text)
    for ink, colour in INK.items():
        text = re.sub(rf"(stroke|fill): {ink}", rf"\1: {colour}", text, flags=re.IGNORECASE)
    return text.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
