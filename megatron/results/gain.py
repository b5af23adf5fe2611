"""The gain of far context: losses of the same targets after short and after long windows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy

from megatron.results.labels import runs
from megatron.results.row import Row
from megatron.results.statistics import Array, Estimate, mean_of
from megatron.results.table import Table

THRESHOLDS = (0.1, 1.0)  # nats


@dataclass(frozen=True)
class Gain:
    """What a longer context gives the same targets to one model.

    short, long: the rows; gains: loss after the short context minus that after the long one, in
    nats, [targets] in text order; sizes: targets of each window
    """

    short: Row
    long: Row
    gains: Array
    sizes: list[int]

    def over_windows(self, values: np.ndarray) -> Estimate:
        """The mean of values of targets [targets], with windows as the sample."""
        starts = np.cumsum([0, *self.sizes[:-1]])
        means = np.add.reduceat(values.astype(np.float64), starts) / self.sizes
        return mean_of(means, self.sizes)

    def share(self, least: float) -> tuple[float, float, float]:
        """The fraction of targets with a gain above `least`, and its 95 % interval.

        A negative `least`: with a loss above -least. Windows are the sample.
        """
        hits = self.gains > least if least >= 0 else self.gains < least
        estimate = self.over_windows(hits)
        interval = estimate.interval()
        if interval is None or not estimate.stderr:  # too few windows, or all have the same share
            windows = len(self.sizes)
            hits_of_windows = round(estimate.mean * windows)
            test = scipy.stats.binomtest(hits_of_windows, windows)
            interval = test.proportion_ci(method="wilson")
        return estimate.mean, max(0.0, interval[0]), min(1.0, interval[1])


def gains_of(rows: Sequence[Row]) -> list[Gain]:
    """The gains of every longer length over the shortest one; rows: one run, shortest first."""
    measured = [row for row in rows if row.get("token_losses")]
    gains = []
    for long in measured[1:]:
        short = measured[0]
        losses = [row.get("token_losses", []) for row in (short, long)]
        count = min(map(len, losses))
        windows = long.get("window_tokens") or [long["tokens"] // long["windows"]] * long["windows"]
        ends = np.cumsum(windows)
        whole = int(np.searchsorted(ends, count, side="right"))
        if long.get("region") == short.get("region") and whole:
            after_short, after_long = (np.array(row[: ends[whole - 1]]) for row in losses)
            gains.append(Gain(short, long, after_short - after_long, windows[:whole]))
    return gains


def table_of_gains(rows: Sequence[Row]) -> Table | None:
    """A line for each run and longer length; None if no row has losses of single targets."""
    head = ["pos_emb", "context", "targets", "mean gain"]
    head += [f"{word} > {least:g}" for least in THRESHOLDS for word in ("gain", "lose")]
    lines = []
    for label, members in runs(rows).items():
        for gain in gains_of(members):
            context = f"{gain.short['length']} to {gain.long['length']}"
            mean = gain.over_windows(gain.gains)
            text = f"{mean.mean:+z.4f}"
            if interval := mean.interval():
                text = "{} [{:+z.4f}, {:+z.4f}]".format(text, *interval)
            line = [label, context, f"{len(gain.gains):,}", text]
            for least in THRESHOLDS:
                for sign in (1, -1):
                    share, low, high = (f"{100 * bound:.1f}" for bound in gain.share(sign * least))
                    line.append(f"{share} % [{low}, {high}]")
            lines.append(line)
    if not lines:
        return None
    notes = [
        "gain: loss after the shorter window minus loss after the longer one, in nats, of the same"
        " targets; shares of targets with 95 % intervals over windows, about these weights"
    ]
    return Table(head, lines, notes, title="gain by far context")
