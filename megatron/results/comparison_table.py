"""Comparisons as tables, with sentences on how their numbers were made."""

import math
from collections.abc import Sequence

from megatron.results.comparison import ABOUT, ALPHA, BETTER, SEEDS, WORSE, Comparison
from megatron.results.statistics import corrected_for, perplexity_of
from megatron.results.table import Table, bits, cell, from_to, with_spread

FEW = 20  # windows, below which an interval over windows covers less than 95 %
HEADINGS = {is_claim: f"95 %, {about}" for is_claim, about in ABOUT.items()}


def tables(
    comparisons: Sequence[Comparison], *, markdown: bool = False, bits_per_byte: bool = False
) -> str:
    """A table for each setting and length, and beneath them how the numbers were made.

    bits_per_byte: with a column of them
    """
    shown = tables_of(comparisons, bits_per_byte=bits_per_byte)
    parts = [table.markdown() if markdown else table.text() for table in shown]
    line_break = "  \n" if markdown else "\n"
    return "\n\n".join([*parts, line_break.join(how_made(comparisons))])


def tables_of(comparisons: Sequence[Comparison], *, bits_per_byte: bool = False) -> list[Table]:
    """A table for each setting, length and reference."""
    places: dict[tuple[str, int, str], list[Comparison]] = {}
    for pair in comparisons:
        places.setdefault((pair.setting, pair.length, pair.reference), []).append(pair)
    return [_table(group, bits_per_byte) for group in places.values()]


def _table(pairs: Sequence[Comparison], bits_per_byte: bool) -> Table:
    lines = []
    notes = [f"{pair.encoding}: {pair.reason}" for pair in pairs if pair.reason]
    for pair in pairs:
        difference, over_text = pair.difference, pair.over_text
        line = {
            "encoding": pair.encoding,
            "seeds": str(len(set(pair.seeds))),
            "perplexity": with_spread(f"{pair.mark}{cell(pair.perplexity)}", pair.std),
            f"loss - {pair.reference}": f"{difference.mean:+z.4f}" if difference else "",
            "bits per byte": bits(pair.bits_per_byte),
            **dict.fromkeys(HEADINGS.values(), ""),
            "ratio [95 %]": _ratio(difference.mean) if difference else "",
            "p": "",
            "n_eff": "",
        }
        if pair.interval:
            line[HEADINGS[pair.is_claim]] = "[{:+z.4f}, {:+z.4f}]".format(*pair.interval)
            line["ratio [95 %]"] += " [{}, {}]".format(*map(_ratio, pair.interval))
        if pair.p is not None:
            line["p"] = f"{pair.p:.4f}" if pair.p >= 1e-4 else "<0.0001"
        if over_text and over_text.estimate.n_eff is not None:
            estimate = over_text.estimate
            line["n_eff"] = f"{estimate.n_eff:.0f} of {estimate.n} {over_text.unit}"
        lines.append(line)
        if pair.other_differences:
            note = f"differs from {pair.reference} in more than the encoding"
            notes.append(f"{pair.encoding}: {note}: {pair.other_differences}")
        if 1 < len(pair.by_seed) < SEEDS or pair.seeds_disagree:
            losses = [f"{loss:+z.4f} (seed {seed})" for seed, loss in pair.by_seed.items()]
            disagree = "; seeds disagree in sign" if pair.seeds_disagree else ""
            notes.append(f"{pair.encoding} by seed: {', '.join(losses)}{disagree}")

    # Columns of intervals and p are there only if some encoding has one.
    optional = {*HEADINGS.values(), "p"}
    head = [key for key in lines[0] if key not in optional or any(line[key] for line in lines)]
    if not bits_per_byte:
        head.remove("bits per byte")
    body = [[line[key] for key in head] for line in lines]
    return Table(head, body, notes, title=f"length {pairs[0].length}: {pairs[0].setting}")


def _ratio(difference: float) -> str:
    ratio = perplexity_of(difference)
    if ratio is None:
        return "inf"
    return f"{ratio:.4f}" if ratio < 10 else f"{ratio:.3g}"


def how_made(comparisons: Sequence[Comparison]) -> list[str]:
    """How the intervals and the marks were made, in sentences."""
    lines = []
    texts = [pair.over_text for pair in comparisons if pair.over_text]
    claims = [pair for pair in comparisons if pair.is_claim]
    weights = [pair for pair in comparisons if pair.over_text and not pair.is_claim]
    if weights:
        counts = _from_least([len(pair.by_seed) for pair in weights])
        noun = "common seed" if counts == "1" else "common seeds"
        lines.append(
            f"these weights on this text: {counts} {noun}; an interval does not cover how"
            " other seeds would differ, so nothing is marked: a claim about an encoding needs"
            f" {SEEDS} seeds"
        )
    units = {pair.unit for pair in weights}
    if "blocks" in units:
        lines.append(
            "differences of the same blocks of up to 512 targets; the error accounts for the"
            " correlation of neighbouring blocks and of the blocks of one window, but of a single"
            " window not for the difference between windows"
        )
    if "windows" in units:
        samples = [
            pair.difference for pair in weights if pair.difference and pair.unit == "windows"
        ]
        batches = _from_least([estimate.block for estimate in samples])
        sample = "windows" if batches == "1" else f"overlapping batches of {batches} windows"
        lines.append(f"differences of the same windows; Student's t over {sample}")
        if min(estimate.n for estimate in samples) < FEW:
            lines.append(
                f"below {FEW} windows, intervals cover less than 95 % where neighbours correlate;"
                " measure again: evaluate.py now writes losses by block, a larger sample"
            )
    if claims:
        tests = sum(pair.p is not None for pair in claims)
        counts = _from_least([len(pair.by_seed) for pair in claims])
        lines += [
            f"over seeds: differences of the same seeds ({counts}), Student's t over seeds"
            f" (from {SEEDS} common seeds on)",
            f"p: two-sided{corrected_for(tests)}; {ALPHA:g} is significant",
            f"{WORSE} {claims[0].reference} is significantly better, {BETTER} significantly worse;"
            " ± std over seeds",
        ]
    tokens = [text.estimate.n_eff * text.tokens for text in texts if text.estimate.n_eff]
    if tokens:
        kinds_of_units = " or ".join(dict.fromkeys(text.unit for text in texts))
        lines.append(
            f"n_eff: the number of independent {kinds_of_units} that would give the same error"
            f" ({_from_least([math.floor(number) for number in tokens])} tokens)"
        )
    if len({pair.seeds for pair in comparisons}) > 1:
        lines.append(
            "perplexity is the mean over the seeds of an encoding,"
            " the difference over those that both have"
        )
    return lines


def _from_least(counts: Sequence[int]) -> str:
    """Such as "2 to 1,300"; one number if all are the same."""
    return from_to(f"{min(counts):,}", f"{max(counts):,}")
