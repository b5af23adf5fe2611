"""Comparisons as tables, with sentences on how their numbers were made."""

import math
from collections.abc import Sequence

from megatron.results.comparison import ALPHA, BETTER, SEEDS, WORSE, Comparison, about
from megatron.results.statistics import perplexity_of
from megatron.results.table import Cell, Table, bits, cell, spread_of

FEW = 20  # windows, below which an interval over windows covers less than 95 %


def tables(
    comparisons: Sequence[Comparison], *, markdown: bool = False, bits_per_byte: bool = False
) -> str:
    """A table for each setting and length, and beneath them how the numbers were made.

    bits_per_byte: with a column of them
    """
    places: dict[tuple[str, int], list[Comparison]] = {}
    for one in comparisons:
        places.setdefault((one.setting, one.length), []).append(one)
    parts = []
    for group in places.values():
        table = _table(group, bits_per_byte=bits_per_byte)
        parts.append(table.markdown() if markdown else table.text())
    line_break = "  \n" if markdown else "\n"
    parts.append(line_break.join(how_made(comparisons)))
    return "\n\n".join(parts)


def _table(group: Sequence[Comparison], *, bits_per_byte: bool) -> Table:
    """The comparisons of one place; intervals and p are columns only if some row has one."""
    columns: dict[str, list[str]] = {}
    headings = {is_claim: f"95 %, {about(is_claim)}" for is_claim in (True, False)}
    notes = [f"{one.encoding}: {one.reason}" for one in group if one.reason]
    for one in group:
        mean = cell(one.perplexity)
        spread = "" if one.std is None else spread_of(mean, one.std)
        cells = {
            "encoding": one.encoding,
            "seeds": str(len(set(one.seeds))),
            "perplexity": str(Cell(one.mark + mean, spread)),
            f"loss - {one.reference}": f"{one.difference.mean:+.4f}" if one.difference else "",
        }
        if bits_per_byte:
            cells["bits per byte"] = bits(one.bits_per_byte)
        ratio = _ratio(one.difference.mean) if one.difference else ""
        cells |= dict.fromkeys(headings.values(), "")
        if one.interval:
            low, high = one.interval
            cells[headings[one.is_claim]] = f"[{low:+.4f}, {high:+.4f}]"
            ratio = f"{ratio} [{_ratio(low)}, {_ratio(high)}]"
        cells["ratio [95 %]"] = ratio
        cells["p"] = ""
        if one.p is not None:
            cells["p"] = f"{one.p:.4f}" if one.p >= 1e-4 else "<0.0001"
        estimate = one.over_text.estimate if one.over_text else None
        cells["n_eff"] = ""
        if one.over_text and estimate and estimate.n_eff is not None:
            cells["n_eff"] = f"{estimate.n_eff:.0f} of {estimate.n} {one.over_text.unit}"
        for heading, text in cells.items():
            columns.setdefault(heading, []).append(text)
        too_few = 1 < len(one.by_seed) < SEEDS
        if too_few or one.seeds_disagree:
            notes.append(f"{one.encoding} by seed: {by_seed_text(one)}")
    for heading in (*headings.values(), "p"):
        if not any(columns[heading]):
            del columns[heading]
    body = list(zip(*columns.values(), strict=True))
    title = f"length {group[0].length}: {group[0].setting}"
    return Table(list(columns), body, notes, title)


def _ratio(difference: float) -> str:
    ratio = perplexity_of(difference)
    if ratio is None:
        return "inf"
    return f"{ratio:.4f}" if ratio < 10 else f"{ratio:.3g}"


def by_seed_text(one: Comparison) -> str:
    """The difference of each seed, and whether they disagree in sign."""
    seeds = [f"{difference:+.4f} (seed {seed})" for seed, difference in one.by_seed.items()]
    text = ", ".join(seeds)
    return f"{text}; seeds disagree in sign" if one.seeds_disagree else text


def how_made(comparisons: Sequence[Comparison]) -> list[str]:
    """How the intervals and the marks were made, in sentences."""
    texts = [(one, one.over_text) for one in comparisons if one.over_text]
    claims = [one for one in comparisons if one.is_claim]
    others = [(one, text) for one, text in texts if not one.is_claim]
    lines = []
    if others:
        counts = sorted({len(one.by_seed) for one, _ in others})
        noun = "common seed" if counts[-1] == 1 else "common seeds"
        lines.append(
            f"these weights on this text: {_range(counts)} {noun}; an interval does not cover how"
            " other seeds would differ, so nothing is marked: a claim about an encoding needs"
            f" {SEEDS} seeds"
        )
    blocks = [(one, text) for one, text in others if text.unit == "blocks"]
    if blocks:
        lines.append(
            "differences of the same blocks of up to 512 targets; the error allows for correlated"
            " neighbours and for what the blocks of a window share"
        )
        single = sorted({one.length for one, text in blocks if text.windows == 1})
        if single:
            lengths = ", ".join(map(str, single))
            lines.append(
                f"one window at length {lengths}: the interval does not cover what all its blocks"
                " share"
            )
    windows = {one.length: text.estimate for one, text in others if text.unit == "windows"}
    if windows:
        batches = _range(sorted({estimate.block for estimate in windows.values()}))
        sample = "windows" if batches == "1" else f"overlapping batches of {batches} windows"
        lines.append(f"differences of the same windows; Student's t over {sample}")
        few = [f"{one.n} at length {length}" for length, one in windows.items() if one.n < FEW]
        if few:
            lines.append(
                f"few windows ({', '.join(few)}): where neighbours correlate, their intervals cover"
                " less than 95 %; measure again: evaluate.py now writes losses by block, a larger"
                " sample"
            )
    if claims:
        tests = sum(one.p is not None for one in claims)
        counts = _range(sorted({len(one.by_seed) for one in claims}))
        reference = claims[0].reference
        lines += [
            f"over seeds: differences of the same seeds ({counts}), Student's t over seeds"
            f" (from {SEEDS} common seeds on)",
            f"p: two-sided, Holm's correction for {tests} comparisons; {ALPHA:g} is significant",
            f"{WORSE} {reference} is significantly better, {BETTER} significantly worse;"
            " ± std over seeds",
        ]
    tokens = [text.estimate.n_eff * text.tokens for _, text in texts if text.estimate.n_eff]
    if tokens:
        units = " or ".join(dict.fromkeys(text.unit for _, text in texts))
        counts = [f"{math.floor(count):,}" for count in (min(tokens), max(tokens))]
        lines.append(
            f"n_eff: the number of independent {units} that would give the same error"
            f" ({' to '.join(dict.fromkeys(counts))} tokens)"
        )
    if len({one.seeds for one in comparisons}) > 1:
        lines.append(
            "perplexity is the mean over the seeds of an encoding,"
            " the difference over those that both have"
        )
    return lines


def _range(values: Sequence[int]) -> str:
    """The first and the last of sorted values: 2, or 2 to 13."""
    return " to ".join(str(end) for end in dict.fromkeys((values[0], values[-1])))
