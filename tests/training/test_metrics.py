"""What the log says about time, by a clock of our own."""

from megatron.training import metrics
from megatron.training.metrics import Progress


def test_a_validation_counts_for_the_time_left_but_not_for_the_speed(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(metrics, "_now", lambda: clock[0])
    progress = Progress(step=0, steps=30)
    clock[0] += 20  # ten steps of two seconds
    with progress.aside():
        clock[0] += 80
    assert progress.advance(10) == 2
    assert progress.remaining() == "0:03:20"  # ten seconds a step, all in all
    clock[0] += 5
    assert progress.advance(15) == 1
