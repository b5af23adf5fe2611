"""Encodings by content one number at a time in float64: Cable, of which there are no authors'
numbers, and RePo in other sizes than those of its authors' numbers."""

import cmath
import math

import pytest
import torch

from megatron.conformance.subject import scores
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


def silu(number: float) -> float:
    return number / (1 + math.exp(-number))


@pytest.mark.parametrize(
    "options", [{}, {"gated": False}, {"gated": False, "by_head": False}], ids=str
)
def test_repo_turns_queries_and_keys_by_the_difference_of_their_positions(options):
    """Re Σ_c q_ic conj(k_jc) exp(√-1 (z_i - z_j) θ_c) / √head_dim, of pairs as complex numbers."""
    length, heads, head_dim, base = 13, 5, 6, 300.0
    shape = Shape(heads=heads, head_dim=head_dim, hidden=35, train_length=64)
    torch.manual_seed(0)
    position = build("repo", shape, base=base, init_std=0.3, **options).double()
    q, k = torch.randn(2, 1, heads, length, head_dim, dtype=torch.float64)
    x = torch.randn(1, length, 35, dtype=torch.float64)
    maps = {name: value.detach().tolist() for name, value in position.named_parameters()}

    def mapped(name: str, vector: list[float]) -> list[float]:
        return [sum(w * v for w, v in zip(row, vector, strict=True)) for row in maps[name]]

    places = []
    for token in x[0].tolist():
        if "gate_weight" in maps:
            gates, contents = mapped("gate_weight", token), mapped("content_weight", token)
            token = [silu(g) * c for g, c in zip(gates, contents, strict=True)]
        own = mapped("weight", token)
        places.append(own * heads if len(own) == 1 else own)

    def pairs(vector: torch.Tensor) -> list[complex]:
        half = head_dim // 2
        return [complex(a, b) for a, b in zip(vector[:half], vector[half:], strict=True)]

    ours = scores(position, q, k, x)[0]
    for h in range(heads):
        for i in range(length):
            for j in range(i + 1):
                expected = 0.0
                for c, (a, b) in enumerate(zip(pairs(q[0, h, i]), pairs(k[0, h, j]), strict=True)):
                    angle = (places[i][h] - places[j][h]) * base ** (-2 * c / head_dim)
                    expected += (a * b.conjugate() * cmath.exp(1j * angle)).real
                expected /= math.sqrt(head_dim)
                assert ours[h, i, j].item() == pytest.approx(expected, abs=2e-6)


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
