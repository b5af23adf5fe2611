"""Effective length: up to which length a model gains from text beyond its training window."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.results.comparison import Difference, difference_of
from megatron.results.labels import kinds
from megatron.results.row import RUN, Row, grouped, trained_length, value_of
from megatron.results.table import Table

MODEL = tuple(key for key in RUN if key not in ("window", "window_layers"))
HOW = (
    "the longest length at which `tail` has a lower loss than the same weights limited to a window"
    " of the training length, on the same targets, with a 95 % interval below 0; each length is"
    " tested on its own"
)
WITHOUT_CONTROL = "undefined: measure `tail` with --window none train_length"


@dataclass(frozen=True)
class EffectiveLength:
    """What an encoding gains from more context than its training length.

    differences: by length, loss minus that of the same weights with the window
    """

    train_length: int
    differences: Mapping[int, Difference]

    @property
    def length(self) -> int | None:
        """The longest length with a gain, or None."""
        gains = []
        for length, difference in self.differences.items():
            interval = difference.estimate.interval()
            if interval is not None and interval[1] < 0:
                gains.append(length)
        return max(gains, default=None)

    def __str__(self) -> str:
        if self.length is None:
            return f"none above {self.train_length}"
        return (
            f"{self.length} or more" if self.length == max(self.differences) else str(self.length)
        )


def effective_lengths(rows: Sequence[Row]) -> dict[str, EffectiveLength | None]:
    """Of every kind with rows of `tail`, by its label; None where the window was not measured."""
    tails = [row for row in rows if row.get("protocol") == "tail" and row["loss"] is not None]
    control_of: dict[int, Row] = {}
    for model_rows in grouped(tails, MODEL):
        train_length = trained_length(model_rows[0])
        limited = [row for row in model_rows if value_of(row, "window") == train_length]
        by_length = sorted(limited, key=lambda row: row["length"])
        for row in model_rows:
            # The targets are the same at all lengths, so that one length is enough.
            if by_length and row["length"] > (train_length or 0):
                control_of[id(row)] = by_length[-1]

    lengths: dict[str, EffectiveLength | None] = {}
    unlimited = [row for row in tails if not isinstance(value_of(row, "window"), int)]
    for label, measured in kinds(unlimited).items():
        differences = {}
        for at_length in grouped(measured, ["length"]):
            pairs = [(row, control_of[id(row)]) for row in at_length if id(row) in control_of]
            if pairs:
                ours, controls = zip(*pairs, strict=True)
                differences[ours[0]["length"]] = difference_of(ours, controls)
        train_length = trained_length(measured[0])
        lengths[label] = None
        if train_length is not None and differences:
            lengths[label] = EffectiveLength(train_length, differences)
    return lengths


def table_of_effective_lengths(rows: Sequence[Row]) -> Table | None:
    """A line for each kind, or None if no rows have such a window."""
    lengths = effective_lengths(rows)
    if not any(lengths.values()):
        return None
    body = []
    for label, effective in lengths.items():
        if effective is None:
            body.append([label, "", WITHOUT_CONTROL, "", ""])
            continue
        length = effective.length or min(effective.differences)
        difference = effective.differences[length]
        estimate = difference.estimate
        low, high = estimate.interval() or (math.nan, math.nan)
        gain = f"{estimate.mean:+.4f} [{low:+.4f}, {high:+.4f}] at {length}"
        sample = f"{estimate.n} {difference.unit}"
        body.append([label, str(effective.train_length), str(effective), gain, sample])
    head = ["encoding", "trained at", "effective length", "loss - window [95 %]", "sample"]
    return Table(head, body, [f"effective length: {HOW}"], title="effective length")
