"""The page: a section for every text and protocol, then what was trained, how fast, and what is missing."""

import math
import statistics
from collections.abc import Sequence
from html import escape

from matplotlib.figure import Figure

from megatron.report.figures.probes import draw_probes
from megatron.report.groups import (
    Evidence,
    Found,
    Group,
    differing,
    groups,
    models,
    perplexity_curve,
    summary,
)
from megatron.report.html import figures
from megatron.report.html.elements import Cell, document, figure, items, paragraph, table
from megatron.report.html.paired import (
    comparisons,
    intervals,
    not_told_apart,
    paired,
    reference_of,
)
from megatron.report.html.texts import (
    BANDS,
    BOLD,
    DIFFERENCES,
    GAIN,
    OVER_SEEDS,
    PROBES,
    PROTOCOLS,
    UNKNOWN,
)
from megatron.results.labels import kinds, labels_of, select, with_sweeps
from megatron.results.probes import TASKS, cells
from megatron.results.row import COLUMNS, VARIANT, Row, by_setting, last_of_each, run_of, with_facts
from megatron.results.table import by_length, cell, notes, spread

MISSING = Cell("-", kind="missing", title="not measured")


class Page:
    """Sections and figures as they come: `figures` by the name of their file."""

    def __init__(
        self,
        rows: Sequence[Row],
        probes: Sequence[Row],
        evidence: Found,
        *,
        against: str | None = None,
    ) -> None:
        self.rows, self.probes = with_sweeps(rows), probes
        self.evidence, self.against = evidence, against
        self.figures: dict[str, Figure] = {}
        self.missing: list[str] = []
        self.sections: list[tuple[str, str]] = []

    def html(self, title: str) -> str:
        """The whole page; `figures` is full after it. UserError where `against` means no encoding, or several."""
        if self.against is not None:
            select(self.against, kinds(self.rows))
        for number, members in enumerate(by_setting(self.rows).values()):
            self.measured(with_prefixes(members), f"{number + 1}-" if number else "")
        trained = models([*self.rows, *self.probes], self.evidence)
        self.add("Probes", self.probed())
        self.add("Kernels", self.kernels(trained))
        self.add("Training", self.training(trained))
        self.add(
            "Speed and memory",
            self.speed(models([*self.rows, *self.probes], self.evidence, apart=VARIANT)),
        )
        self.add("Configuration differences", self.differences(trained))
        self.add("Runs", runs_table([*self.rows, *self.probes]))
        gaps = [gap for one in self.evidence.values() for gap in one.gaps]
        told = items(dict.fromkeys([*self.missing, *gaps]))
        self.add("What is missing", told or paragraph("Nothing that this page asks for."))
        return document(title, lead(self.rows, trained), self.sections)

    def add(self, name: str, content: str) -> None:
        self.sections.append((name, content))

    def draw(
        self, name: str, drawn: Figure | None, caption: str = "", *, wide: bool = False
    ) -> str:
        """The figure as HTML, noted under the name of its file; nothing where there is none."""
        if drawn is None:
            return ""
        self.figures[name] = drawn
        return figure(figures.svg(drawn, len(self.figures), name), caption, wide=wide)

    def measured(self, rows: Sequence[Row], prefix: str) -> None:
        """One text and protocol: what it means, the curve, the table, notes."""
        said, rows = notes(rows, each_run=False), last_of_each(rows)
        found, first = groups(rows, self.evidence), rows[0]
        protocol = first.get("protocol") or "unknown protocol"
        name = " ".join(str(first[key]) for key in ("corpus", "part") if first.get(key)) or "a text"
        reference = reference_of(found, self.against)
        told, reason = comparisons(found, reference)
        curves = [perplexity_curve(group, intervals(told) if told else None) for group in found]
        parts = [paragraph(PROTOCOLS.get(protocol, UNKNOWN))]
        bands = BANDS.format(reference=reference) if told else ""
        parts.append(
            self.draw(
                f"{prefix}perplexity", figures.perplexity(curves, rows), f"{OVER_SEEDS} {bands}"
            )
        )
        near = figures.perplexity_near(curves, rows)
        parts.append(
            self.draw(
                f"{prefix}perplexity-near",
                near,
                "The same without what rises far above the lowest.",
            )
        )
        parts.append(self.perplexities(found, rows, f"{name}, {protocol}"))
        parts.append(paired(told, reason))
        caption = "Loss by position in the longest windows, over half octaves, mean over seeds."
        parts.append(self.draw(f"{prefix}position", figures.by_position(found, rows), caption))
        between = figures.by_position_from(found, rows, reference) if reference else None
        parts.append(
            self.draw(
                f"{prefix}position-differences", between, DIFFERENCES.format(reference=reference)
            )
        )
        parts.append(items(said))
        self.add(f"{name}: {protocol}", "".join(parts))

    def perplexities(self, found: Sequence[Group], rows: Sequence[Row], where: str) -> str:
        """One line per group, one column per length; bold is what nothing tells from the lowest."""
        lengths = sorted({row["length"] for row in rows})
        trained = {row.get("train_length") for row in rows}
        bold = {n: not_told_apart(found, n) for n in lengths}
        body = []
        for group in found:
            line = [Cell(group.label), Cell(str(len(group.seeds) or 1), len(group.seeds) or 1)]
            for length in lengths:
                line.append(
                    perplexity_cell(group.rows.get(length, []), best=group.label in bold[length])
                )
                if line[-1].missing:
                    self.missing.append(f"{where}, {group.label} at {length}: {line[-1].title}")
            body.append(line)
        head = ["pos_emb", "seeds", *(f"{n}*" if n in trained else str(n) for n in lengths)]
        return table(head, body) + paragraph(BOLD if any(bold.values()) else "", "muted")

    def probed(self) -> str:
        """A figure and a table for each model that was probed; models of several seeds one by one."""
        if not self.probes:
            self.missing.append("probes: no rows of tools/probe.py were given")
            return paragraph("No rows of tools/probe.py were given.")
        chance = next((row["chance"] for row in self.probes if row.get("chance")), math.nan)
        told = [
            f"{probe}: {PROBES[probe]}"
            for probe in PROBES
            if any(row["probe"] == probe for row in self.probes)
        ]
        parts = [items(told), paragraph(GAIN.format(chance=chance))]
        for number, (label, members) in enumerate(by_checkpoint(self.probes).items()):
            parts.append(f"<h3>{escape(label)}</h3>")
            parts.append(self.draw(f"probes-{number + 1}", draw_probes(members, label), wide=True))
            parts.append(probe_table(members))
            self.missing += dict.fromkeys(
                f"{row['probe']} of {label} at {row['length']}: {row['reason']}"
                for row in members
                if row.get("reason")
            )
        return "".join(parts)

    def kernels(self, trained: Sequence[Group]) -> str:
        parts = []
        for number, group in enumerate(trained):
            for name, drawn in figures.kernels(group, self.evidence).items():
                parts.append(self.draw(f"{number + 1}-{name}", drawn, wide=True))
        return "".join(parts) or paragraph("No checkpoint was found whose encoding could be drawn.")

    def training(self, trained: Sequence[Group]) -> str:
        parts = [
            self.draw(
                f"training-{kind}",
                figures.training(trained, self.evidence, kind),
                f"{kind} loss, mean over seeds.",
            )
            for kind in ("train", "valid")
        ]
        return "".join(parts) or paragraph("No metrics.jsonl was found beside the checkpoints.")

    def speed(self, trained: Sequence[Group]) -> str:
        """Tokens per second of evaluation by length, and what training logged of itself. A window and another dtype
        have a speed of their own."""
        lengths = sorted({row["length"] for row in self.rows})
        logged = [
            [one for c in group.checkpoints for one in self.evidence.get(c, Evidence()).metrics]
            for group in trained
        ]
        keys = [key for key in COSTS if any(key in one for metrics in logged for one in metrics)]
        body = []
        for group, metrics in zip(trained, logged, strict=True):
            where = sorted({str(row.get("device")) for rows in group.rows.values() for row in rows})
            line = [Cell(group.label), Cell.of_text(", ".join(where))]
            line += [mean_cell([speed_of(row) for row in group.rows.get(n, [])]) for n in lengths]
            line += [median_cell([one.get(key) for one in metrics]) for key in keys]
            body.append(line)
        head = ["pos_emb", "device", *(f"eval {n}" for n in lengths), *(COSTS[key] for key in keys)]
        return paragraph(
            "Tokens per second: all that pass through the model, scored or not, mean over rows of evaluation at each"
            " length; median of what training logged."
        ) + table(head, body)

    def differences(self, trained: Sequence[Group]) -> str:
        found = differing(trained, self.evidence, lambda one: one.settings)
        if not found:
            return paragraph("None among the configurations that were found, but for seeds.")
        head = ["key", *(group.label for group in trained)]
        return table(
            head, ([Cell(key), *(Cell.of_text(v) for v in values)] for key, values in found.items())
        )


# What a line of metrics.jsonl may say of cost, and how the table calls it.
COSTS = {
    "tokens_per_second": "training",
    "seconds_per_step": "seconds per step",
    "model_tflops_per_second": "model TFLOP/s",
    "mfu": "MFU",
    "peak_memory_gib": "peak memory (GiB)",
}


def lead(rows: Sequence[Row], trained: Sequence[Group]) -> str:
    """What the page is about in one line."""
    seeds = sorted({row["seed"] for row in rows if row.get("seed") is not None})
    corpora = sorted({str(row["corpus"]) for row in rows if row.get("corpus")})
    commits = sorted({str(row["commit"]) for row in rows if row.get("commit")})
    told = [
        f"{len(trained)} models" if len(trained) > 1 else "1 model",
        f"corpus {', '.join(corpora) or 'unknown'}",
    ]
    told += [
        f"seeds {', '.join(map(str, seeds)) or 'unknown'}",
        f"code {', '.join(commits) or 'unknown'}",
    ]
    return paragraph(" · ".join(told), "muted")


def with_prefixes(rows: Sequence[Row]) -> list[Row]:
    """Rows with losses by position also at the shorter lengths that they hold: doublings of the training length. Those
    come first: where a shorter pass was measured too, it counts."""
    found = []
    for row in rows:
        trained, edges = row.get("train_length") or row["length"], row.get("position_edges") or []
        doublings = [trained * 2**power for power in range(row["length"].bit_length())]
        shorter = [length for length in doublings if length in edges and length < row["length"]]
        found += by_length([row], shorter) if shorter and row["loss"] is not None else []
    return [*found, *rows]


def perplexity_cell(rows: Sequence[Row], *, best: bool) -> Cell:
    one = summary(rows)
    if one is None:
        reasons = [
            str(row.get("reason") or "no number") for row in rows if row["perplexity"] is None
        ]
        return Cell("n/a", kind="missing", title=reasons[0]) if reasons else MISSING
    exact = "; ".join(
        f"seed {row.get('seed')}: {row['perplexity']:.6g} (loss {row['loss']:.6g})" for row in rows
    )
    told = cell(one.mean)
    between = spread(told, one.std) if one.std is not None else ""
    if one.low is not None and one.high is not None and one.std is None:
        between = f"[{cell(one.low)}, {cell(one.high)}]"
    return Cell(told, one.mean, between, exact, "best" if best else "")


def speed_of(row: Row) -> float | None:
    """Tokens per second that passed through the model; a row's own are those that its protocol scores."""
    scored = row.get("tokens_per_second")
    return scored * row["windows"] * row["length"] / row["tokens"] if scored else None


def mean_cell(values: Sequence[float | None]) -> Cell:
    known = [value for value in values if value is not None]
    return Cell(f"{statistics.fmean(known):,.0f}", statistics.fmean(known)) if known else MISSING


def median_cell(values: Sequence[float | None]) -> Cell:
    known = [value for value in values if value is not None]
    middle = statistics.median(known) if known else None
    return (
        MISSING
        if middle is None
        else Cell(f"{middle:,.0f}" if middle >= 100 else f"{middle:.3g}", middle)
    )


def by_checkpoint(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of probes by a label of their model, its seed and the text, and of what else tells one run from another."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(run_of(row), []).append(row)
    told = []
    for row, *_ in found.values():
        text = f"{row.get('corpus')} {row.get('part')}"
        name = f"{row['pos_emb']}, seed {row.get('seed')}, step {row['step']}, {text}"
        told.append(with_facts(row, {"pos_emb": name}))
    return dict(zip(labels_of(told), found.values(), strict=True))


def probe_table(rows: Sequence[Row]) -> str:
    """Accuracy and gain by length, mean over depths: {probe: …}."""
    lengths = sorted({row["length"] for row in rows})
    body = []
    for task in [task for task in TASKS if any(row["probe"] == task for row in rows)]:
        found = cells(rows, task)
        for number, name in enumerate(("accuracy", "gain (nats)")):
            line = [Cell(f"{task}: {name}")]
            for length in lengths:
                known = [
                    one[number]
                    for (_, at), one in found.items()
                    if at == length and one is not None
                ]
                mean = statistics.fmean(known) if known else None
                line.append(MISSING if mean is None else Cell(f"{mean:.3f}", mean))
            body.append(line)
    for key, name in (
        ("reach", "receptive field: tokens of 99 %"),
        ("mean_entropy", "attention: entropy (nats)"),
    ):
        told = {row["length"]: row[key] for row in rows if row.get(key) is not None}
        if told:
            cells_of = [Cell(f"{told[n]:.4g}", told[n]) if n in told else MISSING for n in lengths]
            body.append([Cell(name), *cells_of])
    return table(["mean over depths", *map(str, lengths)], body)


def runs_table(rows: Sequence[Row]) -> str:
    """Every checkpoint that rows name, with what identifies it."""
    keys = ["checkpoint", *(key for key in COLUMNS if key != "checkpoint")]
    lines = dict.fromkeys(tuple(str(row.get(key) or "-") for key in keys) for row in rows)
    head = [COLUMNS[key] for key in keys]
    body = [[Cell(first), *map(Cell.of_text, rest)] for first, *rest in lines]
    return table(head, body)
