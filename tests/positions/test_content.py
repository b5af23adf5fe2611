"""Cable by its formula in float64, for there are no authors' numbers, and RePo with key heads."""

import pytest
import torch

from megatron.errors import UserError
from megatron.positions import Shape, build
from tests.model import test_cache

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)


@torch.no_grad()
def test_the_scores_get_the_papers_bias_as_a_penalty():
    """-g_i (S_i - S_j), with S the sums of steps of at least 0."""
    position, x = build("cable", SHAPE, init_std=0.3), torch.randn(1, 30, 24)
    u, w = position.score_bias(x, {})
    bias = u[..., None].double() * (w[:, :, None] - w[..., None])
    sums = (x.double() @ position.step.double()).clamp(min=0).cumsum(1).mT
    gain = (1 + (x.double() @ position.gain.double()).exp()).log().mT
    expected = -gain[..., None] * (sums[..., None] - sums[:, :, None])
    torch.testing.assert_close(bias.tril(), expected.tril(), rtol=0, atol=1e-4)


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
