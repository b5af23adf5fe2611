"""FIRE in pieces, and far beyond the lengths of the authors' numbers."""

import math

import pytest
import torch

from megatron.attention import attention
from megatron.positions import Shape, build, fire
from tests.support import measures_memory, memory_below

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)


def psi(c: float, x: float) -> float:
    return math.log(c * x + 1)


def test_far_distances_are_equation_9_in_float64():
    position = build("fire", SHAPE, mlp_layers=[5, 6], c=0.3, length_multiplier=1.5)
    assert position.threshold == 32
    numbers = {name: value.detach().double() for name, value in position.named_parameters()}
    for i, j in ((0, 0), (31, 5), (64, 0), (16383, 0), (131071, 7)):
        ratio = psi(0.3, i - j) / (psi(0.3, max(1.5 * 32, i)) + 1e-6)
        values = torch.tensor([ratio], dtype=torch.float64)
        for layer in (0, 1):
            values = numbers[f"weight_{layer}"] @ values + numbers[f"bias_{layer}"]
            values = values.clamp(min=0)
        expected = (numbers["weight_2"] @ values).tolist()
        bias = position.index_bias(torch.tensor([i]), torch.tensor([j]))[:, 0, 0]
        assert bias.tolist() == pytest.approx(expected, rel=2e-5, abs=1e-6)


@measures_memory
def test_long_texts_need_no_square_of_memory(monkeypatch):
    monkeypatch.setattr(fire, "NUMBERS", 2**16)
    position = build("fire", Shape(1, 4, 4, 64), mlp_layers=[4])
    q, k, v = torch.randn(3, 1, 1, 2816, 4)
    # The square alone is 32 MB for one head, and the MLP's values four times that. A block of 256
    # queries is 3 MB, and a few exist at a time.
    with torch.no_grad(), memory_below(40e6):
        attention(q, k, v, index_bias=position.index_bias, backend="sdpa")
