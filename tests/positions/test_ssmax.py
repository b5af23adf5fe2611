"""Scalable softmax against its formula in float64."""

import math

import torch

from megatron.positions import Shape, build
from tests.positions.test_authors import output_of

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)


def test_weights_are_powers_of_the_number_of_visible_keys():
    """The paper's n^(s z) / sum n^(s z) with its bias: exp((s log n + b) z)."""
    ours = build("ssmax", SHAPE, bias=True).double()
    s, b = torch.tensor([[0.2, 0.43, 1.1], [0.5, -0.3, 0.0]], dtype=torch.float64)
    ours.scale.data.copy_(s)
    ours.offset.data.copy_(b)
    q, k, v = torch.randn(3, 2, 3, 20, 8, dtype=torch.float64)
    found = output_of(ours, q, k, v, torch.zeros(2, 20, 24))
    for query in range(20):
        n = query + 1
        z = (q[:, :, query, None] * k[:, :, :n]).sum(-1) / math.sqrt(8)  # [batch, heads, n]
        powers = n ** (s[:, None] * z) * torch.exp(b[:, None] * z)
        weights = powers / powers.sum(-1, keepdim=True)
        expected = (weights[..., None] * v[:, :, :n]).sum(2)
        torch.testing.assert_close(found[:, :, query], expected, rtol=1e-9, atol=1e-9)


def test_without_learning_the_factor_is_one_at_the_training_length_and_less_before():
    ours = build("ssmax", SHAPE, scale=None, learned=False)
    assert [*ours.parameters()] == []
    factor = ours.factor(0, 256)
    expected = torch.arange(1, 257).log() / math.log(64)
    torch.testing.assert_close(factor, expected.expand(3, -1), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.factor(100, 5), factor[:, 100:105], rtol=0, atol=0)
