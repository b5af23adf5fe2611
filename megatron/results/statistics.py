"""Means of losses and of paired differences, with errors that allow for correlated neighbours."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy  # loads scipy.stats at its first use: it takes a second
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

FEWEST = 3  # values that an error is computed from
POWER = 0.8  # of a sample that suffices
MOST = 1_000_000  # values of a sample that is worth a number
CERTAIN = 30  # standard errors that any sample finds
LIKE_NORMAL = 400  # degrees of freedom: with more, Student's t hardly changes


@dataclass(frozen=True)
class Estimate:
    """A mean and its error.

    df: degrees of freedom of the error; n: values
    """

    mean: float
    stderr: float | None
    df: int
    n: int

    def interval(self) -> tuple[float, ...]:
        """Both ends of Student's interval of 95 % around the mean; () for too few values."""
        if self.stderr is None:
            return ()
        half = t_quantile(0.975, self.df) * self.stderr
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float | None:
        """Two-sided probability of a mean this far from 0, were the truth 0."""
        if self.stderr is None:
            return None
        if self.stderr == 0:
            return float(self.mean == 0)
        return float(2 * scipy.stats.t.cdf(-abs(self.mean) / self.stderr, self.df))


def mean_of(values: ArrayLike, weights: ArrayLike | None = None) -> Estimate:
    """The weighted mean of neighbouring values [n], such as the losses of windows in text order.

    Overlapping batches of b values give the error (Meketon and Schmeiser 1984):
    n b / ((n - b + 1) (n - b)) times the squared means of the batches' deviations, with
    1.5 (n / b - 1) degrees of freedom.
    """
    mean, deviation = _mean_and_deviations(values, weights)
    n = len(deviation)
    if n < FEWEST:
        return Estimate(mean, None, 0, n)
    block = block_length(n)
    batches = np.convolve(deviation, np.ones(block), mode="valid") / block  # overlapping
    scale = block / ((n - block + 1) * (n - block))
    return Estimate(mean, math.sqrt(scale * float((batches**2).sum())), df_of_batches(n), n)


def mean_of_blocks(
    values: ArrayLike, weights: ArrayLike | None = None, windows: int = 1
) -> Estimate:
    """The weighted mean of values of blocks [n] in text order, such as differences in loss.

    windows: that hold n / windows of the blocks each; 1 if they hold different numbers

    The error is the larger of two, each with the interval of its own degrees of freedom. One allows
    for neighbours that correlate: slow cosine waves over the whole text measure how much its mean
    fluctuates (Lazarus, Lewis, Stock and Watson 2018). The other allows for what all blocks of a
    window share: the spread of the sums of windows. A difference that depends on the position
    within the window is no error; it counts in neither.
    """
    mean, deviation = _mean_and_deviations(values, weights)
    n = len(deviation)
    if n < FEWEST:
        return Estimate(mean, None, 0, n)
    amplitudes = slow_waves(windows, n // windows).T @ deviation  # [waves]
    df = len(amplitudes)
    stderr = math.sqrt(float((amplitudes**2).mean()) / n)
    if 1 < windows < n:
        sums = deviation.reshape(windows, -1).sum(axis=1)
        between = math.sqrt(windows / (windows - 1) * float((sums**2).sum())) / n
        if t_quantile(0.975, windows - 1) * between > t_quantile(0.975, df) * stderr:
            stderr, df = between, windows - 1
    return Estimate(mean, stderr, df, n)


def _mean_and_deviations(values: ArrayLike, weights: ArrayLike | None) -> tuple[float, Array]:
    """The weighted mean, and deviations [n] whose plain mean varies as it does."""
    x = np.asarray(values, dtype=np.float64)
    w = np.ones_like(x) if weights is None else np.asarray(weights, dtype=np.float64)
    mean = float((w * x).sum() / w.sum())
    return mean, w * (x - mean) / w.mean()


@lru_cache(maxsize=16)
def slow_waves(windows: int, in_window: int) -> Array:
    """Slow cosine waves over n values: [n = windows · in_window, waves].

    The waves are orthogonal to each other, to a constant and, with several windows, to everything
    that repeats from window to window. Their number is 0.3 n^(2/3), and all are slower than a
    window. Lazarus et al. recommend 0.4 n^(2/3); differences between encodings correlate over
    several blocks, for which 0.3 covers better (docs/evaluation.md).
    """
    n = windows * in_window
    count = max(1, round(0.3 * n ** (2 / 3)))
    repeats = windows > 1 and in_window > 1
    if repeats:
        count = min(count, 2 * windows - 1)
    middles = (np.arange(n) + 0.5) / n
    waves = np.cos(np.pi * np.outer(middles, np.arange(1, count + 1)))
    if repeats:
        by_window = waves.reshape(windows, in_window, count)
        waves = (by_window - by_window.mean(axis=0)).reshape(n, count)
    orthogonal, _ = np.linalg.qr(waves)
    return orthogonal


def mean_over_seeds(values: ArrayLike) -> Estimate:
    """The mean of independent values, one for each seed."""
    x = np.asarray(values, dtype=np.float64)
    return Estimate(float(x.mean()), float(scipy.stats.sem(x)), len(x) - 1, len(x))


def block_length(n: int) -> int:
    """Values of a batch: 2 n^(1/3), at most n / 4.

    The error of the variance is least at the rate n^(1/3). In simulations an interval of 95 % then
    covers 93 to 96 % where n is at least 20 and neighbours correlate by at most 0.4.
    """
    return max(1, min(round(2 * n ** (1 / 3)), n // 4))


def df_of_batches(n: int) -> int:
    """Degrees of freedom of n values in overlapping batches."""
    df = math.floor(1.5 * (n / block_length(n) - 1))
    return max(1, min(n - 1, df))


def holm(p_values: ArrayLike) -> list[float]:
    """Holm's adjusted p, in the order given.

    Where no difference is real, one of them is below alpha with probability alpha at most.
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = p.argsort(kind="stable")
    corrected = p[order] * np.arange(len(p), 0, -1)  # times the hypotheses that are left
    adjusted = np.maximum.accumulate(corrected).clip(max=1)
    return adjusted[order.argsort()].tolist()


def corrected_for(tests: int) -> str:
    """How a note about p ends where `holm` changed it."""
    return f", with Holm's correction for {tests} comparisons" if tests > 1 else ""


@lru_cache(maxsize=256)
def t_quantile(probability: float, df: int) -> float:
    """The t with P(T < t) = probability, of Student's t."""
    return float(scipy.stats.t.ppf(probability, df))


def values_needed(estimate: Estimate, distance: float, level: float, unit: str) -> int | None:
    """How many values would find a distance with probability POWER; None for no number.

    distance: of the mean from the value that it is tested against, were it the true one
    level: of the one-sided t test
    unit: seeds, windows or blocks; degrees of freedom are those of `mean_over_seeds` and `mean_of`,
        of blocks they grow as n^(2/3)
    """
    if not estimate.stderr or not distance:
        return None
    shift_of_one = abs(distance) / estimate.stderr

    def suffices(n: int) -> bool:
        times = n / estimate.n
        df = n - 1
        if unit == "windows":
            df = df_of_batches(n)
        elif unit == "blocks":
            df = math.floor((estimate.df + 1) * times ** (2 / 3)) - 1
        df = max(1, min(df, LIKE_NORMAL))
        shift = min(shift_of_one * math.sqrt(times), CERTAIN)  # of the noncentral t
        return scipy.stats.nct.sf(t_quantile(1 - level, df), df, shift) >= POWER

    needed = bisect_left(range(MOST), True, lo=FEWEST, key=suffices)
    return needed if needed < MOST else None


def perplexity_of(loss: float) -> float | None:
    """exp(loss), or None if that is too large for a number."""
    largest = math.log(np.finfo(np.float64).max)
    return math.exp(loss) if loss < largest else None


def bits_per_byte(loss: float, tokens: int, size: float) -> float | None:
    """The bits that a byte of text needs: loss * tokens / (ln 2 * size); None for no text.

    loss: mean over the targets, in nats; tokens: targets; size: UTF-8 bytes of their text
    """
    return loss * tokens / (math.log(2) * size) if size else None


def prefix_curve(edges: Sequence[int], losses: Sequence[float]) -> dict[int, float]:
    """The mean loss over all positions before each edge but the first.

    edges: positions [n + 1]; losses: means [n] over the positions between edges
    """
    totals = np.cumsum(np.diff(edges) * np.asarray(losses))
    return {edge: float(total / edge) for edge, total in zip(edges[1:], totals, strict=True)}


def half_octaves(edges: Sequence[int], values: Sequence[float]) -> tuple[list[float], list[float]]:
    """(middles, means) of wider bins, which begin at powers of √2.

    edges: positions [n + 1]; values: means [n] over the positions between edges
    """
    starts = np.asarray(edges[:-1])
    widths = np.diff(edges)
    bins = np.floor(2 * np.log2(np.maximum(starts, 1)))
    _, firsts = np.unique(bins, return_index=True)
    sizes = np.add.reduceat(widths, firsts)
    means = np.add.reduceat(widths * values, firsts) / sizes
    return (starts[firsts] + sizes / 2).tolist(), means.tolist()
