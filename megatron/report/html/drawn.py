"""What the sections of a page leave for its end: figures under the names of files, and gaps."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from megatron.report.evidence import Gap
from megatron.report.html import figures
from megatron.report.html.elements import figure

SHOWN = 3  # places of one gap that are named


@dataclass
class Drawn:
    """The figures of a page by the names of their files, and what the page lacks."""

    figures: dict[str, Figure] = field(default_factory=dict)
    missing: list[Gap] = field(default_factory=list)

    def add(self, name: str, drawn: Figure | None, caption: str = "", *, wide: bool = False) -> str:
        """Note a figure and give its HTML; nothing where there is none."""
        if drawn is None:
            return ""
        self.figures[name] = drawn
        svg = figures.svg(drawn, len(self.figures), name)
        return figure(svg, caption, wide=wide)


def grouped(gaps: Sequence[Gap]) -> list[str]:
    """One line for each cause, with the number of places and the first of them."""
    by_cause: dict[str, list[str]] = {}
    for gap in dict.fromkeys(gaps):
        by_cause.setdefault(gap.cause, []).append(gap.where)
    lines = []
    for cause, places in by_cause.items():
        named = "; ".join(places[:SHOWN])
        others = len(places) - SHOWN
        if others > 0:
            named += f"; and {others} more"
        count = f"{len(places)} times: " if len(places) > 1 else ""
        lines.append(f"{count}{named}: {cause}")
    return lines
