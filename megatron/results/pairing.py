"""Differences in loss between two encodings on the same text: by seed, by block, by window."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megatron.results.row import BLOCK, Row
from megatron.results.statistics import Estimate, mean_of, mean_of_blocks

Losses = NDArray[np.float64]
RowsByText = dict[str, list[Row]]
Pieces = Literal["window_losses", "block_losses"]


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


def of_common_seeds(ours: Sequence[Row], theirs: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The rows of the seeds that both have, in the same order; all rows where there is none."""
    ours_of = {row.get("seed"): row for row in ours}
    theirs_of = {row.get("seed"): row for row in theirs}
    common = [seed for seed in ours_of if seed in theirs_of]
    if not common:
        return list(ours), list(theirs)
    return [ours_of[seed] for seed in common], [theirs_of[seed] for seed in common]


def why_not_paired(ours: Sequence[Row], theirs: Sequence[Row], reference: str) -> str | None:
    """The reason why these rows are no pairs, or None. reference: the label of `theirs`"""
    if not theirs:
        return f"{reference} was not measured there, on as many tokens"
    for row in (*ours, *theirs):
        name = row["pos_emb"]
        if row["loss"] is None:
            return f"{name}: {row.get('reason') or 'no loss'}"
        if not row.get("window_losses") or not row.get("text"):
            return f"{name}: no losses by window in its results - measure it again with evaluate.py"
    our_texts = {row.get("text") for row in ours}
    their_texts = {row.get("text") for row in theirs}
    if our_texts != their_texts:
        return (
            f"it was scored on other text than {reference}"
            " - evaluate both on the same data_path, split and lengths"
        )
    return None


def differences_by_seed(ours: Sequence[Row], theirs: Sequence[Row]) -> dict[int | None, float]:
    """The difference in mean loss of each seed, where both measured every seed on the same text.

    Empty where seeds or texts do not match.
    """
    differences: dict[int | None, float] = {}
    if len(ours) != len(theirs):
        return {}
    for our, their in zip(ours, theirs, strict=True):
        seed = our.get("seed")
        matches = seed == their.get("seed") and our.get("text") == their.get("text")
        our_loss, their_loss = our["loss"], their["loss"]
        if not matches or our_loss is None or their_loss is None:
            return {}
        differences[seed] = our_loss - their_loss
    return differences


def over_text(ours: Sequence[Row], theirs: Sequence[Row]) -> TextEstimate:
    """The mean difference block by block where all rows have blocks, else window by window.

    Runs that scored the same text are averaged first.
    """
    our_runs = _by_text(ours)
    their_runs = _by_text(theirs)
    if all(row.get("block_losses") for row in (*ours, *theirs)):
        return _over_blocks(our_runs, their_runs)
    return _over_windows(our_runs, their_runs)


def _by_text(rows: Iterable[Row]) -> RowsByText:
    by_text: RowsByText = {}
    for row in rows:
        by_text.setdefault(row.get("text", ""), []).append(row)
    return by_text


def _over_blocks(ours: RowsByText, theirs: RowsByText) -> TextEstimate:
    first_rows = [rows[0] for rows in ours.values()]
    sizes: list[int] = []
    weights: list[int] = []
    for row in first_rows:
        sizes += blocks_of_windows(row)
        weights += tokens_of_blocks(row)
    differences = _differences(ours, theirs, "block_losses")
    estimate = mean_of_blocks(differences, sizes, weights)
    windows = sum(row["windows"] for row in first_rows)
    return TextEstimate(estimate, "blocks", windows, tokens=float(np.mean(weights)))


def _over_windows(ours: RowsByText, theirs: RowsByText) -> TextEstimate:
    first_rows = [rows[0] for rows in ours.values()]
    weights: list[float] = []
    for row in first_rows:
        weights += tokens_of_windows(row)
    differences = _differences(ours, theirs, "window_losses")
    estimate = mean_of(differences, weights)
    tokens = first_rows[0]["tokens"] / first_rows[0]["windows"]
    return TextEstimate(estimate, "windows", windows=estimate.n, tokens=tokens)


def _differences(ours: RowsByText, theirs: RowsByText, key: Pieces) -> Losses:
    """The difference of each piece of each text, averaged over the runs of a text: [pieces]"""
    parts = []
    for text in ours:
        our_mean = np.mean([row.get(key, []) for row in ours[text]], axis=0)
        their_mean = np.mean([row.get(key, []) for row in theirs[text]], axis=0)
        parts.append(our_mean - their_mean)
    return np.concatenate(parts)


def tokens_of_windows(row: Row) -> list[float]:
    """Scored targets of each window: [windows]."""
    different = row.get("window_tokens")
    if different:
        return [float(tokens) for tokens in different]
    return [row["tokens"] / row["windows"]] * row["windows"]


def tokens_of_blocks(row: Row) -> list[int]:
    """Scored targets of each block: [blocks]."""
    return row.get("block_tokens") or [BLOCK] * len(row.get("block_losses", []))


def blocks_of_windows(row: Row) -> list[int]:
    """Blocks that begin in each window, without windows in which none begins.

    A long window holds several blocks; a block may span several short windows.
    """
    ends_of_windows = np.cumsum(tokens_of_windows(row))
    tokens = np.asarray(tokens_of_blocks(row))
    starts_of_blocks = np.cumsum(tokens) - tokens
    window_of_block = np.searchsorted(ends_of_windows, starts_of_blocks, side="right")
    counts = np.bincount(window_of_block)
    return [int(count) for count in counts if count > 0]
