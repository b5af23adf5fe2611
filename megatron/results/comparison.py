"""Encodings against one of them, window by window and seed by seed: differences with intervals, and what they mean."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from megatron.errors import UserError
from megatron.results.labels import kinds as rows_by_kind
from megatron.results.labels import select
from megatron.results.row import VARIANT, Row, by_setting, last_of_each, place_of
from megatron.results.statistics import Estimate, holm, mean_of, mean_over_seeds, perplexity_of
from megatron.results.table import (
    aligned,
    attention_inputs,
    cell,
    in_markdown,
    notes,
    setting,
    spread,
    with_notes,
)

ALPHA = 0.05
FEW = 20  # windows, below which an interval covers less than it says (docs/evaluation.md)
SEEDS = 3  # from so many common seeds on, runs are compared by seed
WORSE, BETTER = "†", "‡"


@dataclass(frozen=True)
class Comparison:
    """An encoding at one length, and its loss minus that of the reference, in nats; or the reason why there is none.

    perplexity: the mean over seeds, std: over seeds, None for one; difference: over `unit`, seeds or windows;
    windows: the same difference over windows, for what the text is worth; p: Holm's, over all comparisons of the call
    """

    setting: str
    length: int
    encoding: str
    reference: str
    seeds: tuple[Any, ...]
    perplexity: float | None
    std: float | None
    tokens_per_window: float
    difference: Estimate | None = None
    unit: str | None = None
    windows: Estimate | None = None
    p: float | None = None
    reason: str | None = None

    @property
    def mark(self) -> str:
        """† where the reference is significantly better, as in KERPLE's table 3, ‡ where this encoding is."""
        if self.difference is None or self.p is None or self.p >= ALPHA:
            return ""
        return WORSE if self.difference.mean > 0 else BETTER

    @property
    def interval(self) -> tuple[float, float] | None:
        return self.difference.interval() if self.difference else None

    def plain(self) -> dict[str, Any]:
        """For JSON: ratio is that of the perplexities, the intervals have 95 %."""
        names = (
            "setting",
            "length",
            "encoding",
            "reference",
            "seeds",
            "perplexity",
            "std",
            "unit",
            "p",
            "mark",
            "reason",
        )
        found = {name: getattr(self, name) for name in names}
        if self.difference is None:
            return found
        low, high = self.interval or (None, None)
        return found | {
            "difference": self.difference.mean,
            "interval": [low, high],
            "ratio": perplexity_of(self.difference.mean),
            "ratio_interval": [None if end is None else perplexity_of(end) for end in (low, high)],
            "n_eff_windows": self.windows.n_eff if self.windows else None,
            "block": self.windows.block if self.windows else None,
        }


def compared(kinds: Mapping[str, Sequence[Row]], against: str | None = None) -> list[Comparison]:
    """Every encoding at every length of every setting against one: `against` or the first; UserError where nothing can
    be paired. kinds: rows by encoding, as `encodings` finds them.
    """
    reference = next(iter(kinds)) if against is None else select(against, kinds)
    found = []
    for place in dict.fromkeys(place_of(row) for kind in kinds.values() for row in kind):
        here = {
            label: [row for row in kind if place_of(row) == place] for label, kind in kinds.items()
        }
        shared = attention_inputs([row for rows in here.values() for row in rows])
        for label in here:
            if here[label]:
                one = _compared(label, here[label], reference, here[reference])
                found.append(replace(one, setting=", ".join([one.setting, *shared])))
    others = [one for one in found if one.encoding != reference]
    if others and not any(one.difference for one in others):
        reasons = "\n  ".join(
            dict.fromkeys(f"{one.encoding} at {one.length}: {one.reason}" for one in others)
        )
        raise UserError(f"nothing can be compared with {reference}:\n  {reasons}")
    known = [number for number, one in enumerate(found) if one.p is not None]
    for number, p in zip(known, holm([found[number].p or 0.0 for number in known]), strict=True):
        found[number] = replace(found[number], p=p)
    return found


def encodings(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of each kind by label, whatever the seed; UserError where a seed was measured twice."""
    kinds = rows_by_kind(rows)
    for label, group in kinds.items():
        runs: dict[tuple, Row] = {}
        for row in group:
            first = runs.setdefault((*place_of(row), row.get("seed")), row)
            if first is not row:
                both = " and ".join(
                    f"{one.get('checkpoint')} (config {one['config_hash']})" for one in (first, row)
                )
                raise UserError(
                    f"{label}: seed {row.get('seed')} is there twice at length {row['length']}: {both}"
                    " - give the results of one of them"
                )
    return kinds


def over_seeds(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """A table for each text and protocol: one line per encoding, perplexity as mean ± standard deviation over seeds.

    n/a where a seed has no number: a mean is over all of them or none.
    """
    parts = []
    for group in by_setting(rows).values():
        lengths, trained = (
            sorted({row["length"] for row in group}),
            {row.get("train_length") for row in group},
        )
        body = []
        for label, kind in encodings(last_of_each(group)).items():
            cells = [
                _mean([row["perplexity"] for row in kind if row["length"] == length])
                for length in lengths
            ]
            body.append([label, str(len({row.get("seed") for row in kind})), *cells])
        head = [
            "pos_emb",
            "seeds",
            *(f"{length}*" if length in trained else str(length) for length in lengths),
        ]
        below = [*notes(group, each_run=False), "mean ± standard deviation over seeds"]
        parts.append(with_notes(head, body, below, markdown=markdown))
    return "\n\n".join(parts)


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "n/a"
    mean = cell(fmean(known)) if known else ""
    return f"{mean} {spread(mean, float(np.std(known, ddof=1)))}" if len(known) > 1 else mean


def _compared(label: str, ours: list[Row], reference: str, theirs: list[Row]) -> Comparison:
    values = [row["perplexity"] for row in ours if row["perplexity"] is not None]
    shown = Comparison(
        setting([ours[0] | dict.fromkeys(VARIANT)]),
        ours[0]["length"],
        label,
        reference,
        tuple(row.get("seed") for row in ours),
        fmean(values) if len(values) == len(ours) else None,
        float(np.std(values, ddof=1)) if len(values) == len(ours) > 1 else None,
        ours[0]["tokens"] / ours[0]["windows"],
    )
    if label == reference:
        return replace(
            shown, reason=next((row.get("reason") for row in ours if row["loss"] is None), None)
        )
    ours, theirs = _of_common_seeds(ours, theirs)
    reason = _unpaired(ours, theirs, reference)
    if reason:
        return replace(shown, reason=reason)
    windows = _over_windows(ours, theirs)
    pairs = [[(row.get("seed"), row["text"]) for row in rows] for rows in (ours, theirs)]
    if len(ours) < SEEDS or pairs[0] != pairs[1]:
        return replace(shown, difference=windows, unit="windows", windows=windows, p=windows.p)
    differences = [a["loss"] - b["loss"] for a, b in zip(ours, theirs, strict=True)]
    seeds = mean_over_seeds(differences)
    return replace(shown, difference=seeds, unit="seeds", windows=windows, p=seeds.p)


def _of_common_seeds(ours: list[Row], theirs: list[Row]) -> tuple[list[Row], list[Row]]:
    """Both in the order of the seeds that both have; all of both where there is none."""
    by_seed = [{row.get("seed"): row for row in rows} for rows in (ours, theirs)]
    common = [seed for seed in by_seed[0] if seed in by_seed[1]]
    return (
        ([by_seed[0][seed] for seed in common], [by_seed[1][seed] for seed in common])
        if common
        else (ours, theirs)
    )


def _unpaired(ours: list[Row], theirs: list[Row], reference: str) -> str | None:
    """Why these rows are no pairs, or None."""
    if not theirs:
        return f"{reference} was not measured there, on as many tokens"
    for row in (*ours, *theirs):
        if row["loss"] is None:
            return f"{row['pos_emb']}: {row.get('reason') or 'no loss'}"
        if not row.get("window_losses") or not row.get("text"):
            return f"{row['pos_emb']}: no losses by window in its results - measure it again with evaluate.py"
    texts = [{row["text"] for row in rows} for rows in (ours, theirs)]
    if texts[0] != texts[1]:
        return f"it was scored on other text than {reference} - evaluate both on the same data_path, split and lengths"
    return None


def _over_windows(ours: Iterable[Row], theirs: Iterable[Row]) -> Estimate:
    """The mean difference, window by window; windows of one text are averaged over the runs that have it."""
    by_text: list[dict[str, list[Row]]] = [{}, {}]
    for found, rows in zip(by_text, (ours, theirs), strict=True):
        for row in rows:
            found.setdefault(row["text"], []).append(row)
    differences, weights = [], []
    for text, first in by_text[0].items():
        means = [
            np.mean([row["window_losses"] for row in found[text]], axis=0) for found in by_text
        ]
        differences.append(means[0] - means[1])
        weights.append(
            first[0].get("window_tokens")
            or np.full(len(means[0]), first[0]["tokens"] / first[0]["windows"])
        )
    return mean_of(np.concatenate(differences), np.concatenate(weights))


def tables(found: Sequence[Comparison], *, markdown: bool = False) -> str:
    """A table for each setting and length, and beneath them how the numbers were made."""
    parts = []
    for place in dict.fromkeys((one.setting, one.length) for one in found):
        group = [one for one in found if (one.setting, one.length) == place]
        head = [
            "encoding",
            "seeds",
            "perplexity",
            f"loss - {group[0].reference} [95 %]",
            "ratio [95 %]",
            "p",
            "n_eff",
        ]
        body = [_cells(one) for one in group]
        lines = in_markdown(head, body) if markdown else aligned(head, body)
        reasons = [f"{one.encoding}: {one.reason}" for one in group if one.reason]
        parts.append(
            "\n".join(
                [f"length {place[1]}: {place[0]}", *([""] if markdown else []), *lines, *reasons]
            )
        )
    return "\n\n".join([*parts, ("  \n" if markdown else "\n").join(how_made(found))])


def _cells(one: Comparison) -> list[str]:
    perplexity = cell(one.perplexity)
    perplexity += f" {spread(perplexity, one.std)}" if one.std is not None else ""
    seeds = str(len({*one.seeds}))
    if one.difference is None:
        return [one.encoding, seeds, perplexity, "", "", "", ""]
    difference, ratio = f"{one.difference.mean:+.4f}", _ratio(one.difference.mean)
    if one.interval:
        difference += " [{:+.4f}, {:+.4f}]".format(*one.interval)
        ratio += f" [{', '.join(map(_ratio, one.interval))}]"
    p = "" if one.p is None else f"{one.p:.4f}" if one.p >= 1e-4 else "<0.0001"
    worth = one.windows.n_eff if one.windows else None
    n_eff = (
        "" if worth is None or one.windows is None else f"{worth:.0f} of {one.windows.n} windows"
    )
    return [one.encoding, seeds, one.mark + perplexity, difference, ratio, p, n_eff]


def _ratio(difference: float) -> str:
    ratio = perplexity_of(difference)
    return "inf" if ratio is None else f"{ratio:.4f}" if ratio < 10 else f"{ratio:.3g}"


def how_made(found: Sequence[Comparison]) -> list[str]:
    """How the intervals and the marks were made, in sentences."""
    reference, units = found[0].reference, {one.unit for one in found}
    blocks = sorted({one.windows.block for one in found if one.windows})
    tokens = [
        one.windows.n_eff * one.tokens_per_window
        for one in found
        if one.windows and one.windows.n_eff
    ]
    lines = []
    if "windows" in units:
        lines.append(
            "differences of the same windows; Student's t over overlapping blocks of"
            f" {' to '.join(map(str, _ends(blocks)))} neighbouring windows; about these weights: another seed may"
            " differ by more"
        )
    counts = {(one.length, one.windows.n) for one in found if one.unit == "windows" and one.windows}
    few = sorted(count for count in counts if count[1] < FEW)
    if few:
        places = ", ".join(f"{windows} at length {length}" for length, windows in few)
        lines.append(
            f"few windows ({places}): where neighbours are alike, their intervals cover less than 95 %"
        )
    if "seeds" in units:
        lines.append(
            f"differences of the same seeds, Student's t over seeds (from {SEEDS} common seeds on)"
        )
    if tokens:
        ends = " to ".join(
            f"{count:,.0f}" for count in _ends(sorted({math.floor(count) for count in tokens}))
        )
        lines.append(f"n_eff: independent windows that would give the same error; {ends} tokens")
    tests = sum(one.p is not None for one in found)
    lines.append(
        f"p: two-sided, Holm's correction for {tests} comparisons; {ALPHA:g} is significant"
    )
    lines.append(
        f"{WORSE} {reference} is significantly better, {BETTER} significantly worse; ± std over seeds"
    )
    if len({one.seeds for one in found}) > 1:
        lines.append(
            "perplexity is the mean over the seeds of an encoding, the difference over those that both have"
        )
    return lines


def _ends(values: Sequence[Any]) -> list[Any]:
    return list(dict.fromkeys((values[0], values[-1]))) if values else []
