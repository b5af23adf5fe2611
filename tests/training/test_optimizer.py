"""Both schedules at their ends and in between."""

import pytest

from megatron.config import load
from megatron.training.optimizer import learning_rate

SHAPE = ["num_layers=1", "hidden_size=8", "num_attention_heads=1", "seq_length=8"]


def rates(*settings: str, steps: int = 1000) -> list[float]:
    words = ["train_iters=1000", "optimizer.params.lr=1.0", "warmup=0.1", *settings]
    optimizer = load([], [*SHAPE, *words]).optimizer
    return [learning_rate(step, optimizer) for step in range(steps)]


@pytest.mark.parametrize("style", ["cosine", "linear"])
def test_the_standard_schedule_never_wastes_a_step(style):
    found = rates(f"lr_decay_style={style}", "min_lr=0.01")
    assert found[0] == pytest.approx(0.01)
    assert found[99] == pytest.approx(1.0) == max(found)
    assert found[549] == pytest.approx(0.505, abs=2e-3)  # half way between peak and floor
    assert found[-1] == pytest.approx(0.01, abs=2e-3)
    assert found[100:] == sorted(found[100:], reverse=True)
    assert len(set(found[100:])) == 900


def test_constant_stays_at_its_peak_and_the_floor_holds_everywhere():
    assert set(rates("lr_decay_style=constant", "warmup=0")) == {1.0}
    assert min(rates("lr_schedule=neox-2022", "min_lr=0.3")) == 0.3
