"""Encodings that look at content: Cable against a loop in float64, and how attention takes them."""

import math

import torch

from megatron.positions import Position, Shape, build

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)


def cable() -> Position:
    position = build("cable", SHAPE)
    with torch.no_grad():
        for value in position.parameters():
            value.normal_(0.0, 0.3)
    return position


def by_loop(position: Position, x: torch.Tensor) -> torch.Tensor:
    """-g_i (S_i - S_j), one number at a time in float64, and 0 for j > i.

    x [length, hidden] -> [heads, length, length]
    """
    step, gain, x = position.step.detach().double(), position.gain.detach().double(), x.double()
    bias = torch.zeros(3, len(x), len(x), dtype=torch.float64)
    for h in range(3):
        for i in range(len(x)):
            softplus = math.log1p(math.exp((x[i] @ gain[:, h]).item()))
            for j in range(i + 1):
                between = sum(max(0.0, (x[m] @ step[:, h]).item()) for m in range(j + 1, i + 1))
                bias[h, i, j] = -softplus * between
    return bias


def bias_of(position: Position, x: torch.Tensor) -> torch.Tensor:
    """What score_bias adds, less what it adds to the query's own key, and 0 for later keys.

    x [batch, length, hidden] -> [batch, heads, length, length] float64
    """
    u, w = position.score_bias(x, {})
    difference = w[:, :, None].double() - w[..., None].double()
    return (u.double()[..., None] * difference).tril()


def test_the_scores_get_the_papers_bias_as_a_penalty():
    position, x = cable(), torch.randn(2, 30, 24)
    bias = bias_of(position, x)
    for b in range(2):
        torch.testing.assert_close(bias[b], by_loop(position, x[b]), rtol=0, atol=1e-4)
    assert bias.max() <= 0
    assert bias.min() < -1
    # A query's penalty never falls as keys stand further back.
    assert (bias[:, :, -1].diff(dim=-1) >= 0).all()


def test_pieces_of_a_text_are_the_whole_text():
    position, x = cable(), torch.randn(2, 77, 24)
    (u, w), memory, end = position.score_bias(x, {}), {}, 0
    for piece in (1, 5, 64, 7):
        start, end = end, end + piece
        u_piece, w_so_far = position.score_bias(x[:, start:end], memory)
        torch.testing.assert_close(u_piece, u[:, :, start:end], rtol=0, atol=1e-5)
        torch.testing.assert_close(w_so_far, w[:, :, :end], rtol=0, atol=1e-5)
