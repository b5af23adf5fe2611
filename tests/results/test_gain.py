"""The gain of far context: its mean over windows and shares of targets."""

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


def test_each_longer_length_stands_against_the_shortest_of_the_same_targets():
    measured = with_targets("a", {64: SHORT, 128: LONG, 512: LONG})
    measured += with_targets("b", {64: LONG, 512: SHORT})
    measured += with_targets("c", {64: SHORT}) + with_targets("c", {512: LONG}, text="cd")
    measured += rows("d", {64: 3.0})
    table = table_of_gains(measured)
    assert [line[:3] for line in table.body] == [
        ["a", "64 to 128", "64"],
        ["a", "64 to 512", "64"],
        ["b", "64 to 512", "64"],
    ]
    low, high = mean_of((SHORT - LONG).mean(axis=1)).interval()
    gained, lost = (f"{100 * share.mean():.1f} %" for share in (DRAW < 0.3, DRAW > 0.9))
    mean = f"{(SHORT - LONG).mean():+.4f} [{low:+.4f}, {high:+.4f}]"
    assert table.body[0][3:] == [mean, gained, lost, "0.0 %", lost]
    assert table_of_gains(rows("d", {64: 3.0, 512: 2.0})) is None


def test_of_fewer_kept_losses_their_windows_count():
    short, long = (
        row | {"token_losses": row["token_losses"][:12]}
        for row in with_targets("a", {64: SHORT, 512: LONG})
    )
    (gain,) = gains_of([short, long])
    assert gain.mean.n == 3
    np.testing.assert_allclose(gain.gains, (SHORT - LONG).ravel()[:12])
    assert gain.mean.mean == pytest.approx(gain.gains.mean())
