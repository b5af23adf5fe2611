"""Encodings against one of them, length by length: differences, intervals, claims."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from megatron.errors import UserError
from megatron.results.labels import axes_of, labels_of, matching, other_differences, select
from megatron.results.row import (
    BLOCK,
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
)
from megatron.results.table import mean_and_std, setting

ALPHA = 0.05
SEEDS = 3  # common seeds that a claim about an encoding needs
COMPARED = (*SETTING, *(key for key in PLACE if key != "text"))  # runs of a seed may have its own
TARGETS = ("corpus", "part", "split", "tokenizer", "length")  # of two protocols
WORSE, BETTER = "†", "‡"
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


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Losses minus others of the same targets, in nats.

    by_seed: the difference of each common seed
    over_seeds: their mean, from SEEDS common seeds on
    over_text: the mean difference of these weights on this text
    reason: why there is no difference over the text
    """

    by_seed: Mapping[int | None, float] = field(default_factory=dict)
    over_seeds: Estimate | None = None
    over_text: TextEstimate | None = None
    reason: str | None = None

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
    def unit(self) -> str:
        """The units of which the difference is a mean: "seeds", "blocks" or "windows"."""
        return self.over_text.unit if self.over_text and not self.is_claim else "seeds"

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the difference."""
        return self.difference.interval() if self.difference else None

    @property
    def seeds_disagree(self) -> bool:
        """Whether the difference has one sign with one seed and the other with another."""
        differences = self.by_seed.values()
        return bool(differences) and min(differences) < 0 < max(differences)


@dataclass(frozen=True, kw_only=True)
class Comparison(Paired):
    """An encoding at one length, and its loss minus that of the reference.

    seeds: of all its rows
    perplexity: mean over seeds; std: over seeds, None for one
    bits_per_byte: mean over seeds; None if a row has none
    p: over seeds, with Holm's correction for all claims of the call
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
    p: float | None = None
    other_differences: str = ""

    @property
    def mark(self) -> str:
        """† if the reference is significantly better, as in KERPLE's table 3; ‡ if this is.

        Empty without a claim.
        """
        if self.over_seeds is None or self.p is None or self.p >= ALPHA:
            return ""
        return WORSE if self.over_seeds.mean > 0 else BETTER


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
        comparisons[number] = replace(comparisons[number], p=p)
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
            )
            if label != reference and reference in rows_of:
                theirs = rows_of[reference]
                difference = paired(ours, theirs, reference)
                if difference.reason:
                    difference = Paired(reason=difference.reason)
                else:
                    axes = axes_of([ours[0], theirs[0]])
                    unlike = other_differences(ours[0], theirs[0], axes)
                    pair = replace(pair, other_differences="; ".join(unlike.values()))
                p = difference.over_seeds and difference.over_seeds.p
                pair = replace(pair, p=p, **vars(difference))
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
                pair = replace(pair, reason=reason)
            comparisons.append(pair)
    return comparisons


def paired(
    ours: Sequence[Row], theirs: Sequence[Row], reference: str, *, any_text: bool = False
) -> Paired:
    """The difference of rows at one place, of the seeds that both have; of all if none is common.

    reference: the label of `theirs`
    any_text: whether the difference of a seed may be one of two texts
    """
    theirs_of = {row.get("seed"): row for row in theirs}
    pairs = [(row, theirs_of[row.get("seed")]) for row in ours if row.get("seed") in theirs_of]
    if pairs:
        ours, theirs = zip(*pairs, strict=True)
    for row in (*ours, *theirs):
        if row["loss"] is None:
            return Paired(reason=f"{row['pos_emb']}: {row.get('reason') or 'no loss'}")
    by_seed = {}
    for row, other in pairs:
        by_seed[row.get("seed")] = cast(float, row["loss"]) - cast(float, other["loss"])
    if not any_text and any(row.get("region") != other.get("region") for row, other in pairs):
        by_seed = {}
    over_seeds = mean_over_seeds([*by_seed.values()]) if len(by_seed) >= SEEDS else None
    try:
        over_text = _over_text(ours, theirs, reference)
    except UserError as reason:
        return Paired(by_seed=by_seed, over_seeds=over_seeds, reason=str(reason))
    return Paired(by_seed=by_seed, over_seeds=over_seeds, over_text=over_text)


def _over_text(ours: Sequence[Row], theirs: Sequence[Row], reference: str) -> TextEstimate:
    """The mean difference block by block if all rows have blocks, else window by window.

    Runs that scored the same targets are averaged first. Raises UserError with the reason if rows
    are no pairs.
    """
    for row in (*ours, *theirs):
        if not row.get("window_losses") or not row.get("text"):
            raise UserError(
                f"{row['pos_emb']}: no losses by window in its results"
                " - measure it again with evaluate.py"
            )
    if {row.get("region") for row in ours} != {row.get("region") for row in theirs}:
        raise UserError(
            f"it was scored on other text than {reference}"
            " - evaluate both on the same data_path, split and lengths"
        )
    regions = grouped([*ours, *theirs], ["region"])
    for key, sizes_key in (("block_losses", "block_tokens"), ("window_losses", "window_tokens")):
        pieces = [
            {(len(row.get(key) or ()), *(row.get(sizes_key) or ())) for row in members}
            for members in regions
        ]
        if all(len(kinds) == 1 and (0,) not in kinds for kinds in pieces):
            break
    else:
        raise UserError("old rows without losses of blocks - measure them again")

    differences: list[float] = []
    weights: list[float] = []
    blocks_of_windows: list[int] = []
    for first, *_ in regions:
        means = []
        for rows in (ours, theirs):
            members = [row for row in rows if row.get("region") == first.get("region")]
            means.append(np.mean([row[key] for row in members], axis=0))
        differences += (means[0] - means[1]).tolist()
        mean_tokens = first["tokens"] / first["windows"]
        window_tokens = first.get("window_tokens") or [mean_tokens] * first["windows"]
        if key == "window_losses":
            weights += window_tokens
            continue
        block_tokens = first.get("block_tokens") or [BLOCK] * len(means[0])
        weights += block_tokens
        # A long window holds several blocks; a block may span several short windows.
        starts = np.cumsum([0, *block_tokens[:-1]])
        window_of_block = np.searchsorted(np.cumsum(window_tokens), starts, side="right")
        blocks_that_begin = np.bincount(window_of_block)
        blocks_of_windows += blocks_that_begin[blocks_that_begin > 0].tolist()
    windows = sum(members[0]["windows"] for members in regions)
    if key == "window_losses":
        return TextEstimate(mean_of(differences, weights), "windows", windows, mean_tokens)
    estimate = mean_of_blocks(differences, blocks_of_windows, weights)
    return TextEstimate(estimate, "blocks", windows, float(np.mean(weights)))
