"""Comparisons as tables, with sentences on how their numbers were made."""

from collections.abc import Iterable, Sequence

from megatron.results.comparison import ALPHA, BETTER, SEEDS, WORSE, Comparison
from megatron.results.statistics import corrected_for, perplexity_of
from megatron.results.table import BITS, Table, cell, from_to, with_spread

FEW = 20  # windows, below which an interval over windows covers less than 95 %
# What an interval speaks about: its heading, by whether it is a claim.
HEADINGS = {True: "95 %, over seeds", False: "95 %, these weights on this text"}


def tables(
    comparisons: Sequence[Comparison], *, form: str = "text", bits_per_byte: bool = False
) -> str:
    """A table for each setting and length, and beneath them how the numbers were made.

    form: text, markdown or latex
    bits_per_byte: with a column of them
    """
    shown = tables_of(comparisons, bits_per_byte=bits_per_byte)
    line_break = {"text": "\n", "markdown": "  \n", "latex": "\n% "}[form]
    notes = line_break.join(["", *how_made(comparisons)]).lstrip()
    return "\n\n".join([*(table.written(form) for table in shown), notes])


def tables_of(comparisons: Sequence[Comparison], *, bits_per_byte: bool = False) -> list[Table]:
    """A table for each setting, length and reference."""
    places: dict[tuple[str, int, str], list[Comparison]] = {}
    for pair in comparisons:
        places.setdefault((pair.setting, pair.length, pair.reference), []).append(pair)
    return [_table(group, bits_per_byte) for group in places.values()]


def _table(pairs: Sequence[Comparison], bits_per_byte: bool) -> Table:
    lines, notes = [], []
    for pair in pairs:
        line = {"encoding": pair.encoding, "seeds": str(len(pair.rows))}
        line["perplexity"] = pair.mark + with_spread(cell, *pair.spread("perplexity"))
        if bits_per_byte:
            line["bits per byte"] = with_spread(BITS.form, pair.spread("bits_per_byte")[0], None)
        lines.append(line)
        if pair.reason:
            notes.append(f"{pair.encoding}: {pair.reason}")
        if pair.difference is None:
            continue
        estimate, by_seed = pair.difference.estimate, pair.difference.by_seed
        line[f"loss - {pair.reference}"] = f"{estimate.mean:+z.4f}"
        interval = estimate.interval() or ()
        line[HEADINGS[pair.is_claim]] = _in_brackets([f"{bound:+z.4f}" for bound in interval])
        ratios = [_ratio(estimate.mean), _in_brackets(map(_ratio, interval))]
        line["ratio [95 %]"] = " ".join(ratios).strip()
        if pair.p is not None:
            line["p"] = f"{pair.p:.4f}" if pair.p >= 1e-4 else "<0.0001"
        elif estimate.n_eff is not None:
            line["n_eff"] = f"{estimate.n_eff:.0f} of {estimate.n} {pair.difference.unit}"
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


def _in_brackets(bounds: Iterable[str]) -> str:
    text = ", ".join(bounds)
    return f"[{text}]" if text else ""


def _ratio(difference: float) -> str:
    ratio = perplexity_of(difference)
    if ratio is None:
        return "inf"
    return f"{ratio:.4f}" if ratio < 10 else f"{ratio:.3g}"


def how_made(comparisons: Sequence[Comparison]) -> list[str]:
    """How the intervals and the marks were made, in sentences."""
    lines = []
    differences = [pair.difference for pair in comparisons if pair.difference]
    claims = [difference for difference in differences if difference.is_claim]
    weights = [difference for difference in differences if not difference.is_claim]
    if weights:
        counts = sorted(len(difference.by_seed) for difference in weights)
        lines.append(
            f"these weights on this text (common seeds: {from_to(counts[0], counts[-1])}): an"
            " interval does not cover how other seeds would differ, so nothing is marked: a claim"
            f" about an encoding needs {SEEDS} seeds"
        )
        tokens = sorted((each.estimate.n_eff or 0) * each.tokens for each in weights)
        size = from_to(f"{tokens[0]:,.0f}", f"{tokens[-1]:,.0f}")
        lines.append(f"n_eff: independent pieces that would give the same error ({size} tokens)")
    units = {difference.unit for difference in weights}
    if "blocks" in units:
        lines.append(
            "differences of the same blocks of up to 512 targets; the error accounts for the"
            " correlation of neighbouring blocks and of the blocks of one window, but of a single"
            " window not for the difference between windows"
        )
    if "windows" in units:
        few = f"; below {FEW} windows, intervals cover less than 95 % where neighbours correlate"
        fewest = min(each.estimate.n for each in weights if each.unit == "windows")
        lines.append(
            "differences of the same windows; Student's t over overlapping batches of them"
            + (few if fewest < FEW else "")
        )
    if claims:
        counts = sorted(len(difference.by_seed) for difference in claims)
        lines += [
            f"over seeds: differences of the same {from_to(counts[0], counts[-1])} seeds,"
            " Student's t over seeds",
            f"p: two-sided{corrected_for(len(claims))}; {ALPHA:g} is significant",
            f"{WORSE} {comparisons[0].reference} is significantly better, {BETTER} significantly"
            " worse; ± std over seeds",
        ]
    if len({len(pair.rows) for pair in comparisons}) > 1:
        lines.append(
            "perplexity is the mean over the seeds of an encoding,"
            " the difference over those that both have"
        )
    return lines
