"""What a training needs."""

import pytest

from megatron.config import load
from megatron.training.fits import memory_to_train
from tests.training.conftest import tiny


def memory_of_a_number(*words: str) -> float:
    return memory_to_train(load([], tiny("train_iters=1", *words)), 10**6, 4) / 10**6


def test_zero_divides_the_state():
    fp32 = [memory_of_a_number(f"zero_optimization.stage={stage}") for stage in range(4)]
    assert fp32 == pytest.approx([16, 4 + 4 + 2, 4 + 1 + 2, 1 + 1 + 2])
    assert memory_of_a_number("precision=bf16") == pytest.approx(2 + 2 + 3)
