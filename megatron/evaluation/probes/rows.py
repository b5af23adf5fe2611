"""What probes leave behind: JSON lines, one for each probe, length and depth, and a picture."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from megatron.errors import UserError
from megatron.evaluation.position_plot import colours, distance_axis, sampled, style
from megatron.evaluation.probes.receptive_field import MOST
from megatron.evaluation.probes.retrieval import TASKS
from megatron.evaluation.report import Beside, Row, run_of

COLUMNS = 3
NEEDED = ("pos_emb", "probe", "length", "step", "config_hash")


def write_probes(path: Path, rows: Sequence[Row]) -> None:
    """The whole file at once."""
    with Beside(path) as temporary:
        temporary.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows), encoding="utf-8")


def read_probes(paths: Iterable[str | Path]) -> list[Row]:
    """The lines of several files of probes; UserError for a line that is none."""
    rows = []
    for path in map(Path, paths):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            raise UserError(f"{path}: cannot be read as text ({fault})") from None
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                rows.append(None)
            if not isinstance(rows[-1], dict) or any(key not in rows[-1] for key in NEEDED):
                raise UserError(f"{path}, line {number}: is no result of tools/probe.py")
    return rows


def joined(there: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Rows that are there and new ones, which replace all of the same run, probe and length."""

    def question(row: Row) -> tuple:
        return (*run_of(row), row["probe"], row["length"])

    asked = {question(row) for row in rows}
    return [*(row for row in there if question(row) not in asked), *rows]


def cells(rows: Sequence[Row], task: str) -> dict[tuple[float, int], tuple[float, float] | None]:
    """Of one model and one task, by depth and length: accuracy, and the log-probability that the answer in the context
    gains the targets, in nats; None where nothing could be measured."""
    return {
        (row["depth"], row["length"]): None
        if row["accuracy"] is None
        else (row["accuracy"], row["log_probability"] - row["without"])
        for row in rows
        if row["probe"] == task
    }


def draw_probes(rows: Sequence[Row], title: str) -> Figure:
    """Of one model: a heatmap of accuracy for each task, the receptive field and the attention, as far as measured."""
    there = {row["probe"] for row in rows}
    panels = [probe for probe in (*TASKS, *OTHERS) if probe in there]
    with style():
        columns = min(max(len(panels), 1), COLUMNS)
        lines = -(-max(len(panels), 1) // columns)
        figure = Figure(figsize=(2.9 * columns + 0.4, 2.6 * lines + 0.3), layout="constrained")
        places = figure.subplots(lines, columns, squeeze=False).flat
        for axes, probe in zip(places, [*panels, *[""] * (lines * columns - len(panels))], strict=True):
            if not probe:
                axes.set_axis_off()
                continue
            OTHERS[probe](axes, rows) if probe in OTHERS else _heatmap(axes, rows, probe)
            axes.set_title(
                f"{probe.replace('_', ' ')}{': accuracy, gain in nats' if probe in TASKS else ''}", loc="left"
            )
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _heatmap(axes: Axes, rows: Sequence[Row], task: str) -> None:
    """Lengths to the right, depths downward from the start of the context; every cell says its accuracy and gain."""
    found = cells(rows, task)
    depths, lengths = (sorted(set(several)) for several in zip(*found, strict=True))
    values = [[found.get((depth, length)) for length in lengths] for depth in depths]
    shown = [[float("nan") if value is None else value[0] for value in of_depth] for of_depth in values]
    axes.imshow(shown, aspect="auto", cmap="viridis", norm=Normalize(0, 1), interpolation="nearest")
    for line, of_depth in enumerate(values):
        for column, value in enumerate(of_depth):
            text = "n/a" if value is None else f"{value[0]:.2f}\n{value[1]:+.2f}"
            colour = "white" if value is not None and value[0] < 0.6 else "black"
            axes.text(column, line, text, ha="center", va="center", fontsize=6, color=colour)
    axes.set_xticks(range(len(lengths)), [str(length) for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axes.set_xlabel("length (tokens)")
    axes.set_ylabel("depth (0: start)")


def _receptive_field(axes: Axes, rows: Sequence[Row]) -> None:
    found = [row for row in rows if row["probe"] == "receptive_field" and row.get("cumulative")]
    palette = colours(len(found))
    for number, row in enumerate(found):
        label = f"{row['length']}: {row['reach']} tokens"
        axes.plot(row["distances"], row["cumulative"], color=palette(number), linewidth=1.1, label=label)
    axes.axhline(MOST, color="#666666", linewidth=0.5, linestyle=(0, (4, 3)))
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share of the gradient up to there")
    if found:
        distance_axis(axes, max(row["length"] for row in found))
        axes.legend(title=f"length: {MOST:.0%} within", frameon=False, fontsize=7, title_fontsize=7)


def _attention(axes: Axes, rows: Sequence[Row]) -> None:
    """For each layer at the longest length, the share of attention that goes further back than a distance."""
    found = [row for row in rows if row["probe"] == "attention" and row.get("mass")]
    if not found:
        return
    row = max(found, key=lambda one: one["length"])
    palette = colours(len(row["mass"]))
    for layer, mass in enumerate(row["mass"]):
        beyond = [sum(mass[start:]) for start in range(len(mass))]
        axes.plot(row["edges"][:-1], beyond, color=palette(layer), linewidth=1.1, marker=".", label=f"layer {layer}")
    distance_axis(axes, row["length"])
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share this far or further")
    if len(row["mass"]) <= 6:
        axes.legend(title=f"length {row['length']}", frameon=False, fontsize=7, title_fontsize=7)


OTHERS = {"receptive_field": _receptive_field, "attention": _attention}
PROBES = (*TASKS, *OTHERS)


def thinned(cumulative: Sequence[float], count: int = 200) -> tuple[list[int], list[float]]:
    """Distances that look evenly spread on a logarithmic axis, and the values there."""
    at = sampled(len(cumulative), count).tolist()
    return at, [round(cumulative[distance], 6) for distance in at]
