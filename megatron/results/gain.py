"""The gain of far context: losses of the same targets after short and after long windows."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from megatron.results.labels import runs
from megatron.results.row import Row
from megatron.results.statistics import Array, Estimate, mean_of
from megatron.results.table import Table

THRESHOLDS = (0.1, 1.0)  # nats


class Gain(NamedTuple):
    """What a longer context gives the same targets to one model.

    short, long: the rows; gains: loss after the short context minus that after the long one, in
    nats, [targets] in text order; sizes: targets of each window; mean: with windows as the sample
    """

    short: Row
    long: Row
    gains: Array
    sizes: np.ndarray
    mean: Estimate


def gains_of(rows: Sequence[Row]) -> list[Gain]:
    """The gains of every longer length over the shortest one; rows: one run, shortest first."""
    measured = [row for row in rows if row.get("token_losses")]
    gains = []
    for long in measured[1:]:
        short = measured[0]
        after_short, after_long = (np.array(row.get("token_losses")) for row in (short, long))
        if long.get("region") != short.get("region") or len(after_short) != len(after_long):
            continue
        difference = after_short - after_long
        windows = long["windows"]
        starts = np.cumsum(
            [0, *(long.get("window_tokens") or [long["tokens"] // windows] * windows)]
        )
        starts = starts[starts < len(difference)]
        sizes = np.diff([*starts, len(difference)])
        mean = mean_of(np.add.reduceat(difference, starts) / sizes, sizes)
        gains.append(Gain(short, long, difference, sizes, mean))
    return gains


def table_of_gains(rows: Sequence[Row]) -> Table | None:
    """A line for each run and longer length; None if no row has losses of single targets."""
    head = ["pos_emb", "context", "targets", "mean gain"]
    head += [f"{word} > {least:g}" for least in THRESHOLDS for word in ("gain", "lose")]
    lines = []
    for label, members in runs(rows).items():
        for gain in gains_of(members):
            context = f"{gain.short['length']} to {gain.long['length']}"
            mean = f"{gain.mean.mean:+z.4f}"
            if interval := gain.mean.interval():
                mean = "{} [{:+z.4f}, {:+z.4f}]".format(mean, *interval)
            line = [label, context, f"{len(gain.gains):,}", mean]
            for least in THRESHOLDS:
                for change in (gain.gains, -gain.gains):
                    line.append(f"{100 * (change > least).mean():.1f} %")
            lines.append(line)
    if not lines:
        return None
    notes = [
        "gain: loss after the shorter window minus loss after the longer one, in nats, of the same"
        " targets; its 95 % interval is over windows, about these weights"
    ]
    return Table(head, lines, notes, title="gain by far context")
