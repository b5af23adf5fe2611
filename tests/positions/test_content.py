"""Encodings by content one number at a time in float64: Cable, of which there are no authors'
numbers, and RePo in other sizes than those of its authors' numbers."""

import math

import pytest
import torch

from megatron.errors import UserError
from megatron.positions import Shape, build
from tests.model import test_cache

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


@torch.no_grad()
def test_repo_with_one_position_for_all_heads_has_fewer_key_heads():
    grouped = "num_key_value_heads=2"
    with pytest.raises(UserError, match="RePo changes the keys of each head in its own way"):
        test_cache.model("repo", grouped)
    gpt = test_cache.model("repo", grouped, "pos_emb_args={by_head: false}")
    ids = torch.randint(50, (2, 40))
    whole = gpt(ids)
    torch.testing.assert_close(
        test_cache.in_pieces(gpt, ids, [13, 1, 26]), whole, rtol=0, atol=1e-4
    )
