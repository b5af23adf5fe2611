"""Rows of a benchmark as Markdown."""

from collections.abc import Sequence
from typing import Any

from measure import Bench

FIGURES = ["ms (quartiles)", "ratio (quartiles)", "peak MiB", "floor ms", "x floor"]


def heading(bench: Bench) -> str:
    """Title and conditions in Markdown."""
    facts = bench.conditions
    words = [
        facts["hardware"],
        f"torch {facts['torch']}",
        f"threads {facts['threads']}",
        facts["clock"],
        f"commit {facts['commit']}",
        facts["date"][:10],
    ]
    best = []
    for dtype, speeds in bench.peaks.items():
        products = f"{speeds['flops_per_second'] / 1e9:,.0f} GFLOP/s in matrix products"
        copies = f"{speeds['bytes_per_second'] / 1e9:,.0f} GB/s in copies"
        best.append(f"{dtype} {products} and {copies}")
    return f"`{facts['command']}`  \n{', '.join(words)}  \nmeasured peaks: {'; '.join(best)}\n"


def figures(row: dict[str, Any]) -> list[str]:
    """A row's times and what they are compared with, for a table with the columns FIGURES."""
    floor_ms = shown(row["floor_ms"])
    if row["median_ms"] is None:
        return ["-", "-", "-", floor_ms, "-"]
    spent = shown(row["median_ms"]) + spread(row["quartiles_ms"])
    ratio = "-"
    if row["ratio"] is not None:
        ratio = shown(row["ratio"]) + spread(row["quartiles_ratio"])
    megabytes = "-"
    if row["peak_bytes"] is not None:
        megabytes = f"{row['peak_bytes'] / 2**20:,.0f}"
    return [spent, ratio, megabytes, floor_ms, f"{row['times_floor']:.1f}"]


def shown(number: float) -> str:
    """Three significant digits, without an exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def spread(ends: list[float]) -> str:
    return f" ({shown(ends[0])}-{shown(ends[1])})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns but the first are numbers."""
    ruler = ["---"] + ["---:"] * (len(header) - 1)
    lines = [_line(header), _line(ruler)]
    lines += [_line(row) for row in rows]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    plain = [cell.replace("|", "/") for cell in cells]
    return f"| {' | '.join(plain)} |"
