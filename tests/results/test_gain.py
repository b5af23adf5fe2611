"""The gain of far context: shares of targets and their intervals, from losses of single targets."""

import numpy as np
import pytest

from megatron.results.gain import gains_of, table_of_gains
from megatron.results.statistics import mean_of
from tests.results.rows import rows


def with_targets(name, losses_by_length, **facts):
    """A row for each length whose 16 windows score 4 targets each."""
    measured = []
    for length, losses in losses_by_length.items():
        numbers = {"windows": 16, "tokens": 64, "tail": 4, "protocol": "tail", "text": "ab"}
        numbers |= {"token_losses": np.ravel(losses).tolist(), **facts}
        measured += rows(name, {length: 10.0}, **numbers)
    return measured


LONG = np.full((16, 4), 3.0)
DRAW = np.random.default_rng(5).random((16, 4))
SHORT = LONG + np.where(DRAW < 0.3, 0.5, 0.0) - np.where(DRAW > 0.9, 2.0, 0.0)


def test_the_shares_of_targets_that_gain_and_lose_are_counted_with_windows_as_the_sample():
    (gain,) = gains_of(with_targets("a", {64: SHORT, 512: LONG}))
    for least, hits in ((0.1, DRAW < 0.3), (-0.1, DRAW > 0.9), (-1.0, DRAW > 0.9)):
        share, low, high = gain.share(least)
        estimate = mean_of(hits.mean(axis=1))
        assert share == pytest.approx(hits.mean())
        around = estimate.interval()
        assert (low, high) == pytest.approx((max(0.0, around[0]), around[1]))
    # Wilson's interval of 0 of 16: z² / (16 + z²). None of 16 windows does not prove none.
    assert gain.share(1.0) == pytest.approx((0, 0, 1.96**2 / (16 + 1.96**2)), abs=1e-4)


def test_an_interval_over_windows_covers_the_share_where_targets_of_a_window_are_alike():
    draw = np.random.default_rng(6)
    covered = 0
    for _ in range(400):
        likely = draw.beta(2, 5, size=(16, 1))  # one share for each window, 2 / 7 on average
        gains = np.where(draw.random((16, 4)) < likely, 0.5, 0.0)
        (gain,) = gains_of(with_targets("a", {64: LONG + gains, 512: LONG}))
        _, low, high = gain.share(0.1)
        covered += low <= 2 / 7 <= high
    assert 0.90 <= covered / 400 <= 0.98


def test_each_longer_length_stands_against_the_shortest_of_the_same_targets():
    measured = with_targets("a", {64: SHORT, 128: LONG, 512: LONG}) + with_targets(
        "b", {64: LONG, 512: SHORT}
    )
    measured += (
        with_targets("c", {64: SHORT})
        + with_targets("c", {512: LONG}, text="cd")
        + rows("d", {64: 3.0})
    )
    table = table_of_gains(measured)
    lines = [[*line[:3], line[3].split()[0]] for line in table.body]
    mean = f"{(SHORT - LONG).mean():+.4f}"
    low, high = mean_of((SHORT - LONG).mean(axis=1)).interval()
    assert table.body[0][3] == f"{mean} [{low:+.4f}, {high:+.4f}]"
    assert lines == [
        ["a", "64 to 128", "64", mean],
        ["a", "64 to 512", "64", mean],
        ["b", "64 to 512", "64", f"{(LONG - SHORT).mean():+.4f}"],
    ]
    assert table.body[0][4].startswith(f"{100 * (DRAW < 0.3).mean():.1f} % [")
    assert table_of_gains(rows("d", {64: 3.0, 512: 2.0})) is None


def test_of_fewer_kept_losses_whole_windows_count():
    short, long = with_targets("a", {64: SHORT, 512: LONG})
    short["token_losses"] = short["token_losses"][:14]
    (gain,) = gains_of([short, long])
    assert gain.sizes == [4, 4, 4]
    np.testing.assert_allclose(gain.gains, (SHORT - LONG).ravel()[:12])
