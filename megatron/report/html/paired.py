"""Encodings compared on the same text: with a reference, and with the lowest of a column."""

from collections.abc import Callable, Mapping, Sequence

from megatron.errors import UserError
from megatron.report.evidence import Gap
from megatron.report.groups import Group
from megatron.report.html.drawn import grouped
from megatron.report.html.elements import Cell, items, paragraph, table
from megatron.report.html.texts import BOLD, BY_SEED, NOT_BOLD, PAIRED
from megatron.report.series import Interval, summary
from megatron.results.comparison import SEEDS, Comparison, about, compared
from megatron.results.comparison_table import by_seed_text, how_made
from megatron.results.labels import matching, select
from megatron.results.row import Row
from megatron.results.statistics import perplexity_of


def comparisons(found: Sequence[Group], reference: str | None) -> tuple[list[Comparison], str]:
    """(every encoding against the reference, ""), or ([], why nothing can be paired).

    The reason is empty where there is nothing to compare.
    """
    if len(found) < 2 or reference is None:
        return [], ""
    kinds = {group.label: [row for row in group.all_rows if _is_whole(row)] for group in found}
    try:
        return compared(kinds, reference), ""
    except UserError as fault:
        return [], str(fault)


def intervals(compared_with: Sequence[Comparison]) -> dict[tuple[str, int], Interval]:
    """The interval of each difference in loss, from its mean: {(encoding, length): interval}."""
    found = {}
    for one in compared_with:
        if one.difference and one.interval:
            low, high = one.interval
            mean = one.difference.mean
            found[one.encoding, one.length] = Interval(low - mean, high - mean)
    return found


def paired(compared_with: Sequence[Comparison], reason: str) -> str:
    """A table of differences from the reference and how they were made, or the reason for none."""
    if not compared_with:
        return _explained(reason)
    reference = compared_with[0].reference
    subjects = dict.fromkeys(about(one.is_claim) for one in compared_with if one.difference)
    caption = PAIRED.format(reference=reference, about=" or ".join(subjects))
    differences = _table(f"loss - {reference}", compared_with, difference_cell)
    parts = [paragraph(caption), differences]
    if any(len(one.by_seed) > 1 and not one.is_claim for one in compared_with):
        by_seed = _table(f"each seed's loss - {reference}", compared_with, seeds_cell)
        parts += [paragraph(BY_SEED), by_seed]
    parts.append(items(how_made(compared_with)))
    return "".join(parts)


def _explained(reason: str) -> str:
    """Why nothing could be paired: the first line, then one line for each cause."""
    first, *lines = reason.splitlines() or [""]
    gaps = []
    for line in lines:
        where, _, cause = line.strip().partition(": ")
        gaps.append(Gap(where, cause))
    return paragraph(first) + items(grouped(gaps))


def _table(
    heading: str, compared_with: Sequence[Comparison], cell: Callable[[Comparison | None], Cell]
) -> str:
    """A line for each encoding but the reference, a column for each length."""
    lengths = sorted({one.length for one in compared_with})
    by_place = {(one.encoding, one.length): one for one in compared_with}
    body = []
    for label in dict.fromkeys(one.encoding for one in compared_with):
        if label != compared_with[0].reference:
            cells = [cell(by_place.get((label, length))) for length in lengths]
            body.append([Cell(label), *cells])
    return table([heading, *map(str, lengths)], body)


def reference_of(found: Sequence[Group], against: str | None) -> str | None:
    """What `--against` means among these groups; without it or a match, the lowest of them.

    The lowest at the longest length that has a number, of the groups with most seeds: only against
    several seeds can there be a claim about an encoding. UserError where several groups match.
    """
    rows = {group.label: group.all_rows for group in found}
    if against is not None and matching(against, rows):
        return select(against, rows)
    most = max((len(group.seeds) for group in found), default=0)
    trained_most = [group for group in found if len(group.seeds) == most]
    lengths = {length for group in trained_most for length in group.rows}
    for length in sorted(lengths, reverse=True):
        label = lowest(trained_most, length)
        if label is not None:
            return label
    return None


def _is_whole(row: Row) -> bool:
    """Whether a row is of whole windows: the beginnings of longer ones have no window losses."""
    edges = row.get("position_edges") or [row["length"]]
    return row["length"] == edges[-1]


def lowest(found: Sequence[Group], length: int) -> str | None:
    """The encoding with the lowest mean perplexity at a length."""
    means = {}
    for group in found:
        one = summary(group.rows.get(length, []))
        if one is not None:
            means[group.label] = one.mean
    return min(means, key=lambda label: means[label], default=None)


def as_low_as_the_lowest(found: Sequence[Group], length: int) -> set[str]:
    """The lowest at a length, and all whose interval of the difference from it contains 0.

    Empty where one has too few seeds for a claim, or no number that can be tested against the
    lowest: without bold it would look worse.
    """
    best = lowest(found, length)
    here = []
    for group in found:
        if length in group.rows:
            here.append(Group(group.label, {length: group.rows[length]}))
    compared_with, _ = comparisons(here, best)
    others = []
    for one in compared_with:
        if one.encoding != best and one.perplexity is not None:
            others.append(one)
    if best is None or not others or not all(one.is_claim for one in others):
        return set()
    close = {one.encoding for one in others if one.interval and one.interval[0] <= 0}
    return {best, *close}


def about_bold(found: Sequence[Group], bold: Mapping[int, set[str]]) -> str:
    """What bold means in a table of perplexities, or why nothing is bold. bold: by length"""
    if any(bold.values()):
        return BOLD
    too_few = any(len(group.seeds) < SEEDS for group in found)
    return NOT_BOLD.format(seeds=SEEDS) if too_few and len(found) > 1 else ""


def difference_cell(one: Comparison | None) -> Cell:
    """A difference with its mark and interval; on hover its ratio, p, seeds and n_eff."""
    if one is None or one.difference is None:
        reason = one.reason if one is not None else None
        return Cell("-", kind="missing", title=reason or "not measured")
    mean = one.difference.mean
    around = ""
    if one.interval is not None:
        low, high = one.interval
        around = f"[{low:+.3f}, {high:+.3f}]"
    return Cell(f"{one.mark}{mean:+.3f}", mean, around, "; ".join(_details(one, mean)))


def _details(one: Comparison, mean: float) -> list[str]:
    """What hovering over a difference shows."""
    ratio = perplexity_of(mean)
    details = ["ratio inf" if ratio is None else f"ratio {ratio:.4f}"]
    if one.p is not None:
        details.append(f"p {one.p:.2g} over {one.unit}")
    if len(one.by_seed) > 1:
        details.append(f"by seed: {by_seed_text(one)}")
    if one.over_text and one.over_text.estimate.n_eff:
        n = one.over_text.estimate.n
        n_eff = one.over_text.estimate.n_eff
        details.append(f"{n_eff:.0f} of {n} independent {one.over_text.unit}")
    return details


def seeds_cell(one: Comparison | None) -> Cell:
    """The difference of each seed, and whether they disagree in sign; hover for the seeds."""
    if one is None or not one.by_seed:
        return Cell("-", kind="missing", title="no seed that both have")
    text = ", ".join(f"{difference:+.3f}" for difference in one.by_seed.values())
    note = "seeds disagree in sign" if one.seeds_disagree else ""
    mean = one.difference.mean if one.difference else None
    return Cell(text, mean, note, by_seed_text(one))
