"""Compare encodings with one of them, length by length: differences, intervals, claims."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from megatron.errors import UserError
from megatron.results.labels import labels_of, other_differences, select
from megatron.results.row import SETTING, Row, grouped
from megatron.results.statistics import Estimate, holm, mean_of, mean_of_blocks, mean_over_seeds
from megatron.results.table import mean_and_std, setting

ALPHA = 0.05
SEEDS = 3  # number of common seeds that a claim about an encoding needs
PLACES = (*SETTING, "length", "tokens")  # protocols in which each seed may have its own text
FEW = 20  # with fewer windows, an interval over windows covers less than 95 %
WORSE, BETTER = "†", "‡"


@dataclass(frozen=True)
class Difference:
    """The difference of two losses on the same targets, in nats.

    estimate: the mean over seeds if there are SEEDS common seeds or more; else of these weights,
        over the text
    unit: "seeds", or pieces of text: "blocks" or "windows"
    by_seed: the difference for each common seed
    """

    estimate: Estimate
    unit: str
    by_seed: Mapping[int | None, float]

    @property
    def is_claim(self) -> bool:
        """Whether there are enough seeds for a statement about the encoding, not only about these
        weights."""
        return self.unit == "seeds"

    @property
    def seeds_disagree(self) -> bool:
        """Whether the difference has different signs for different seeds."""
        signs = np.sign([*self.by_seed.values()])
        return {-1, 1} <= set(signs)


@dataclass
class Comparison:
    """An encoding at one length, and the difference of its loss from the reference's.

    rows: its rows, one per seed
    difference: from the reference, or None and the reason
    p: over seeds, with Holm's correction for all claims of the call
    other_differences: what else differs from the reference
    """

    setting: str
    length: int
    encoding: str
    reference: str
    rows: Sequence[Row]
    difference: Difference | None = None
    reason: str = ""
    p: float | None = None
    other_differences: str = ""

    @property
    def perplexity(self) -> tuple[float | None, float | None]:
        """The mean of the rows, and its standard deviation over seeds."""
        return mean_and_std([row["perplexity"] for row in self.rows])

    @property
    def mark(self) -> str:
        """† if the reference is significantly better, as in KERPLE's table 3; ‡ if this one is.

        Empty if nothing can be claimed.
        """
        if self.difference is None or self.p is None or self.p >= ALPHA:
            return ""
        return WORSE if self.difference.estimate.mean > 0 else BETTER


def compared(kinds: Mapping[str, Sequence[Row]], against: str | None = None) -> list[Comparison]:
    """Every encoding at every length of every setting, compared with the reference.

    kinds: rows by label, from `kinds` of megatron.results.labels
    against: the reference; the first encoding if it is None

    Raises UserError if nothing can be paired, or if a seed was measured on two texts of one size.
    """
    reference = select(against, kinds) if against else next(iter(kinds))
    comparisons = _pairs(kinds, reference)

    differing = [pair for pair in comparisons if pair.encoding != pair.reference]
    if differing and not any(pair.difference for pair in differing):
        reasons = {f"{pair.encoding} at {pair.length}: {pair.reason}": None for pair in differing}
        each_once = "\n  ".join(reasons)
        raise UserError(f"nothing can be compared with {differing[0].reference}:\n  {each_once}")

    tested = [pair for pair in comparisons if pair.p is not None]
    for pair, p in zip(tested, holm([pair.p or 0.0 for pair in tested]), strict=True):
        pair.p = p
    return comparisons


def _pairs(kinds: Mapping[str, Sequence[Row]], reference: str) -> list[Comparison]:
    """Each kind at each place minus the reference, with uncorrected p."""
    label_of = {id(row): label for label, rows in kinds.items() for row in rows}
    places = grouped([row for rows in kinds.values() for row in rows], PLACES)
    names = [setting(rows) for rows in places]
    headings = labels_of([rows[0] for rows in places], ("split", "tokenizer"), names)
    comparisons = []
    for heading, rows_at_place in zip(headings, places, strict=True):
        rows_of: dict[str, list[Row]] = {}
        for row in rows_at_place:
            rows_of.setdefault(label_of[id(row)], []).append(row)
        for label, ours in rows_of.items():
            length = ours[0]["length"]
            if len({row.get("seed") for row in ours}) < len(ours):
                raise UserError(
                    f"{label}: a seed was measured on two texts at length {length}"
                    " - give the results of one of them"
                )
            pair = Comparison(heading, length, label, reference, ours)
            theirs = rows_of.get(reference)
            if label != reference and theirs is None:
                pair.reason = f"{reference} was not measured here"
            elif label != reference and theirs:
                try:
                    pair.difference = difference_of(ours, theirs)
                except UserError as reason:
                    pair.reason = str(reason)
                else:
                    if pair.difference.is_claim:
                        pair.p = pair.difference.estimate.p
                    unlike = other_differences(ours[0], theirs[0])
                    pair.other_differences = "; ".join(unlike.values())
            comparisons.append(pair)
    return comparisons


def difference_of(
    ours: Sequence[Row], theirs: Sequence[Row], *, any_text: bool = False
) -> Difference:
    """The difference of rows at one place, for the common seeds, or for all seeds if none is
    common.

    any_text: whether a seed's difference may compare two texts

    Raises UserError with the reason if there is none.
    """
    for row in (*ours, *theirs):
        if row["loss"] is None:
            raise UserError(f"{row['pos_emb']}: {row.get('reason') or 'no loss'}")
    theirs_of = {row.get("seed"): row for row in theirs}
    pairs = [(row, theirs_of[row.get("seed")]) for row in ours if row.get("seed") in theirs_of]
    if pairs:
        ours, theirs = zip(*pairs, strict=True)
    by_seed = {}
    if any_text or all(row.get("region") == other.get("region") for row, other in pairs):
        for row, other in pairs:
            by_seed[row.get("seed")] = cast(float, row["loss"]) - cast(float, other["loss"])
    if len(by_seed) >= SEEDS:
        return Difference(mean_over_seeds([*by_seed.values()]), "seeds", by_seed)
    regions = {row.get("region") for row in (*ours, *theirs)}
    if len(regions) > 1:
        raise UserError(
            "its rows were scored on other text than the reference's - evaluate both on the same"
            f" data_path, split and lengths, or {SEEDS} seeds where each seed has its own text"
        )
    in_blocks = all(row.get("block_losses") for row in (*ours, *theirs))
    piece = "block" if in_blocks else "window"  # tasks have no blocks
    key = f"{piece}_losses"
    counts = {len(row.get(key) or ()) for row in (*ours, *theirs)}
    if len(counts) > 1 or 0 in counts:
        raise UserError("its rows have other windows than the reference's - measure both again")
    # Runs that scored the same targets are averaged.
    pieces = [[cast(Any, row)[key] for row in rows] for rows in (ours, theirs)]
    first, second = (np.mean(losses, axis=0) for losses in pieces)
    weights = ours[0].get(f"{piece}_tokens")
    if not in_blocks:
        return Difference(mean_of(first - second, weights), "windows", by_seed)
    # A long window holds several blocks; a block may span several short windows.
    windows = ours[0]["windows"] if len(first) % ours[0]["windows"] == 0 else 1
    return Difference(mean_of_blocks(first - second, weights, windows), "blocks", by_seed)
