"""The decay of APE against its formula in float64, and its place in a sum with rotary."""

import math

import pytest
import torch

from megatron.positions import Shape, build

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)


def test_the_bias_has_a_linear_a_logarithmic_and_a_root_term():
    position = build("ape_decay", SHAPE)
    found = position.distance_bias(16384)
    numbers = {name: value.tolist() for name, value in position.named_parameters()}
    assert sorted(numbers) == ["linear", "log", "root"]
    for head in range(3):
        delta, beta, gamma = (numbers[name][head] for name in ("linear", "log", "root"))
        for d in (0, 1, 2, 63, 1000, 16383):
            expected = -delta * d - beta * math.log(1 + d) - gamma * math.sqrt(d)
            assert found[head, d].item() == pytest.approx(expected, rel=1e-6)


def test_fixed_numbers_are_not_learned():
    position = build("ape_decay", SHAPE, linear=0.5, log=[1, 2, 3], root=1e-3)
    assert not list(position.parameters())
    expected = torch.tensor([[0.5 * 3 + b * math.log(4) + 1e-3 * math.sqrt(3)] for b in (1, 2, 3)])
    torch.testing.assert_close(-position.distance_bias(4)[:, 3:], expected)
