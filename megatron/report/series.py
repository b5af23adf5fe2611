"""Curves of groups: means over seeds with their bands, by length, position and step."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from megatron.report.evidence import Found
from megatron.report.figures.curves import Curve, by_position
from megatron.report.groups import Group
from megatron.results.row import Row
from megatron.results.statistics import half_octaves, mean_of

LARGE = 1.0  # nats: beyond it a difference by position is not drawn
ENOUGH = 128  # targets at positions before the first at which a difference is drawn
FEW_WINDOWS = 8  # with fewer a row has no interval
SEEDS, WINDOWS, PAIRED = "seeds", "windows", "paired"  # what the band of a curve is


class Interval(NamedTuple):
    """The ends of the interval of a difference in loss, measured from its mean."""

    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """The mean perplexity of a group at one length, and the band around it.

    The band is one standard deviation over seeds or, for one seed, the interval over its windows;
    low and high are None where neither is known.
    """

    mean: float
    std: float | None
    low: float | None
    high: float | None


class ByPosition(NamedTuple):
    """Losses by position of one group: means over seeds between edges."""

    edges: list[int]
    texts: list[str]
    losses: list[float]
    windows: int


def summary(rows: Sequence[Row]) -> Summary | None:
    """Of the rows of one length; None where a seed has no number: a mean is over all seeds."""
    values = [row["perplexity"] for row in rows]
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    mean = statistics.fmean(known)
    if len(known) > 1:
        std = statistics.stdev(known)
        # A logarithmic axis has no place for a band that goes below zero.
        return Summary(mean, std, max(mean - std, 0.01 * mean), mean + std)
    low, high = interval(rows[0]) or (None, None)
    return Summary(mean, None, low, high)


def interval(row: Row) -> tuple[float, float] | None:
    """95 % interval of a row's perplexity over its windows; None for fewer than 8 windows."""
    losses = row.get("window_losses") or []
    if len(losses) < FEW_WINDOWS:
        return None
    ends = mean_of(losses, row.get("window_tokens")).interval()
    return (math.exp(ends[0]), math.exp(ends[1])) if ends else None


def perplexity_curve(
    group: Group, paired: Mapping[tuple[str, int], Interval] | None = None
) -> Curve:
    """Mean over seeds at each length, with a band where every length has one.

    The band is a standard deviation over seeds or, for one seed, the interval over its windows. If
    `paired` is given, it is for one seed the interval of the difference in loss at (label, length).
    """
    lengths, means, bands = [], [], []
    for length, rows in group.rows.items():
        one = summary(rows)
        if one is None:
            continue
        lengths.append(length)
        means.append(one.mean)
        difference = None if paired is None else paired.get((group.label, length))
        bands.append(_band(one, difference, compared=paired is not None))
    kinds = {kind for kind, _, _ in bands}
    curve = replace(_empty(group), at=lengths, values=means)
    if "" in kinds:
        return curve
    low, high = [low for _, low, _ in bands], [high for _, _, high in bands]
    return replace(curve, low=low, high=high, band=" ".join(sorted(kinds)))


def _band(one: Summary, difference: Interval | None, *, compared: bool) -> tuple[str, float, float]:
    """(what the band is, low, high) at one length; "" where there is none."""
    nothing = "", math.nan, math.nan
    if one.std is None and compared:
        if difference is None:
            return nothing
        low = one.mean * math.exp(difference.low)
        high = one.mean * math.exp(difference.high)
        return PAIRED, low, high
    if one.low is None or one.high is None:
        return nothing
    kind = WINDOWS if one.std is None else SEEDS
    return kind, one.low, one.high


def position_curve(group: Group) -> Curve:
    """Loss by position from the longest row that has it, over half octaves, mean over seeds."""
    for rows in reversed(group.rows.values()):
        edges, losses = _common_losses(rows)
        if not edges:
            continue
        at, _ = half_octaves(edges, losses[0])
        of_seeds = []
        for of_seed in losses:
            _, means = half_octaves(edges, of_seed)
            of_seeds.append(means)
        columns = [*zip(*of_seeds, strict=True)]
        return _mean_curve(group, at, columns)
    return _empty(group)


def position_differences(found: Sequence[Group], reference: str) -> list[Curve]:
    """Loss by position minus the reference's on the same text, mean over seeds.

    Values are means over half octaves of ENOUGH targets or more. A curve ends where it exceeds
    LARGE; it is empty for the reference and for a group without losses on the same text.
    """
    by_label = {group.label: _by_position(group) for group in found}
    base = by_label.get(reference)
    curves = []
    for group in found:
        one = by_label[group.label]
        curve = _empty(group)
        if one is not None and base is not None and group.label != reference:
            same_text = (one.edges, one.texts) == (base.edges, base.texts)
            curve = _difference(group, one, base) if same_text else curve
        curves.append(curve)
    return curves


def _difference(group: Group, one: ByPosition, base: ByPosition) -> Curve:
    targets_before = [edge * one.windows for edge in one.edges]
    first = _first(targets_before, lambda count: count >= ENOUGH, otherwise=0)
    differences = np.subtract(one.losses, base.losses)
    at, values = half_octaves(one.edges[first:], differences[first:])
    end = _first(values, lambda value: abs(value) > LARGE, otherwise=len(values))
    return replace(_empty(group), at=at[:end], values=values[:end])


def _first(values: Sequence[float], suits: Callable[[float], bool], *, otherwise: int) -> int:
    """The index of the first value that suits."""
    for number, value in enumerate(values):
        if suits(value):
            return number
    return otherwise


def _by_position(group: Group) -> ByPosition | None:
    """Losses by position of the longest rows; None where one of these has none, or no text."""
    rows = group.rows[max(group.rows)]
    edges, losses = _common_losses(rows)
    texts = sorted({row.get("text") or "" for row in rows})
    if not edges or not texts[0]:
        return None
    means = np.mean(losses, axis=0)
    return ByPosition(edges, texts, means.tolist(), rows[0]["windows"])


def _common_losses(rows: Sequence[Row]) -> tuple[list[int], list[list[float]]]:
    """(edges, the losses of each row between them); empty where rows have none or other edges."""
    edges, _ = by_position(rows[0])
    losses = []
    for row in rows:
        own_edges, own_losses = by_position(row)
        if own_edges != edges or not own_losses:
            return [], []
        losses.append(own_losses)
    return edges, losses


def training_curve(group: Group, evidence: Found, kind: str) -> Curve | None:
    """Loss by step, mean over the seeds, at steps that all logged; kind is train or valid."""
    of_seeds = []
    for one in group.evidence(evidence):
        logged = {}
        for record in one.metrics:
            loss = record.get("loss")
            if record.get("kind") == kind and loss is not None:
                logged[record["step"]] = loss
        if logged:
            of_seeds.append(logged)
    if not of_seeds:
        return None
    steps = sorted(set.intersection(*map(set, of_seeds)))
    if not steps:
        return None
    return _mean_curve(group, steps, [[one[step] for one in of_seeds] for step in steps])


def _mean_curve(group: Group, at: Sequence[float], columns: Sequence[Sequence[float]]) -> Curve:
    """Means and standard deviations of columns; each column has the losses of the seeds."""
    means, low, high = [], [], []
    for column in columns:
        mean = statistics.fmean(column)
        std = statistics.stdev(column) if len(column) > 1 else 0.0
        means.append(mean)
        low.append(mean - std)
        high.append(mean + std)
    curve = replace(_empty(group), at=at, values=means)
    if any(len(column) < 2 for column in columns):
        return curve
    return replace(curve, low=low, high=high, band=SEEDS)


def _empty(group: Group) -> Curve:
    return Curve(group.label, [], [], encoding=group.encoding, variant=group.variant)
