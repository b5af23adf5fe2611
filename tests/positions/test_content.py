"""Cable and DAPE by their formulas in float64, and RePo with key heads."""

import pytest
import torch
import torch.nn.functional as F

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


@pytest.mark.parametrize(("name", "taps"), [("dape", 1), ("dape_v2", 3)])
def test_the_network_of_dape_reads_one_row_of_keys_at_a_time(name, taps):
    """In float64, one query at a time; there are so many that they are computed in blocks."""
    torch.manual_seed(0)
    position, rows = build(name, SHAPE).double(), []
    scores = torch.randn(2, 3, 150, 190, dtype=torch.float64, requires_grad=True)
    weights = [position.weight_0, position.weight_1]
    assert [weight.shape[-1] for weight in weights] == [taps, taps]
    distance = (torch.arange(40, 190)[:, None] - torch.arange(190)).clamp(min=0)
    bias = position.inner.distance_bias(190)[:, distance].expand(2, -1, -1, -1)
    for query in range(150):
        seen = [x[:, :, query, : 41 + query] for x in (scores, bias)]
        padded = F.pad(torch.cat(seen, dim=1), (0, 1))
        hidden = F.conv1d(padded, weights[0], position.bias_0, padding=taps // 2)
        by_key = F.conv1d(
            F.leaky_relu(hidden, 0.01), weights[1], position.bias_1, padding=taps // 2
        )
        rows.append(F.pad(seen[0] + seen[1] + by_key[..., :-1], (0, 149 - query)))
    expected = torch.stack(rows, dim=2)
    computed = position.on_scores(scores, torch.empty(0), {}).tril(40)
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-12)
    leaves = [scores, *weights]
    for ours, theirs in zip(
        torch.autograd.grad(computed.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
