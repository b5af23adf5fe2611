"""Encodings against one of them, length by length: differences, intervals, claims."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from megatron.errors import UserError
from megatron.results.labels import axes_of, labels_of, other_differences, select
from megatron.results.row import BLOCK, COMPARED, LONGPPL, Row, place_of, value_of
from megatron.results.statistics import (
    Estimate,
    holm,
    mean_of,
    mean_of_blocks,
    mean_over_seeds,
    perplexity_of,
)
from megatron.results.table import mean_and_std, setting

ALPHA = 0.05
SEEDS = 3  # common seeds that a claim about an encoding needs
WORSE, BETTER = "†", "‡"
OTHER_KEYS = "its key tokens are not those of {} - compare at one length, and give both one --judge"
# What an interval speaks about: its heading, by whether it is a claim.
ABOUT = {True: "over seeds", False: "these weights on this text"}


@dataclass(frozen=True)
class TextEstimate:
    """The mean difference of given weights, and its error over pieces of the text.

    unit: the pieces, "blocks" or "windows"
    windows: of all texts
    tokens: scored targets of a piece, on average
    """

    estimate: Estimate
    unit: str
    windows: int
    tokens: float


@dataclass(frozen=True)
class Comparison:
    """An encoding at one length, and its loss minus that of the reference, in nats.

    seeds: of all its rows
    perplexity: mean over seeds; std: over seeds, None for one
    bits_per_byte: mean over seeds; None if a row has none
    by_seed: the difference of each common seed
    over_seeds: the mean difference over seeds, from SEEDS common seeds on
    over_text: the mean difference of these weights on this text
    p: over seeds, with Holm's correction for all claims of the call; tests: their number
    reason: why there is no difference
    other_differences: from the reference, beside the encoding
    """

    setting: str
    length: int
    encoding: str
    reference: str
    seeds: tuple[int | None, ...]
    perplexity: float | None
    std: float | None
    bits_per_byte: float | None
    by_seed: Mapping[int | None, float]
    over_seeds: Estimate | None = None
    over_text: TextEstimate | None = None
    p: float | None = None
    tests: int = 0
    reason: str | None = None
    other_differences: str = ""

    @property
    def is_claim(self) -> bool:
        """Whether there are seeds enough to speak about the encoding, not only these weights."""
        return self.over_seeds is not None

    @property
    def difference(self) -> Estimate | None:
        """Over seeds if there are enough for a claim, else over the text."""
        over_text = self.over_text.estimate if self.over_text else None
        return self.over_seeds or over_text

    @property
    def unit(self) -> str | None:
        """The units of which the difference is a mean: "seeds", "blocks" or "windows"."""
        over_text = self.over_text.unit if self.over_text else None
        return "seeds" if self.is_claim else over_text

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the difference."""
        return self.difference.interval() if self.difference else None

    @property
    def seeds_disagree(self) -> bool:
        """Whether the difference has one sign with one seed and the other with another."""
        differences = self.by_seed.values()
        return bool(differences) and min(differences) < 0 < max(differences)

    @property
    def mark(self) -> str:
        """† if the reference is significantly better, as in KERPLE's table 3; ‡ if this is.

        Empty without a claim.
        """
        if self.over_seeds is None or self.p is None or self.p >= ALPHA:
            return ""
        return WORSE if self.over_seeds.mean > 0 else BETTER

    def plain(self) -> dict[str, Any]:
        """For JSON: the fields, the interval of 95 % and the ratio of the perplexities."""
        facts: dict[str, Any] = {**asdict(self), "mark": self.mark, "unit": self.unit}
        if self.difference is not None:
            mean = self.difference.mean
            facts |= {"difference": mean, "interval": self.interval, "ratio": perplexity_of(mean)}
            facts["interval_is_about"] = ABOUT[self.is_claim]
        return facts


def compared(kinds: Mapping[str, Sequence[Row]], against: str | None = None) -> list[Comparison]:
    """Every encoding at every length of every setting, compared with one of them.

    kinds: rows by label, as `kinds` of megatron.results.labels returns them
    against: the reference; the first encoding if it is None

    Raises UserError if nothing can be paired, or a seed was measured on two texts of one size.
    """
    reference = next(iter(kinds)) if against is None else select(against, kinds)
    places: dict[Hashable, dict[str, list[Row]]] = {}
    for label, rows in kinds.items():
        for row in rows:
            rows_of = places.setdefault(place_of(row), {})
            of_kind = rows_of.setdefault(label, [])
            if row.get("seed") in [one.get("seed") for one in of_kind]:
                raise UserError(
                    f"{label}: seed {row.get('seed')} was measured on two texts at length"
                    f" {row['length']} - give the results of one of them"
                )
            of_kind.append(row)

    at_place = [[row for rows in rows_of.values() for row in rows] for rows_of in places.values()]
    names = [setting(rows) for rows in at_place]
    first_rows = [rows[0] for rows in at_place]
    headings = labels_of(first_rows, ("split", "tokenizer"), (), names=names)

    comparisons: list[Comparison] = []
    for heading, rows_of in zip(headings, places.values(), strict=True):
        theirs = rows_of.get(reference, [])
        for label, rows in rows_of.items():
            one = _compared(heading, label, rows, reference, theirs)
            if not theirs and rows[0]["loss"] is not None:
                one = replace(one, reason=_not_measured(rows[0], reference, kinds[reference]))
            comparisons.append(one)

    others = [one for one in comparisons if one.encoding != reference]
    if others and not any(one.difference for one in others):
        reasons = {f"{one.encoding} at {one.length}: {one.reason}": None for one in others}
        each_once = "\n  ".join(reasons)
        raise UserError(f"nothing can be compared with {reference}:\n  {each_once}")

    p_values = [one.p for one in comparisons if one.p is not None]
    corrected = iter(holm(p_values))
    for number, one in enumerate(comparisons):
        if one.p is not None:
            comparisons[number] = replace(one, p=next(corrected), tests=len(p_values))
    return comparisons


def _not_measured(row: Row, reference: str, theirs: Sequence[Row]) -> str:
    """Why no row of the reference has a row's place: how the most similar one differs."""
    differences = [
        [key for key in COMPARED if value_of(other, key) != value_of(row, key)] for other in theirs
    ]
    nearest = min(differences, key=len)
    if row.get("protocol") == LONGPPL and {*nearest} <= {"judge", "tokens", "key_text"}:
        return OTHER_KEYS.format(reference)
    return f"{reference} was measured with another {' and '.join(nearest)} alone"


def _compared(
    heading: str,
    label: str,
    ours: Sequence[Row],
    reference: str,
    theirs: Sequence[Row],
) -> Comparison:
    """One encoding at one place; its p is not corrected."""
    perplexity, std = mean_and_std([row["perplexity"] for row in ours])
    bits_per_byte, _ = mean_and_std([row.get("bits_per_byte") for row in ours])
    alone = Comparison(
        setting=heading,
        length=ours[0]["length"],
        encoding=label,
        reference=reference,
        seeds=tuple(row.get("seed") for row in ours),
        perplexity=perplexity,
        std=std,
        bits_per_byte=bits_per_byte,
        by_seed={},
    )
    if label == reference:
        refusals = [row.get("reason") for row in ours if row["loss"] is None]
        return replace(alone, reason=refusals[0] if refusals else None)
    ours, theirs = of_common_seeds(ours, theirs)
    if reason := why_not_paired(ours, theirs, reference):
        return replace(alone, reason=reason)
    by_seed = differences_by_seed(ours, theirs)
    axes = axes_of([ours[0], theirs[0]])
    differences = other_differences(ours[0], theirs[0], axes)
    paired = replace(
        alone,
        by_seed=by_seed,
        over_text=over_text(ours, theirs),
        other_differences="; ".join(differences.values()),
    )
    if len(by_seed) < SEEDS:
        return paired
    over_seeds = mean_over_seeds(list(by_seed.values()))
    return replace(paired, over_seeds=over_seeds, p=over_seeds.p)


def of_common_seeds(
    ours: Sequence[Row], theirs: Sequence[Row]
) -> tuple[Sequence[Row], Sequence[Row]]:
    """The rows of the seeds that both have, in one order; all rows if they have none in common."""
    seeds = [row.get("seed") for row in theirs]
    common = [row for row in ours if row.get("seed") in seeds]
    if not common:
        return ours, theirs
    return common, [theirs[seeds.index(row.get("seed"))] for row in common]


def differences_by_seed(
    ours: Sequence[Row], theirs: Sequence[Row], *, any_text: bool = False
) -> dict[int | None, float]:
    """The difference in loss of each common seed, if all pairs have a text in common.

    any_text: whether they need none
    """
    differences = {}
    for row, other in zip(ours, theirs, strict=False):
        same_text = any_text or row.get("text") == other.get("text")
        if row.get("seed") != other.get("seed") or not same_text:
            return {}
        assert row["loss"] is not None
        assert other["loss"] is not None
        differences[row.get("seed")] = row["loss"] - other["loss"]
    return differences


def why_not_paired(ours: Sequence[Row], theirs: Sequence[Row], reference: str) -> str | None:
    """The reason why these rows are no pairs, or None. reference: the label of `theirs`"""
    for row in (*ours, *theirs):
        name = row["pos_emb"]
        if row["loss"] is None:
            return f"{name}: {row.get('reason') or 'no loss'}"
        if not row.get("window_losses") or not row.get("text"):
            return f"{name}: no losses by window in its results - measure it again with evaluate.py"
    if {row.get("text") for row in ours} != {row.get("text") for row in theirs}:
        if ours[0].get("protocol") == LONGPPL:
            return OTHER_KEYS.format(reference)
        return (
            f"it was scored on other text than {reference}"
            " - evaluate both on the same data_path, split and lengths"
        )
    return None


def over_text(ours: Sequence[Row], theirs: Sequence[Row]) -> TextEstimate:
    """The mean difference block by block if all rows have blocks, else window by window.

    Runs that scored the same text are averaged first.
    """
    has_blocks = all(row.get("block_losses") for row in (*ours, *theirs))
    key = "block_losses" if has_blocks else "window_losses"
    first_of: dict[str | None, Row] = {}
    for row in ours:
        first_of.setdefault(row.get("text"), row)
    differences: list[float] = []
    sizes: list[int] = []
    weights: list[float] = []
    for text, first in first_of.items():
        means = []
        for rows in (ours, theirs):
            losses = [row.get(key, []) for row in rows if row.get("text") == text]
            means.append(np.mean(losses, axis=0))
        differences += (means[0] - means[1]).tolist()
        mean_tokens = first["tokens"] / first["windows"]
        of_windows = first.get("window_tokens") or [mean_tokens] * first["windows"]
        if not has_blocks:
            weights += of_windows
            continue
        of_blocks = first.get("block_tokens") or [BLOCK] * len(first.get("block_losses", []))
        weights += of_blocks
        # A long window holds several blocks; a block may span several short windows.
        starts = np.cumsum([0, *of_blocks[:-1]])
        window_of_block = np.searchsorted(np.cumsum(of_windows), starts, side="right")
        blocks_that_begin = np.bincount(window_of_block)
        sizes += blocks_that_begin[blocks_that_begin > 0].tolist()
    windows = sum(row["windows"] for row in first_of.values())
    if has_blocks:
        estimate = mean_of_blocks(differences, sizes, weights)
        return TextEstimate(estimate, "blocks", windows, tokens=float(np.mean(weights)))
    estimate = mean_of(differences, weights)
    tokens = ours[0]["tokens"] / ours[0]["windows"]
    return TextEstimate(estimate, "windows", windows, tokens)
