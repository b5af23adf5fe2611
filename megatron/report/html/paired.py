"""Encodings compared window by window: against one of them, and which of them nothing tells from the lowest."""

from collections.abc import Sequence

from megatron.errors import UserError
from megatron.report.groups import Group, Interval, summary
from megatron.report.html.elements import Cell, items, paragraph, table
from megatron.results.comparison import Comparison, compared, how_made
from megatron.results.labels import matching, select
from megatron.results.row import Row
from megatron.results.statistics import perplexity_of

ABOUT = (
    "Loss minus that of {reference} on the same windows, in nats, with its 95 % interval; the pointer tells the ratio"
    " of the perplexities, p and what the windows are worth."
)


def comparisons(found: Sequence[Group], reference: str | None) -> tuple[list[Comparison], str]:
    """Every encoding against the reference, and where there are several but nothing can be paired the reason."""
    kinds = {
        group.label: [row for rows in group.rows.values() for row in rows if _whole(row)]
        for group in found
    }
    if len(kinds) < 2 or reference is None:
        return [], ""
    try:
        return compared(kinds, reference), ""
    except UserError as fault:
        return [], str(fault)


def intervals(told: Sequence[Comparison]) -> dict[tuple[str, int], Interval]:
    """Of each difference in loss, from its mean, by (encoding, length)."""
    return {
        (one.encoding, one.length): Interval(*(end - one.difference.mean for end in one.interval))
        for one in told
        if one.difference and one.interval
    }


def paired(told: Sequence[Comparison], reason: str) -> str:
    """A table of differences from one encoding, and how they were made; where there are none the reason."""
    if not told:
        return paragraph(reason) if reason else ""
    reference = told[0].reference
    lengths = sorted({one.length for one in told})
    by_place = {(one.encoding, one.length): one for one in told}
    others = [label for label in dict.fromkeys(one.encoding for one in told) if label != reference]
    body = [[Cell(label), *(_cell(by_place.get((label, n))) for n in lengths)] for label in others]
    head = [f"loss - {reference}", *map(str, lengths)]
    return paragraph(ABOUT.format(reference=reference)) + table(head, body) + items(how_made(told))


def reference_of(found: Sequence[Group], against: str | None) -> str | None:
    """What `--against` means among these groups; without it or a match, the lowest of them.

    The lowest at the longest length that has a number. UserError where several groups match.
    """
    rows = {group.label: group.all_rows for group in found}
    if against is not None and matching(against, rows):
        return select(against, rows)
    lengths = sorted({length for group in found for length in group.rows}, reverse=True)
    return next((label for length in lengths if (label := lowest(found, length))), None)


def _whole(row: Row) -> bool:
    """Whether a row is not the beginning of longer windows, whose losses by window it has not."""
    return row["length"] == (row.get("position_edges") or [row["length"]])[-1]


def lowest(found: Sequence[Group], length: int) -> str | None:
    """The encoding with the lowest mean perplexity at a length."""
    means = {
        group.label: one.mean for group in found if (one := summary(group.rows.get(length, [])))
    }
    return min(means, key=lambda label: means[label], default=None)


def not_told_apart(found: Sequence[Group], length: int) -> set[str]:
    """The lowest at a length and all whose interval of the difference from it holds 0; nobody where a number cannot be
    tested against the lowest: what is not bold would look worse."""
    best = lowest(found, length)
    here = [
        Group(group.label, {length: group.rows[length]}) for group in found if length in group.rows
    ]
    told, _ = comparisons(here, best)
    others = [
        (one.encoding, one.interval)
        for one in told
        if one.encoding != best and one.perplexity is not None
    ]
    if best is None or not others or any(interval is None for _, interval in others):
        return set()
    return {best, *(label for label, interval in others if interval and interval[0] <= 0)}


def _cell(one: Comparison | None) -> Cell:
    if one is None or one.difference is None:
        return Cell("-", kind="missing", title=(one and one.reason) or "not measured")
    interval = "[{:+.3f}, {:+.3f}]".format(*one.interval) if one.interval else ""
    told = [f"ratio {perplexity_of(one.difference.mean) or float('inf'):.4f}"]
    told += [f"p {one.p:.2g} over {one.unit}"] if one.p is not None else []
    if one.windows and one.windows.n_eff:
        told.append(f"{one.windows.n_eff:.0f} of {one.windows.n} windows")
    return Cell(
        f"{one.mark}{one.difference.mean:+.3f}",
        one.difference.mean,
        interval,
        "; ".join(told),
        "pair",
    )
