"""Rows of several runs by what was measured, and runs that differ in their seed alone as one."""

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from megatron.report.evidence import Evidence, Found
from megatron.report.figures.curves import Curve
from megatron.results.labels import axes_of, labels_of, with_sweeps
from megatron.results.row import SETTING, VARIANT, Row, kind_of, setting_of, with_facts
from megatron.results.statistics import half_octaves, mean_of

LARGE = 1.0  # nats: beyond it a difference by position is not drawn
ENOUGH = 128  # targets at positions before the first that a difference is drawn of


@dataclass(frozen=True)
class Group:
    """Runs of several seeds: a label, and the rows of every length in the order of the seeds."""

    label: str
    rows: dict[int, list[Row]]

    @property
    def first(self) -> Row:
        return next(iter(self.rows.values()))[0]

    @property
    def all_rows(self) -> list[Row]:
        return [row for rows in self.rows.values() for row in rows]

    @property
    def checkpoints(self) -> list[str]:
        return list(
            dict.fromkeys(row.get("checkpoint", "") for rows in self.rows.values() for row in rows)
        )

    @property
    def seeds(self) -> list[int]:
        return sorted(
            {
                row["seed"]
                for rows in self.rows.values()
                for row in rows
                if row.get("seed") is not None
            }
        )


class Interval(NamedTuple):
    """Of a difference in loss, from its mean."""

    low: float
    high: float


@dataclass(frozen=True)
class Summary:
    """Perplexity of a group at one length and between what it may lie: one standard deviation over seeds, or for one
    seed the interval over its windows; None where nothing is known of it."""

    mean: float
    std: float | None
    low: float | None
    high: float | None


def groups(rows: Sequence[Row], evidence: Found) -> list[Group]:
    """Runs that differ in their seed alone together. What a run was is read from its cell of a sweep, its configuration
    or, where not all runs with such rows have one, taken from its row; runs of one seed, or of other settings, are
    never one group."""
    rows = with_sweeps(rows)
    axes = axes_of(rows)
    by_kind: dict[str, list[Row]] = {}
    for row in rows:
        by_kind.setdefault(repr((kind_of(row, axes), setting_of(row))), []).append(row)
    by_settings: dict[str, list[Row]] = {}
    for kind, members in by_kind.items():
        settings = [_without_seed(_settings(row, evidence)) for row in members]
        use_settings = all(settings) and not any(row.get("cell") for row in members)
        for row, one in zip(members, settings, strict=True):
            key = kind + json.dumps(one, sort_keys=True, default=str) if use_settings else kind
            by_settings.setdefault(key, []).append(row)
    found: dict[str, list[Row]] = {}
    for key, members in by_settings.items():
        hashes = {(row.get("seed"), row["config_hash"]) for row in members}
        known = [_without_seed(one) for row in members if (one := _settings(row, evidence))]
        seeds_repeat = len({seed for seed, _ in hashes}) < len(hashes)
        mixed = seeds_repeat or any(one != known[0] for one in known)
        for row in members:
            found.setdefault(f"{key} {row['config_hash']}" if mixed else key, []).append(row)
    labels = labels_of([members[0] for members in found.values()])
    return [
        Group(label, _by_length(members))
        for label, members in zip(labels, found.values(), strict=True)
    ]


def models(rows: Sequence[Row], evidence: Found, *, apart: Sequence[str] = ()) -> list[Group]:
    """The same whatever text and protocol: what was trained, not what was measured; but for the keys `apart`."""
    measured = {key: None for key in (*SETTING, *VARIANT) if key not in apart}
    return groups([with_facts(row, measured) for row in rows], evidence)


def _settings(row: Row, evidence: Found) -> dict[str, Any]:
    return evidence[row["checkpoint"]].settings if row.get("checkpoint") in evidence else {}


def _without_seed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != "seed"}


def _by_length(rows: Sequence[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["length"], row.get("seed") or 0)):
        found.setdefault(row["length"], []).append(row)
    return found


def summary(rows: Sequence[Row]) -> Summary | None:
    """Of the rows of one length; None where a seed has no number, so that a mean is always over all of them."""
    values = [row["perplexity"] for row in rows]
    if not values or any(value is None for value in values):
        return None
    mean = statistics.fmean(values)
    if len(values) > 1:
        std = statistics.stdev(values)
        # A logarithmic axis has no place for a band that reaches below zero.
        return Summary(mean, std, max(mean - std, 0.01 * mean), mean + std)
    return Summary(mean, None, *(interval(rows[0]) or (None, None)))


def interval(row: Row) -> tuple[float, float] | None:
    """95 % interval of one row's perplexity from the losses of its windows; None of fewer than 8."""
    losses = row.get("window_losses") or []
    ends = mean_of(losses, row.get("window_tokens")).interval() if len(losses) >= 8 else None
    return ends and (math.exp(ends[0]), math.exp(ends[1]))


def perplexity_curve(
    group: Group, paired: Mapping[tuple[str, int], Interval] | None = None
) -> Curve:
    """Mean over seeds at each length, with a band where every length has one.

    It is a standard deviation over seeds or, of one seed, the interval over its windows; where `paired` is given, that
    of the difference in loss for (label, length) instead.
    """
    known = [(length, one) for length, rows in group.rows.items() if (one := summary(rows))]
    lengths, means = [length for length, _ in known], [one.mean for _, one in known]
    ends = []
    for length, one in known:
        low, high = one.low, one.high
        if one.std is None and paired is not None:
            told = paired.get((group.label, length))
            low, high = (
                (one.mean * math.exp(told.low), one.mean * math.exp(told.high))
                if told
                else (None, None)
            )
        if low is not None and high is not None:
            ends.append((low, high))
    whole = len(ends) == len(known)
    low, high = ([low for low, _ in ends], [high for _, high in ends]) if whole else (None, None)
    return Curve(group.label, lengths, means, low, high)


def position_curve(group: Group) -> Curve:
    """Loss by position from the longest row that has it, over half octaves, mean over seeds; empty without one."""
    for rows in reversed(group.rows.values()):
        told = [row for row in rows if row.get("position_losses")]
        edges = {tuple(row["position_edges"]) for row in told}
        if len(edges) == 1 and len(told) == len(rows):
            found = [half_octaves(row["position_edges"], row["position_losses"]) for row in told]
            return _banded(
                group.label, found[0][0], [*zip(*(losses for _, losses in found), strict=True)]
            )
    return Curve(group.label, [], [])


def position_differences(found: Sequence[Group], reference: str) -> list[Curve]:
    """Loss by position minus the reference's on the same text, without the text's own ups and downs: means over half
    octaves of ENOUGH targets, up to where it exceeds LARGE; empty where a group has no such losses."""
    means = {group.label: _by_position(group) for group in found}
    known = means.get(reference)
    curves = []
    for label, one in means.items():
        if known is None or one is None or label == reference or one[:2] != known[:2]:
            curves.append(Curve(label, [], []))
            continue
        edges, _, losses, windows = one
        first = next((n for n, at in enumerate(edges) if at * windows >= ENOUGH), 0)
        at, values = half_octaves(edges[first:], np.subtract(losses, known[2])[first:])
        end = next(
            (number for number, value in enumerate(values) if abs(value) > LARGE), len(values)
        )
        curves.append(Curve(label, at[:end], values[:end]))
    return curves


def _by_position(group: Group) -> tuple[list[int], list[Any], list[float], int] | None:
    """(edges, texts, losses by position as means over seeds, windows) of the longest rows; None where one has none."""
    rows = group.rows[max(group.rows)]
    edges = [row.get("position_edges") for row in rows]
    texts = sorted({row.get("text") or "" for row in rows})
    if not edges[0] or any(one != edges[0] for one in edges) or not texts[0]:
        return None
    return (
        edges[0],
        texts,
        [*np.mean([row["position_losses"] for row in rows], axis=0)],
        rows[0]["windows"],
    )


def training_curve(group: Group, evidence: Found, kind: str) -> Curve | None:
    """Loss by step, mean over the seeds that logged the same steps; kind is train or valid."""
    of_seeds = []
    for name in group.checkpoints:
        told = (
            [one for one in evidence[name].metrics if one.get("kind") == kind]
            if name in evidence
            else []
        )
        of_seeds += (
            [{one["step"]: one["loss"] for one in told if one.get("loss") is not None}]
            if told
            else []
        )
    steps = sorted(set.intersection(*map(set, of_seeds))) if of_seeds else []
    return (
        _banded(group.label, steps, [[one[step] for one in of_seeds] for step in steps])
        if steps
        else None
    )


def _banded(label: str, at: Sequence[float], columns: Sequence[Sequence[float]]) -> Curve:
    """Losses of every seed at every place: their mean, and one standard deviation to either side."""
    means = [statistics.fmean(column) for column in columns]
    if any(len(column) < 2 for column in columns):
        return Curve(label, at, means)
    ends = [
        (mean - std, mean + std)
        for mean, std in zip(means, map(statistics.stdev, columns), strict=True)
    ]
    return Curve(label, at, means, [low for low, _ in ends], [high for _, high in ends])


def differing(
    found: Sequence[Group], evidence: Found, of: Callable[[Evidence], dict[str, Any]]
) -> dict[str, list[str]]:
    """Keys in which groups differ: {key: value of each group as text}; "?" where a group's configuration is unknown."""
    told = [
        next((of(evidence[c]) for c in group.checkpoints if c in evidence and of(evidence[c])), {})
        for group in found
    ]
    keys = dict.fromkeys(key for one in told for key in one if key != "seed")
    table = {key: [_plain(one[key]) if key in one else "?" for one in told] for key in keys}
    return {key: values for key, values in table.items() if len(set(values) - {"?"}) > 1}


def _plain(value: Any) -> str:
    return json.dumps(value, default=str).replace('"', "")
