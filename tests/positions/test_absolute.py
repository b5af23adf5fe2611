"""Absolute positions: sinusoidal against the paper's table, and learned ones."""

import pytest
import torch

from megatron.positions import build
from tests.positions.test_formulas import SHAPE, D

LENGTH = 16384


def test_sinusoidal_is_the_papers_table_with_the_halves_side_by_side():
    t, i = D[:LENGTH, None], D[:384]
    angle = t * 10000.0 ** (-2 * i / 768)
    expected = torch.cat([angle.sin(), angle.cos()], dim=1)
    table = build("sinusoidal", SHAPE).on_embeddings(torch.zeros(1, LENGTH, 768))[0].double()
    torch.testing.assert_close(table, expected, rtol=0, atol=2e-3)  # float32 angles near 16384
    moved = build("sinusoidal", SHAPE).on_embeddings(torch.zeros(1, 5, 768), start=100)[0].double()
    torch.testing.assert_close(moved, expected[100:105], rtol=0, atol=1e-5)


def test_learned_positions_are_a_table_of_their_own():
    position = build("learned", SHAPE, max_positions=600)
    x = position.on_embeddings(torch.zeros(1, 5, 768), start=7)[0]
    torch.testing.assert_close(x, position.weight[7:12])
    assert position.weight.std().item() == pytest.approx(0.02, rel=0.02)
