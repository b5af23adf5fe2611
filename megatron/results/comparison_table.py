"""Comparisons as tables, with sentences on how their numbers were made."""

import contextlib
import math
from collections.abc import Sequence

from megatron.errors import UserError
from megatron.results.comparison import ABOUT, ALPHA, BETTER, SEEDS, WORSE, Comparison, compared
from megatron.results.labels import kinds
from megatron.results.row import Row, value_of, with_facts
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


AS_TRAINED = "as trained"
REPAIRS = (AS_TRAINED, "clipped", "log n", "clipped, log n", "window")
"""Su's 2 x 2 (docs/longer_texts.md), and the window that repairs both."""


def two_by_two(rows: Sequence[Row], title: str = "") -> Table | None:
    """Repaired attention against attention as trained, from rows of one text.

    A line for each encoding and length, with differences in loss and their 95 % intervals; None if
    no model was measured both ways. A window alone is no repair of one thing.
    """
    repair_of: dict[int, str] = {}  # by the id of a row without it
    models = []
    for row in rows:
        last = (row.get("train_length") or 0) - 1
        method, clip, window = (value_of(row, key) for key in ("method", "clip_distance", "window"))
        is_clipped = method == f"rerope,window={last}" or clip == last
        names = ["clipped"] if is_clipped else []
        names += ["log n"] if row.get("logn_scale") else []
        names += ["window"] if window != "none" else []
        name = ", ".join(names) or AS_TRAINED
        is_other = not is_clipped and (method, clip) != ("none", "none")
        if name in REPAIRS and window in ("none", last + 1) and not is_other:
            keys = ("window", "logn_scale", "clip_distance", "method")
            model = with_facts(row, dict.fromkeys(keys))
            repair_of[id(model)] = name
            models.append(model)

    lines = []
    interval_kinds = set()
    for label, members in kinds(models).items():
        by_repair: dict[str, list[Row]] = {}
        for row in members:
            by_repair.setdefault(repair_of[id(row)], []).append(row)
        if AS_TRAINED not in by_repair or by_repair.keys() <= {AS_TRAINED, "window"}:
            continue
        lines_of: dict[int, dict[str, str]] = {}
        with contextlib.suppress(UserError):  # no length has two numbers
            for pair in compared(by_repair, AS_TRAINED):
                text = cell(pair.perplexity)
                if pair.encoding != AS_TRAINED:
                    text = f"{pair.difference.mean:+z.4f}" if pair.difference else "n/a"
                if pair.interval:
                    text += " [{:+z.4f}, {:+z.4f}]".format(*pair.interval)
                    interval_kinds.add(ABOUT[pair.is_claim])
                line = lines_of.setdefault(pair.length, dict.fromkeys(REPAIRS, ""))
                line[pair.encoding] = text
        lines += [[label, str(length), *line.values()] for length, line in sorted(lines_of.items())]
    if not lines:
        return None
    notes = [
        "as trained: perplexity; others: loss minus that as trained, in nats: below 0 is better;"
        f" 95 % intervals: {' or '.join(sorted(interval_kinds))}",
        "clipped: no distance that was not trained; log n: scores scaled for the number of keys;"
        " window: distances and numbers of keys as in training",
    ]
    return Table(["pos_emb", "length", *REPAIRS], lines, notes, title)


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
