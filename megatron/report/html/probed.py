"""The section of the probes: a figure and a table for each model."""

import math
import statistics
from collections.abc import Hashable, Iterable, Sequence
from html import escape

from megatron.report.evidence import Gap
from megatron.report.figures.probes import draw_probes
from megatron.report.html.drawn import Drawn
from megatron.report.html.elements import MISSING, Cell, items, paragraph, table
from megatron.report.html.measured import text_of
from megatron.report.html.texts import GAIN, GUESS, PROBES
from megatron.results.labels import labels_of
from megatron.results.probes import TASKS, ProbeRow, cells, guesses
from megatron.results.row import run_of, with_facts
from megatron.results.statistics import wilson

NO_PROBES = "No rows of tools/probe.py were given."
OTHERS = {
    "reach": "receptive field: tokens with 99 % of the gradient",
    "mean_entropy": "attention: entropy (nats)",
}


def probed(rows: Sequence[ProbeRow], drawn: Drawn) -> str:
    """A figure and a table for each model that was probed; seeds are models of their own."""
    if not rows:
        drawn.missing.append(Gap("probes", "no rows of tools/probe.py were given"))
        return paragraph(NO_PROBES)
    measured = {row["probe"] for row in rows}
    parts = [items(f"{name}: {text}" for name, text in PROBES.items() if name in measured)]
    if measured & {*TASKS}:
        chances = [row.get("chance") for row in rows]
        known = [chance for chance in chances if chance]
        # The least one has a single right answer.
        parts.append(paragraph(GAIN.format(chance=min(known, default=math.nan))))
    if any(row.get("guess") is not None for row in rows):
        parts.append(paragraph(GUESS))
    for number, (label, members) in enumerate(by_checkpoint(rows).items(), 1):
        figure = draw_probes(members, label)
        parts += [
            f"<h3>{escape(label)}</h3>",
            drawn.add(f"probes-{number}", figure, wide=True),
            probe_table(members),
        ]
        for row in members:
            reason = row.get("reason")
            if reason:
                where = f"{row['probe']} of {label} at {row['length']}"
                drawn.missing.append(Gap(where, reason))
    return "".join(parts)


def by_checkpoint(rows: Sequence[ProbeRow]) -> dict[str, list[ProbeRow]]:
    """Rows of probes by a label: model, seed, step and text, and what else distinguishes runs."""
    by_run: dict[tuple[Hashable, ...], list[ProbeRow]] = {}
    for row in rows:
        by_run.setdefault(run_of(row), []).append(row)
    first_rows = []
    for members in by_run.values():
        row = members[0]
        model = f"{row['pos_emb']}, seed {row.get('seed')}, step {row['step']}"
        name = f"{model}, {text_of(row)}"
        first_rows.append(with_facts(row, {"pos_emb": name}))
    labels = labels_of(first_rows)
    return dict(zip(labels, by_run.values(), strict=True))


def probe_table(rows: Sequence[ProbeRow]) -> str:
    """Accuracy, guess rate and gain of the tasks by length, means over places; other probes."""
    lengths = sorted({row["length"] for row in rows})
    body = []
    for task in TASKS:
        if any(row["probe"] == task for row in rows):
            body += _of_task(rows, task, lengths)
    for key, name in OTHERS.items():
        values = {row["length"]: row[key] for row in rows if row.get(key) is not None}
        if not values:
            continue
        line = [Cell(name)]
        for length in lengths:
            line.append(_number(values.get(length), ".4g"))
        body.append(line)
    return table(["mean over places", *map(str, lengths)], body)


def _of_task(rows: Sequence[ProbeRow], task: str, lengths: Sequence[int]) -> list[list[Cell]]:
    """A line for accuracy, one for the guess rate if there is one, and one for the gain."""
    trials = {row["length"]: row.get("trials") for row in rows if row["probe"] == task}
    by_place, guess_by_place = cells(rows, task), guesses(rows, task)
    accuracies = [Cell(f"{task}: accuracy")]
    guess_rates = [Cell(f"{task}: guess rate")]
    gains = [Cell(f"{task}: gain (nats)")]
    for length in lengths:
        pairs = [pair for (_, at), pair in by_place.items() if at == length]
        known = [pair for pair in pairs if pair is not None]
        rates = [rate for (_, at), rate in guess_by_place.items() if at == length]
        accuracy = _mean(pair[0] for pair in known)
        accuracies.append(_accuracy(accuracy, trials.get(length)))
        guess_rates.append(_number(_mean(rates), ".3g"))
        gains.append(_number(_mean(pair[1] for pair in known), ".3f"))
    return [accuracies, guess_rates, gains] if guess_by_place else [accuracies, gains]


def _mean(values: Iterable[float]) -> float | None:
    known = [*values]
    return statistics.fmean(known) if known else None


def _accuracy(mean: float | None, trials: int | None) -> Cell:
    """A mean over places with its interval over contexts."""
    if mean is None or not trials:
        return _number(mean, ".3f")
    low, high = wilson(mean, trials)
    return Cell(format(mean, ".3f"), mean, spread=f"[{low:.2f}, {high:.2f}]")


def _number(value: float | None, form: str) -> Cell:
    return MISSING if value is None else Cell(format(value, form), value)
