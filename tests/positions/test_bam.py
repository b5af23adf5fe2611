"""BAM against the authors' formula in float64."""

import torch

from megatron.positions import build
from tests.positions.formulas import LONG, SHAPE, S, assert_bias, d


def test_bam_starts_as_alibi():
    assert_bias(build("bam", SHAPE), -S * (d() + 1e-5))
    bam, alibi = build("bam", SHAPE).distance_bias(LONG), build("alibi", SHAPE).distance_bias(LONG)
    torch.testing.assert_close(bam, alibi, rtol=1e-6, atol=1e-5)


def test_bam_with_other_shapes_is_the_authors_formula():
    position = build("bam", SHAPE)
    with torch.no_grad():
        position.exponent.copy_(torch.linspace(-0.5, 3, 12))
        position.log_scale.copy_(torch.linspace(-3, 3, 12))
    exponent = position.exponent.detach().double()[:, None]
    log_scale = position.log_scale.detach().double()[:, None]
    assert_bias(position, -((d() + 1e-5) ** exponent) * torch.exp(log_scale))
