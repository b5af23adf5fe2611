"""MEP's tanh kernel on its published slopes, and on those of other head counts."""

import math

import pytest
import torch

from megatron.positions import Shape, build
from megatron.positions.alibi import slopes
from tests.positions.formulas import LONG, SHAPE, TANH_SLOPES, S, assert_bias, column, d, tanh


def test_tanh_on_the_published_slopes_keeps_its_digits_far_out():
    position = build("tanh", SHAPE)
    expected = tanh(column(TANH_SLOPES), d())
    assert_bias(position, expected, rtol=1e-6, atol=2e-7)
    assert position.distance_bias(LONG)[0, -1].item() == pytest.approx(math.log(1e-6))


@pytest.mark.parametrize("heads", [1, 8, 16])
def test_tanh_of_other_head_counts_takes_alibis_slopes_in_the_published_ratio(heads):
    position = build("tanh", Shape(heads, 64, 64 * heads, 512))
    assert_bias(position, tanh(0.5148 * column(slopes(heads)), d(4096)), rtol=1e-6, atol=2e-7)
    ratio = (column(TANH_SLOPES) / S)[:, 0]
    steep = S[:, 0] > 0.04  # the docstring's ratio is that of the steeper ones
    expected = torch.full((8,), 0.5148).double()
    torch.testing.assert_close(ratio[steep], expected, rtol=1e-3, atol=0)
    assert 0.52 < ratio[~steep].min() < ratio[~steep].max() < 0.656


def test_tanh_on_half_slopes_is_the_sigmoid_kernel_up_to_a_constant():
    position = build("tanh", SHAPE, slopes=S[:, 0].tolist(), slope_factor=0.5)
    sigmoid = torch.log(torch.sigmoid(-S * d()) + 0.5e-6)
    assert_bias(position, sigmoid + math.log(2), rtol=1e-6, atol=3e-7)
