"""Means of losses and of paired differences with their uncertainty; neighbouring windows are alike, and that counts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Estimate:
    """A mean: its standard error, the degrees of freedom of that, and what the sample is worth.

    n: values; block: neighbouring values that are taken together; n_eff: independent values with the same error
    """

    mean: float
    stderr: float | None
    df: int
    n: int
    block: int
    n_eff: float | None

    def interval(self, level: float = 0.95) -> tuple[float, float] | None:
        """Student's interval around the mean; None where one value says nothing about its error."""
        if self.stderr is None:
            return None
        half = t_quantile(0.5 + level / 2, self.df) * self.stderr
        return self.mean - half, self.mean + half

    @property
    def p(self) -> float | None:
        """Two-sided probability of a mean this far from 0, were it 0."""
        if self.stderr is None:
            return None
        if self.stderr == 0:
            return 1.0 if self.mean == 0 else 0.0
        return 2 * (1 - t_distribution(abs(self.mean) / self.stderr, self.df))


def mean_of(values: ArrayLike, weights: ArrayLike | None = None) -> Estimate:
    """The weighted mean of neighbouring values, its error from overlapping blocks of b of the n (Meketon and Schmeiser
    1984): n b / ((n - b + 1) (n - b)) times the squared deviations of block means, 1.5 (n / b - 1) degrees of freedom.
    """
    x = np.asarray(values, dtype=np.float64)
    w = np.ones_like(x) if weights is None else np.asarray(weights, dtype=np.float64)
    n, block = len(x), block_length(len(x))
    mean = float((w * x).sum() / w.sum())
    if n < 3:
        return Estimate(mean, None, 0, n, block, None)
    deviation = w * (x - mean) / w.mean()  # linearised: its mean varies as the weighted mean does
    blocks = np.convolve(deviation, np.ones(block), mode="valid") / block
    long_run = float(n * block / ((n - block + 1) * (n - block)) * (blocks**2).sum())
    own = float(deviation.var(ddof=1))
    n_eff = min(float(n), n * own / long_run) if long_run > 0 else float(n)
    df = max(1, min(n - 1, math.floor(1.5 * (n / block - 1))))
    return Estimate(mean, math.sqrt(long_run / n), df, n, block, n_eff)


def mean_over_seeds(values: ArrayLike) -> Estimate:
    """The mean of independent values, as the runs of several seeds give them; std is stderr · √n."""
    x = np.asarray(values, dtype=np.float64)
    n = len(x)
    stderr = float(x.std(ddof=1) / math.sqrt(n)) if n > 1 else None
    return Estimate(float(x.mean()), stderr, n - 1, n, 1, float(n) if n > 1 else None)


def block_length(n: int) -> int:
    """Neighbours in a block: twice the cube root of n (the rate at which the error of a block variance is least), a
    quarter of n at most; in simulations an interval of 95 % then has 0.93 to 0.96 where neighbours correlate by 0.4 or
    less and n is 20 or more."""
    return max(1, min(round(2 * n ** (1 / 3)), n // 4))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p, in the order given: below alpha with probability at most alpha if no difference is real."""
    order = np.argsort(p_values, kind="stable")
    adjusted, highest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted


def t_distribution(t: float, df: int) -> float:
    """P(T < t) of Student's t with whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan2(abs(t), math.sqrt(df))
    cos2, sin = math.cos(angle) ** 2, math.sin(angle)
    term, total = 1.0, 0.0
    for k in range(df // 2 if df % 2 == 0 else (df - 1) // 2):
        total += term
        term *= cos2 * ((2 * k + 1) / (2 * k + 2) if df % 2 == 0 else (2 * k + 2) / (2 * k + 3))
    inside = sin * total if df % 2 == 0 else 2 / math.pi * (angle + sin * math.cos(angle) * total)
    return 0.5 + math.copysign(inside, t) / 2


def t_quantile(probability: float, df: int) -> float:
    """The t with P(T < t) = probability, from 0.5 to below 1, by halving."""
    low, high = 0.0, 1.0
    while t_distribution(high, df) < probability:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_distribution(middle, df) < probability else (low, middle)
    return (low + high) / 2


def perplexity_of(loss: float) -> float | None:
    """exp(loss), or None where that is too large for a number."""
    return math.exp(loss) if loss < math.log(np.finfo(np.float64).max) else None


def prefix_curve(edges: Sequence[int], losses: Sequence[float]) -> dict[int, float]:
    """The mean loss over all positions before each edge but the first, from the mean losses between edges."""
    totals = np.cumsum(np.diff(edges) * np.asarray(losses))
    return {edge: float(total / edge) for edge, total in zip(edges[1:], totals, strict=True)}


def half_octaves(edges: Sequence[int], values: ArrayLike) -> tuple[list[float], list[float]]:
    """(middles, means) of the buckets between edges, taken together until a bin spans a factor of sqrt(2)."""
    at, means, start, known = [], [], 0, np.asarray(values, dtype=np.float64)
    for end in range(1, len(edges)):
        if end < len(edges) - 1 and edges[end] < math.sqrt(2) * edges[start]:
            continue
        at.append((edges[start] + edges[end]) / 2)
        means.append(float(np.average(known[start:end], weights=np.diff(edges[start : end + 1]))))
        start = end
    return at, means
