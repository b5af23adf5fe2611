"""What probes found of one model, as one figure."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from megatron.evaluation.probes.receptive_field import MOST
from megatron.report.figures.positions import colours, distance_axis, style
from megatron.results.probes import TASKS, cells
from megatron.results.row import Row

COLUMNS = 3


def draw_probes(rows: Sequence[Row], title: str) -> Figure:
    """Of one model: a heatmap of accuracy for each task, the receptive field and the attention, as far as measured."""
    there = {row["probe"] for row in rows}
    panels = [probe for probe in (*TASKS, *OTHERS) if probe in there]
    with style():
        columns = min(max(len(panels), 1), COLUMNS)
        lines = -(-max(len(panels), 1) // columns)
        figure = Figure(figsize=(2.9 * columns + 0.4, 2.6 * lines + 0.3), layout="constrained")
        places = figure.subplots(lines, columns, squeeze=False).flat
        for axes, probe in zip(
            places, [*panels, *[""] * (lines * columns - len(panels))], strict=True
        ):
            if not probe:
                axes.set_axis_off()
                continue
            OTHERS[probe](axes, rows) if probe in OTHERS else _heatmap(axes, rows, probe)
            axes.set_title(
                f"{probe.replace('_', ' ')}{': accuracy, gain in nats' if probe in TASKS else ''}",
                loc="left",
            )
        figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    return figure


def _heatmap(axes: Axes, rows: Sequence[Row], task: str) -> None:
    """Lengths to the right, depths downward from the start of the context; every cell says its accuracy and gain."""
    found = cells(rows, task)
    depths, lengths = (sorted(set(several)) for several in zip(*found, strict=True))
    values = [[found.get((depth, length)) for length in lengths] for depth in depths]
    shown = [
        [float("nan") if value is None else value[0] for value in of_depth] for of_depth in values
    ]
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
        axes.plot(
            row["distances"], row["cumulative"], color=palette(number), linewidth=1.1, label=label
        )
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
        axes.plot(
            row["edges"][:-1],
            beyond,
            color=palette(layer),
            linewidth=1.1,
            marker=".",
            label=f"layer {layer}",
        )
    distance_axis(axes, row["length"])
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("share this far or further")
    if len(row["mass"]) <= 6:
        axes.legend(title=f"length {row['length']}", frameon=False, fontsize=7, title_fontsize=7)


OTHERS = {"receptive_field": _receptive_field, "attention": _attention}
