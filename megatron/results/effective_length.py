"""Effective length: up to which length a model gains from text beyond its training window."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from megatron.errors import UserError
from megatron.results.comparison import Difference, difference_of
from megatron.results.comparison_table import in_brackets
from megatron.results.labels import kinds, sections
from megatron.results.row import RUN, Row, grouped, identity, trained_length, value_of
from megatron.results.table import Table

MODEL = tuple(key for key in RUN if key != "window")
NOTE = (
    "effective length: the longest length at which `tail` has a lower loss than the same weights"
    " limited to a window of the training length, on the same targets, with a 95 % interval below"
    " 0; each length is tested on its own"
)


class EffectiveLength(NamedTuple):
    """What an encoding gains from more context than its training length.

    text: the length in words; length: the longest one with a gain, or None
    differences: by length, loss minus that of the same weights with the window
    """

    text: str
    length: int | None
    differences: Mapping[int, Difference]


def effective_lengths(rows: Sequence[Row]) -> dict[str, EffectiveLength]:
    """Of every kind whose rows of `tail` can be compared with the window, by its label."""
    tails = [row for row in rows if row.get("protocol") == "tail" and row["loss"] is not None]
    # The targets are the same at all lengths, so that the window's longest one is enough.
    control_of = {
        identity(row, MODEL): row
        for row in sorted(tails, key=lambda row: row["length"])
        if value_of(row, "window") == trained_length(row)
    }

    lengths = {}
    # A model with windows of its own has no control: the evaluation's window would widen them.
    unlimited = [row for row in tails if value_of(row, "window") == "none"]
    for label, measured in kinds(unlimited).items():
        train_length = trained_length(measured[0]) or 0
        longer = [
            row
            for row in measured
            if row["length"] > train_length and identity(row, MODEL) in control_of
        ]
        differences = {}
        for ours in grouped(longer, ["length"]):
            controls = [control_of[identity(row, MODEL)] for row in ours]
            with suppress(UserError):  # the window was measured on other targets
                differences[ours[0]["length"]] = difference_of(ours, controls)
        if not differences:
            continue
        gains = [
            length
            for length, difference in differences.items()
            if max(difference.estimate.interval(), default=0) < 0
        ]
        longest = max(gains, default=None)
        text = str(longest or f"none shown above {train_length}")
        if longest == max(differences):
            text += " or more"
        lengths[label] = EffectiveLength(text, longest, differences)
    return lengths


def tables_of_effective_lengths(rows: Sequence[Row]) -> list[Table]:
    """A table for each text on which rows have such a window, with a line for each kind."""
    head = ["encoding", "effective length", "loss - window [95 %]", "sample"]
    tables = []
    for heading, of_text in sections(rows).items():
        body = []
        for label, effective in effective_lengths(of_text).items():
            length = effective.length or min(effective.differences)
            difference = effective.differences[length]
            estimate = difference.estimate
            bounds = in_brackets(f"{bound:+.4f}" for bound in estimate.interval())
            loss = f"{estimate.mean:+.4f} {bounds} at {length}"
            body.append([label, effective.text, loss, f"{estimate.n} {difference.unit}"])
        if body:
            tables.append(Table(head, body, [NOTE], title=f"effective length, {heading}"))
    return tables
