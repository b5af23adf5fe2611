"""How often the intervals of paired losses hold the truth.

python tools/bench/intervals.py [--runs 4000]

Simulates the differences between two encodings by blocks of 512 targets, whose mean is known to be
0, and counts how often the 95 % interval of megatron.results.statistics.mean_of_blocks holds it.
Beside each rate stands the mean width of the interval, over that of the interval that knows the
true error. Takes two to ten minutes; docs/evaluation.md has the table.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron.cli_errors import guarded
from megatron.results.statistics import mean_of_blocks

Blocks = NDArray[np.float64]

SHAPES = (  # (windows, blocks of a window)
    *((windows, 32) for windows in (1, 2, 3, 4, 8, 20, 80, 320)),  # windows of 16384
    *((windows, 8) for windows in (4, 32, 80)),  # of 4096
    *((windows, 2) for windows in (10, 128, 320)),  # of 1024
    *((windows, 1) for windows in (20, 40, 80, 256, 320)),  # of 512
)


@dataclass(frozen=True)
class Noise:
    """How blocks fluctuate; every block has variance 1 beside the profile.

    neighbours: correlation of neighbouring blocks, which falls as its powers (AR(1));
    slow: share of the variance that falls with a correlation of 0.9, as long documents make it;
    window: share of the variance that all blocks of a window have in common;
    profile: standard deviation of a difference that depends on the position within the window
    """

    name: str
    neighbours: float = 0.0
    slow: float = 0.0
    window: float = 0.0
    profile: float = 0.0


NOISES = (
    Noise("independent"),
    Noise("AR(1) 0.2", neighbours=0.2),
    Noise("AR(1) 0.4", neighbours=0.4),
    Noise("AR(1) 0.6", neighbours=0.6),
    Noise("documents", slow=0.45),
    Noise("window 0.02", window=0.02),
    Noise("window 0.1", window=0.1),
    Noise("window 0.3", window=0.3),
    Noise("AR(1) 0.4, window 0.3", neighbours=0.4, window=0.3),
    Noise("profile", profile=2.0),
)


@dataclass(frozen=True)
class Rate:
    """Over many runs: how many intervals hold the truth, and their width relative to the best."""

    covered: float
    width: float


@guarded
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=4000, help="simulated texts for each cell")
    options = parser.parse_args(argv)
    print("| windows x blocks | " + " | ".join(noise.name for noise in NOISES) + " |")
    print("| --- |" + " ---: |" * len(NOISES))
    for shape in SHAPES:
        cells = [_cell(noise, shape, options.runs) for noise in NOISES]
        print("| {} x {} | ".format(*shape) + " | ".join(cells) + " |", flush=True)
    return 0


def _cell(noise: Noise, shape: tuple[int, int], runs: int) -> str:
    needs_windows = noise.window > 0 or noise.profile > 0
    if needs_windows and shape[1] == 1:
        return "-"
    rate = coverage(noise, *shape, runs=runs)
    return f"{100 * rate.covered:.0f} ({rate.width:.2f})"


def coverage(noise: Noise, windows: int, in_window: int, *, runs: int, seed: int = 0) -> Rate:
    """The rate at which intervals hold 0, and their mean width over 2 · 1.96 true errors."""
    generator = np.random.default_rng(seed)
    means: list[float] = []
    ends: list[tuple[float, float]] = []
    for differences in simulated(generator, noise, runs, windows, in_window):
        estimate = mean_of_blocks(differences.ravel(), [in_window] * windows)
        interval = estimate.interval()
        assert interval is not None
        means.append(estimate.mean)
        ends.append(interval)
    low, high = np.array(ends).T
    covered = float(((low < 0) & (high > 0)).mean())
    best = 2 * 1.96 * np.std(means)
    return Rate(covered, float((high - low).mean() / best))


def simulated(
    generator: np.random.Generator, noise: Noise, runs: int, windows: int, in_window: int
) -> Blocks:
    """Differences by block whose expectation over all blocks is 0: [runs, windows, in_window]."""
    shape = (runs, windows, in_window)
    n = windows * in_window
    fast = _autoregression(generator, runs, n, noise.neighbours).reshape(shape)
    blocks = np.sqrt(1 - noise.slow - noise.window) * fast
    if noise.slow:
        slow = _autoregression(generator, runs, n, 0.9).reshape(shape)
        blocks += np.sqrt(noise.slow) * slow
    if noise.window:
        common = generator.standard_normal((runs, windows, 1))
        blocks += np.sqrt(noise.window) * common
    if noise.profile and in_window > 1:
        rising = np.log1p(np.arange(in_window))
        blocks += noise.profile * (rising - rising.mean()) / rising.std()
    return blocks


def _autoregression(generator: np.random.Generator, runs: int, n: int, rho: float) -> Blocks:
    """Normal values of variance 1 whose neighbours correlate by rho: [runs, n]."""
    values = generator.standard_normal((runs, n))
    if rho == 0:
        return values
    fresh = np.sqrt(1 - rho**2)
    for number in range(1, n):
        values[:, number] = rho * values[:, number - 1] + fresh * values[:, number]
    return values


if __name__ == "__main__":
    sys.exit(main())
