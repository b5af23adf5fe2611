"""Cable, of which there are no authors' numbers, against a loop in float64."""

import math

import torch

from megatron.positions import Shape, build

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)


def test_the_scores_get_the_papers_bias_as_a_penalty():
    """-g_i (S_i - S_j), one number at a time."""
    position, x = build("cable", SHAPE, init_std=0.3), torch.randn(1, 30, 24)
    step, gain = (weight.detach().double() for weight in (position.step, position.gain))
    u, w = position.score_bias(x, {})
    bias = u[..., None].double() * (w[:, :, None] - w[..., None])
    for h in range(3):
        steps = [max(0.0, (token @ step[:, h]).item()) for token in x[0].double()]
        for i, token in enumerate(x[0].double()):
            softplus = math.log1p(math.exp((token @ gain[:, h]).item()))
            for j in range(i + 1):
                expected = -softplus * sum(steps[j + 1 : i + 1])
                assert abs(bias[0, h, i, j].item() - expected) < 1e-4
