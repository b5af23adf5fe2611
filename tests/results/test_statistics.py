"""Intervals against simulations of known truth, and published quantiles."""

import numpy as np
import pytest

from megatron.results.statistics import holm, mean_of, t_distribution, t_quantile


def correlated(generator, count, n, rho):
    """Standard normal values whose neighbours correlate by rho: [count, n]."""
    values = generator.standard_normal((count, n))
    for number in range(1, n):
        values[:, number] = rho * values[:, number - 1] + np.sqrt(1 - rho**2) * values[:, number]
    return values


@pytest.mark.parametrize(("n", "rho"), [(8, 0.0), (20, 0.2), (40, 0.3), (320, 0.4)])
def test_the_interval_covers_the_truth_at_its_nominal_rate(n, rho):
    intervals = [
        mean_of(values).interval() for values in correlated(np.random.default_rng(n), 400, n, rho)
    ]
    rate = np.mean([low < 0 < high for low, high in intervals])
    assert abs(rate - 0.95) < 3 * np.sqrt(0.95 * 0.05 / 400), rate


def test_windows_weigh_as_much_as_their_tokens():
    generator = np.random.default_rng(1)
    weights = np.array([512, *[256] * 30])
    assert mean_of([2.0, *[1.0] * 30], weights).mean == pytest.approx(
        (512 * 2 + 30 * 256) / (512 + 30 * 256)
    )
    intervals = [
        mean_of(values, weights).interval() for values in correlated(generator, 400, 31, 0.0)
    ]
    assert abs(np.mean([low < 0 < high for low, high in intervals]) - 0.95) < 3 * np.sqrt(
        0.95 * 0.05 / 400
    )


def test_windows_that_are_alike_count_less():
    # An AR(1) series of n values is worth n (1 - rho) / (1 + rho) independent ones.
    for rho in (0.0, 0.5):
        (values,) = correlated(np.random.default_rng(2), 1, 20000, rho)
        assert mean_of(values).n_eff == pytest.approx(20000 * (1 - rho) / (1 + rho), rel=0.2)


def test_two_windows_say_nothing_about_their_error():
    assert mean_of([1.0, 2.0]).interval() is None
    assert mean_of([1.0, 2.0]).p is None


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
    assert t_distribution(-t, df) == pytest.approx(1 - probability, abs=1e-5)


def test_holms_correction_is_that_of_r():
    # p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([]) == []
