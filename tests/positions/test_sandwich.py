"""Sandwich against its sum of cosines in float64."""

import pytest
import torch

from megatron.positions import Shape, build
from tests.positions.formulas import LONG, d


@pytest.mark.parametrize(
    ("heads", "dbar", "base", "first"), [(12, 128, 10000.0, 1), (3, 64, 500.0, 0)]
)
def test_sandwich(heads, dbar, base, first):
    shape = Shape(heads, 64, 64 * heads, 512)
    position = build("sandwich", shape, dbar=dbar, base=base, first_frequency=first)
    i = torch.arange(first, first + dbar // 2, dtype=torch.float64)[:, None]
    distance = torch.cat([d(2000), LONG - 1 - d(2000).flip(0)])
    cosines = torch.cos(distance / base ** (2 * i / dbar)).sum(dim=0) - dbar / 2
    h = torch.arange(1, heads + 1, dtype=torch.float64)[:, None]
    found = position.distance_bias(LONG)[:, distance.long()].double()
    torch.testing.assert_close(found, cosines / (8 * h / heads), rtol=1e-6, atol=1e-6)
