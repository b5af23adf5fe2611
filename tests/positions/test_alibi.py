"""ALiBi: its slopes in the official order, and its bias at any distance."""

import pytest
import torch

from megatron.positions import build
from megatron.positions.alibi import slopes
from tests.positions.formulas import (
    OLD_GAUSSIAN_SLOPES,
    SHAPE,
    SLOPES,
    S,
    assert_bias,
    column,
    d,
)


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (8, [2.0**-n for n in range(1, 9)]),
        (12, SLOPES),
        (16, [2 ** (-n / 2) for n in range(1, 17)]),
        (25, [2 ** (-n / 2) for n in range(1, 17)] + [2 ** (-n / 4) for n in range(1, 19, 2)]),
    ],
)
def test_slopes_are_the_official_ones_in_the_official_order(heads, expected):
    assert slopes(heads) == pytest.approx(expected, rel=1e-12)


def test_alibi():
    assert_bias(build("alibi", SHAPE), -S * d())
    assert_bias(build("alibi", SHAPE, slope_factor=0.5), -S * d() / 2)


def test_slopes_are_alibis_or_given_or_learned_from_there():
    given = build("gaussian", SHAPE, slopes=OLD_GAUSSIAN_SLOPES)
    assert_bias(given, -column(OLD_GAUSSIAN_SLOPES) * d() ** 2)
    assert_bias(build("alibi", SHAPE, slopes=0.25, slope_factor=0.5), (-0.125 * d()).expand(12, -1))
    learned = build("alibi", SHAPE, slope_factor=0.5, learned_slopes=True)
    assert_bias(learned, -S / 2 * d())
    with torch.no_grad():
        learned.slopes.fill_(-3.0)
    assert_bias(learned, (-1e-6 * d()).expand(12, -1))
    assert torch.equal(learned.learned()["slopes"], torch.full((12,), 1e-6))
