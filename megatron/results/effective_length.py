"""Effective length: up to which length a model gains from text beyond its training window."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from megatron.errors import UserError
from megatron.results.comparison import Difference, difference_of
from megatron.results.labels import kinds
from megatron.results.row import RUN, Row, grouped, identity, trained_length, value_of
from megatron.results.table import Table

MODEL = tuple(key for key in RUN if key not in ("window", "window_layers"))
HOW = (
    "the longest length at which `tail` has a lower loss than the same weights limited to a window"
    " of the training length, on the same targets, with a 95 % interval below 0; each length is"
    " tested on its own"
)


class EffectiveLength(NamedTuple):
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
            _, high = difference.estimate.interval() or (0, 0)
            if high < 0:
                gains.append(length)
        return max(gains, default=None)

    def __str__(self) -> str:
        if self.length is None:
            return f"none shown above {self.train_length}"
        is_longest = self.length == max(self.differences)
        return f"{self.length} or more" if is_longest else str(self.length)


def effective_lengths(rows: Sequence[Row]) -> dict[str, EffectiveLength]:
    """Of every kind whose rows of `tail` can be compared with the window, by its label."""
    tails = [row for row in rows if row.get("protocol") == "tail" and row["loss"] is not None]
    control_of = {}
    for row in sorted(tails, key=lambda row: row["length"]):
        # The targets are the same at all lengths, so that the window's longest one is enough.
        if value_of(row, "window") == trained_length(row):
            control_of[identity(row, MODEL)] = row

    lengths = {}
    # A model with windows of its own has no control: the evaluation's window would widen them.
    unlimited = [row for row in tails if value_of(row, "window") == "none"]
    for label, measured in kinds(unlimited).items():
        train_length = trained_length(measured[0]) or 0
        with_control = [row for row in measured if identity(row, MODEL) in control_of]
        differences = {}
        for ours in grouped(with_control, ["length"]):
            length = ours[0]["length"]
            if length > train_length:
                controls = [control_of[identity(row, MODEL)] for row in ours]
                with suppress(UserError):  # the window was measured on other targets
                    differences[length] = difference_of(ours, controls)
        if differences:
            lengths[label] = EffectiveLength(train_length, differences)
    return lengths


def table_of_effective_lengths(rows: Sequence[Row]) -> Table | None:
    """A line for each kind, or None if no rows have such a window."""
    body = []
    for label, effective in effective_lengths(rows).items():
        length = effective.length or min(effective.differences)
        difference = effective.differences[length]
        estimate = difference.estimate
        low, high = estimate.interval() or (math.nan, math.nan)
        gain = f"{estimate.mean:+.4f} [{low:+.4f}, {high:+.4f}] at {length}"
        body.append([label, str(effective), gain, f"{estimate.n} {difference.unit}"])
    head = ["encoding", "effective length", "loss - window [95 %]", "sample"]
    notes = [f"effective length: {HOW}"]
    return Table(head, body, notes, title="effective length") if body else None
