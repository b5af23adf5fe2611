"""What the log says about time, by a clock of our own."""

import pytest

from megatron.training import metrics
from megatron.training.metrics import RECENT, Progress


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time in seconds, to be moved by a test."""
    seconds = [100.0]
    monkeypatch.setattr(metrics, "_now", lambda: seconds[0])
    return seconds


def test_a_validation_counts_for_the_time_left_but_not_for_the_speed(clock):
    progress = Progress(step=0, steps=30)
    clock[0] += 20  # ten steps of two seconds
    with progress.paused():
        clock[0] += 80
    assert progress.advance(10) == 2
    assert progress.remaining() == "0:03:20"  # ten seconds a step, all in all
    clock[0] += 5
    assert progress.advance(15) == 1


def test_the_time_left_follows_the_speed_of_the_last_lines(clock):
    progress = Progress(step=0, steps=1000)
    clock[0] += 500  # slow beside another program
    assert progress.advance(10) == 50
    assert progress.remaining() == "13:45:00"
    for line in range(RECENT):
        clock[0] += 10
        assert progress.advance(20 + 10 * line) == 1
    left = 1000 - 10 - 10 * RECENT
    assert progress.remaining() == f"0:{left // 60:02}:{left % 60:02}"
