"""Comparisons as tables, with notes that explain how the numbers were computed."""

from collections.abc import Iterable, Sequence

from megatron.results.comparison import ALPHA, BETTER, SEEDS, WORSE, Comparison
from megatron.results.statistics import corrected_for, perplexity_of
from megatron.results.table import Table, cell, with_spread


def tables(comparisons: Sequence[Comparison], form: str = "text") -> str:
    """A table for each setting and length, followed by notes on how the numbers were computed.

    form: text, markdown or latex
    """
    shown = tables_of(comparisons)
    line_break = {"text": "\n", "markdown": "  \n", "latex": "\n% "}[form]
    notes = line_break.join(["", *how_made(comparisons)]).lstrip()
    return "\n\n".join([*(table.written(form) for table in shown), notes])


def tables_of(comparisons: Sequence[Comparison]) -> list[Table]:
    """A table for each setting, length and reference."""
    places: dict[tuple[str, int, str], list[Comparison]] = {}
    for pair in comparisons:
        places.setdefault((pair.setting, pair.length, pair.reference), []).append(pair)
    return list(map(_table, places.values()))


def _table(pairs: Sequence[Comparison]) -> Table:
    lines, notes = [], []
    for pair in pairs:
        line = {"encoding": pair.encoding, "seeds": str(len(pair.rows))}
        line["perplexity"] = pair.mark + with_spread(cell, *pair.perplexity)
        lines.append(line)
        if pair.reason:
            notes.append(f"{pair.encoding}: {pair.reason}")
        if pair.difference is None:
            continue
        estimate, by_seed = pair.difference.estimate, pair.difference.by_seed
        line[f"loss - {pair.reference}"] = f"{estimate.mean:+z.4f}"
        interval = estimate.interval()
        line["95 %"] = in_brackets([f"{bound:+z.4f}" for bound in interval])
        ratios = [_ratio(estimate.mean), in_brackets(map(_ratio, interval))]
        line["ratio [95 %]"] = " ".join(ratios).strip()
        if pair.p is not None:
            line["p"] = f"{pair.p:.4f}" if pair.p >= 1e-4 else "<0.0001"
        line["sample"] = f"{estimate.n} {pair.difference.unit}"
        if pair.other_differences:
            note = f"differs from {pair.reference} in more than the encoding"
            notes.append(f"{pair.encoding}: {note}: {pair.other_differences}")
        if 1 < len(by_seed) < SEEDS or pair.difference.seeds_disagree:
            losses = [f"{loss:+z.4f} (seed {seed})" for seed, loss in by_seed.items()]
            disagree = "; seeds disagree in sign" if pair.difference.seeds_disagree else ""
            notes.append(f"{pair.encoding} by seed: {', '.join(losses)}{disagree}")
    head = [*dict.fromkeys(key for line in lines for key in line)]
    body = [[line.get(key, "") for key in head] for line in lines]
    return Table(head, body, notes, title=f"length {pairs[0].length}: {pairs[0].setting}")


def in_brackets(bounds: Iterable[str]) -> str:
    """The two ends of an interval; nothing without an interval."""
    text = ", ".join(bounds)
    return f"[{text}]" if text else ""


def _ratio(difference: float) -> str:
    ratio = perplexity_of(difference)
    if ratio is None:
        return "inf"
    return f"{ratio:.4f}" if ratio < 10 else f"{ratio:.3g}"


def how_made(comparisons: Sequence[Comparison]) -> list[str]:
    """Notes on how intervals and marks were computed."""
    lines = []
    differences = [pair.difference for pair in comparisons if pair.difference]
    claims = sum(difference.is_claim for difference in differences)
    if claims < len(differences):
        lines.append(
            "these weights on this text: the error allows for correlated neighbours and for what"
            " the blocks of a window share (docs/evaluation.md); an interval does not cover how"
            " other seeds would differ, so nothing is marked: a claim about an encoding needs"
            f" {SEEDS} seeds"
        )
    if claims:
        lines += [
            "over seeds: differences of the same seeds, Student's t over seeds",
            f"p: two-sided{corrected_for(claims)}; {ALPHA:g} is significant",
            f"{WORSE} {comparisons[0].reference} is significantly better, {BETTER} significantly"
            " worse; ± std over seeds",
        ]
    if len({len(pair.rows) for pair in comparisons}) > 1:
        lines.append(
            "perplexity is the mean over the seeds of an encoding,"
            " the difference over those that both have"
        )
    return lines
