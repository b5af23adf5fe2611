"""Encodings against one of them, length by length: differences, intervals, claims."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import numpy as np

from megatron.errors import UserError
from megatron.results.labels import axes_of, labels_of, matching, other_differences, select
from megatron.results.row import (
    BLOCK,
    LONGPPL,
    PLACE,
    PROTOCOL_OPTIONS,
    SETTING,
    Row,
    grouped,
    value_of,
)
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
COMPARED = (*SETTING, *(key for key in PLACE if key != "text"))  # runs of a seed may have its own
TARGETS = ("corpus", "part", "split", "tokenizer", "length")  # of two protocols
KEYS = {"judge", "tokens", "key_text"}  # in which rows of longppl with other key tokens differ
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
    against: the reference; the first encoding if it is None. The name of a protocol compares the
        rows of each encoding with its own rows under that protocol, where both scored the same
        targets.

    Raises UserError if nothing can be paired, or a seed was measured on two texts of one size.
    """
    protocol = (against or "").partition(", ")[0]
    protocols = {row.get("protocol") for rows in kinds.values() for row in rows}
    comparisons: list[Comparison] = []
    if against is None:
        comparisons = _pairs(kinds, next(iter(kinds)), COMPARED)
    elif protocol not in protocols or matching(against, kinds):
        comparisons = _pairs(kinds, select(against, kinds), COMPARED)
    else:
        for label, rows in kinds.items():
            settings = grouped(rows, SETTING)
            names = [f"{label}, protocol {members[0].get('protocol')}" for members in settings]
            labels = labels_of(
                [members[0] for members in settings], PROTOCOL_OPTIONS, (), names=names
            )
            by_setting = dict(zip(labels, settings, strict=True))
            reference = f"{label}, protocol {against}"
            if matching(reference, by_setting):
                comparisons += _pairs(by_setting, select(reference, by_setting), TARGETS)

    differing = [pair for pair in comparisons if pair.encoding != pair.reference]
    if differing and not any(pair.difference for pair in differing):
        reasons = {f"{pair.encoding} at {pair.length}: {pair.reason}": None for pair in differing}
        each_once = "\n  ".join(reasons)
        raise UserError(f"nothing can be compared with {differing[0].reference}:\n  {each_once}")

    tested = [number for number, pair in enumerate(comparisons) if pair.p is not None]
    corrected = holm([comparisons[number].p or 0.0 for number in tested])
    for number, p in zip(tested, corrected, strict=True):
        comparisons[number] = replace(comparisons[number], p=p, tests=len(tested))
    return comparisons


def _pairs(
    kinds: Mapping[str, Sequence[Row]], reference: str, keys: Sequence[str]
) -> list[Comparison]:
    """Each kind at each place minus the reference, with p that are not corrected.

    keys: what agrees at one place
    """
    label_of = {id(row): label for label, rows in kinds.items() for row in rows}
    places = grouped([row for rows in kinds.values() for row in rows], keys)
    names = [setting(rows) for rows in places]
    headings = labels_of([rows[0] for rows in places], ("split", "tokenizer"), (), names=names)
    comparisons = []
    for heading, rows_at_place in zip(headings, places, strict=True):
        rows_of: dict[str, list[Row]] = {}
        for row in rows_at_place:
            label = label_of[id(row)]
            members = rows_of.setdefault(label, [])
            if row.get("seed") in [other.get("seed") for other in members]:
                raise UserError(
                    f"{label}: seed {row.get('seed')} was measured on two texts at length"
                    f" {row['length']} - give the results of one of them"
                )
            members.append(row)
        for label, ours in rows_of.items():
            perplexity, std = mean_and_std([row["perplexity"] for row in ours])
            bits_per_byte, _ = mean_and_std([row.get("bits_per_byte") for row in ours])
            pair = Comparison(
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
            if label != reference and reference in rows_of:
                pair = _with_difference(pair, ours, rows_of[reference])
            elif ours[0]["loss"] is None or label == reference:
                refusals = [row.get("reason") for row in ours if row["loss"] is None]
                pair = replace(pair, reason=next(iter(refusals), None))
            else:  # the reference has no row here: how does the most similar one differ?
                differences = [
                    [key for key in keys if value_of(other, key) != value_of(ours[0], key)]
                    for other in kinds[reference]
                ]
                nearest = min(differences, key=len)
                reason = f"{reference} was measured with another {' and '.join(nearest)} alone"
                if ours[0].get("protocol") == LONGPPL and {*nearest} <= KEYS:
                    reason = OTHER_KEYS.format(reference)
                pair = replace(pair, reason=reason)
            comparisons.append(pair)
    return comparisons


def _with_difference(pair: Comparison, ours: Sequence[Row], theirs: Sequence[Row]) -> Comparison:
    """The comparison with the difference of rows at one place, or the reason for none."""
    ours, theirs = of_common_seeds(ours, theirs)
    if reason := why_not_paired(ours, theirs, pair.reference):
        return replace(pair, reason=reason)
    by_seed = differences_by_seed(ours, theirs)
    over_seeds = mean_over_seeds(list(by_seed.values())) if len(by_seed) >= SEEDS else None
    differences = other_differences(ours[0], theirs[0], axes_of([ours[0], theirs[0]]))
    return replace(
        pair,
        by_seed=by_seed,
        over_seeds=over_seeds,
        over_text=over_text(ours, theirs),
        p=over_seeds and over_seeds.p,
        other_differences="; ".join(differences.values()),
    )


def of_common_seeds(
    ours: Sequence[Row], theirs: Sequence[Row]
) -> tuple[Sequence[Row], Sequence[Row]]:
    """The rows of the seeds that both have, in one order; all rows if they have none in common."""
    by_seed = {row.get("seed"): row for row in theirs}
    common = [row for row in ours if row.get("seed") in by_seed]
    return (common, [by_seed[row.get("seed")] for row in common]) if common else (ours, theirs)


def differences_by_seed(
    ours: Sequence[Row], theirs: Sequence[Row], *, any_text: bool = False
) -> dict[int | None, float]:
    """The difference in loss of each common seed, if all pairs scored the same targets.

    any_text: whether they need not
    """
    differences = {}
    for row, other in zip(ours, theirs, strict=False):
        same_targets = any_text or row.get("region") == other.get("region")
        if row.get("seed") != other.get("seed") or not same_targets:
            return {}
        differences[row.get("seed")] = cast(float, row["loss"]) - cast(float, other["loss"])
    return differences


def why_not_paired(ours: Sequence[Row], theirs: Sequence[Row], reference: str) -> str | None:
    """The reason why these rows are no pairs, or None. reference: the label of `theirs`"""
    rows = [*ours, *theirs]
    for row in rows:
        if row["loss"] is None:
            return f"{row['pos_emb']}: {row.get('reason') or 'no loss'}"
        if not row.get("window_losses") or not row.get("text"):
            name = row["pos_emb"]
            return f"{name}: no losses by window in its results - measure it again with evaluate.py"
    if {row.get("region") for row in ours} != {row.get("region") for row in theirs}:
        if ours[0].get("protocol") == LONGPPL:
            return OTHER_KEYS.format(reference)
        return (
            f"it was scored on other text than {reference}"
            " - evaluate both on the same data_path, split and lengths"
        )
    if any(_pieces(members) is None for members in grouped(rows, ["region"])):
        return "old rows without losses of blocks - measure them again"
    return None


def _pieces(rows: Sequence[Row]) -> str | None:
    """The key of losses that all rows of one region have of the same pieces, or None."""
    for key, sizes in (("block_losses", "block_tokens"), ("window_losses", "window_tokens")):
        parts = {(len(row.get(key) or ()), *(row.get(sizes) or ())) for row in rows}
        if len(parts) == 1 and (0,) not in parts:
            return key
    return None


def over_text(ours: Sequence[Row], theirs: Sequence[Row]) -> TextEstimate:
    """The mean difference block by block if all rows have blocks, else window by window.

    Runs that scored the same targets are averaged first.
    """
    regions = grouped([*ours, *theirs], ["region"])
    has_blocks = all(_pieces(members) == "block_losses" for members in regions)
    key = "block_losses" if has_blocks else "window_losses"
    differences: list[float] = []
    sizes: list[int] = []
    weights: list[float] = []
    for first, *_ in regions:
        means = []
        for rows in (ours, theirs):
            members = [row for row in rows if row.get("region") == first.get("region")]
            means.append(np.mean([row.get(key) or [] for row in members], axis=0))
        differences += (means[0] - means[1]).tolist()
        mean_tokens = first["tokens"] / first["windows"]
        window_tokens = first.get("window_tokens") or [mean_tokens] * first["windows"]
        if not has_blocks:
            weights += window_tokens
            continue
        block_tokens = first.get("block_tokens") or [BLOCK] * len(first.get("block_losses") or [])
        weights += block_tokens
        # A long window holds several blocks; a block may span several short windows.
        starts = np.cumsum([0, *block_tokens[:-1]])
        window_of_block = np.searchsorted(np.cumsum(window_tokens), starts, side="right")
        blocks_that_begin = np.bincount(window_of_block)
        sizes += blocks_that_begin[blocks_that_begin > 0].tolist()
    windows = sum(members[0]["windows"] for members in regions)
    if has_blocks:
        estimate = mean_of_blocks(differences, sizes, weights)
        return TextEstimate(estimate, "blocks", windows, tokens=float(np.mean(weights)))
    estimate = mean_of(differences, weights)
    return TextEstimate(estimate, "windows", windows, ours[0]["tokens"] / ours[0]["windows"])
