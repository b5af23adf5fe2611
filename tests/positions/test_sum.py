"""Several encodings at once do what each of them does."""

import torch

from megatron.conformance.subject import scores as scores_of
from megatron.positions import Shape, build

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)


def test_a_rotation_and_two_biases_act_together():
    parts = ["rotary", {"alibi": {"slope_factor": 0.5}}, "mep_free"]
    both = build("sum", SHAPE, parts=parts).double()
    q, k = torch.randn(2, 2, 3, 20, 8, dtype=torch.float64)
    x = torch.zeros(2, 20, 24, dtype=torch.float64)
    bias = build("alibi", SHAPE, slope_factor=0.5).double().distance_bias(20)
    bias = bias + build("mep_free", SHAPE).double().distance_bias(20)
    index = torch.arange(20)
    distance = (index[:, None] - index).clamp(min=0)
    expected = scores_of(build("rotary", SHAPE).double(), q, k, x) + bias[:, distance].tril()
    torch.testing.assert_close(scores_of(both, q, k, x), expected, rtol=1e-12, atol=1e-12)


def test_biases_by_content_are_one_product_of_higher_rank_and_keep_what_is_theirs():
    """All three store a tensor called total for later tokens; a cached text needs each."""
    parts = ["cable", {"fox": {"init_std": 0.5}}, {"cable": {"init_std": 0.3}}]
    several = build("sum", SHAPE, parts=parts).double()
    x = torch.randn(2, 20, 24, dtype=torch.float64)
    expected = 0
    for part in several.parts:
        u, w = part.score_bias(x, {})
        expected = expected + (w[:, :, None] if u is None else u[..., None] * w[:, :, None])
    u, w = several.score_bias(x, {})
    assert w.shape == (2, 3, 20, 3)
    torch.testing.assert_close(u @ w.mT, expected.expand(2, 3, 20, 20), rtol=1e-12, atol=1e-12)
    memory = {}
    several.score_bias(x[:, :12], memory)
    last_u, last_w = several.score_bias(x[:, 12:], memory)
    torch.testing.assert_close(last_u, u[:, :, 12:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last_w, w, rtol=1e-12, atol=1e-12)
