"""Intervals against simulations of known truth, and published quantiles."""

import numpy as np
import pytest

from megatron.results.statistics import (
    Estimate,
    holm,
    mean_of,
    mean_of_blocks,
    t_quantile,
)


def correlated(generator, count, n, rho):
    """Standard normal values whose neighbours correlate by rho: [count, n]."""
    values = generator.standard_normal((count, n))
    for number in range(1, n):
        values[:, number] = rho * values[:, number - 1] + np.sqrt(1 - rho**2) * values[:, number]
    return values


@pytest.mark.parametrize("estimate", [mean_of, mean_of_blocks])
@pytest.mark.parametrize(("n", "rho"), [(8, 0.0), (20, 0.2), (40, 0.3), (320, 0.4)])
def test_the_interval_covers_the_truth_at_its_nominal_rate(n, rho, estimate):
    draws = correlated(np.random.default_rng(n), 400, n, rho)
    intervals = [estimate(values).interval() for values in draws]
    rate = np.mean([low < 0 < high for low, high in intervals])
    assert abs(rate - 0.95) < 3 * np.sqrt(0.95 * 0.05 / 400), rate


def test_values_weigh_as_much_as_their_tokens():
    values, weights = [2.0, *[1.0] * 30], [488, *[512] * 30]
    mean = pytest.approx((2 * 488 + 30 * 512) / (488 + 30 * 512))
    assert mean_of(values, weights).mean == mean_of_blocks(values, weights).mean == mean


def test_neighbours_that_are_alike_count_less():
    # The mean of an AR(1) series has (1 + rho) / (1 - rho) times the variance of independent ones.
    for rho in (0.0, 0.5):
        (values,) = correlated(np.random.default_rng(2), 1, 20000, rho)
        for estimate in (mean_of(values), mean_of_blocks(values)):
            variance = estimate.stderr**2 * 20000
            assert variance == pytest.approx((1 + rho) / (1 - rho), rel=0.2)


def test_two_values_say_nothing_about_their_error():
    assert mean_of([1.0, 2.0]).interval() == ()
    assert mean_of([1.0, 2.0]).p is None
    assert mean_of_blocks([1.0, 1.0, 1.0]).interval() == (1.0, 1.0)


def test_what_the_blocks_of_a_window_share_gives_the_error_of_independent_windows():
    windows = np.random.default_rng(3).standard_normal(6)
    shared = mean_of_blocks(np.repeat(windows, 32), windows=6)
    assert shared.mean == pytest.approx(windows.mean())
    assert shared.stderr == pytest.approx(windows.std(ddof=1) / np.sqrt(6))
    assert (shared.df, shared.n) == (5, 192)


def test_a_profile_that_every_window_repeats_changes_the_mean_and_not_its_error():
    noise = np.random.default_rng(5).standard_normal((8, 32))
    profile = np.log1p(np.arange(32))
    flat, rising = (
        mean_of_blocks(blocks.ravel(), windows=8) for blocks in (noise, noise + profile)
    )
    assert rising.mean - flat.mean == pytest.approx(profile.mean())
    assert (rising.stderr, rising.df) == (pytest.approx(flat.stderr), flat.df)


@pytest.mark.parametrize(
    ("probability", "df", "t"),  # printed tables of Student's t
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 5, 2.5706),
        (0.95, 10, 1.8125),
        (0.995, 30, 2.7500),
    ],
)
def test_quantiles_are_those_of_the_tables(probability, df, t):
    assert t_quantile(probability, df) == pytest.approx(t, abs=5e-5)
    estimate = Estimate(t, 1.0, df, df + 1)
    assert estimate.p == pytest.approx(2 * (1 - probability), abs=1e-5)


def test_holms_correction_is_that_of_r():
    # p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
