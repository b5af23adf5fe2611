"""BAM: attention as a generalized Gaussian over distance, with learned shape (arXiv 2505.22842)."""

import torch
from torch import Tensor

from megatron.positions.alibi import alibi_slopes
from megatron.positions.base import DistanceBias, Shape
from megatron.positions.per_head import PerHead
from megatron.positions.registry import register

EPSILON = 1e-5  # the authors': it keeps a distance of 0 to a negative power finite


@register("bam")
class Bam(PerHead, DistanceBias):
    """A penalty with learned shape and scale: -exp(log_scale) · (d + 1e-5)^exponent.

    It starts as ALiBi (up to the 1e-5). Unlike KERPLE's power, the exponent may exceed 2, and it
    may become negative, which favours far tokens. This is the authors' code with the location mu
    fixed at 0. The paper learns both numbers for every head of every layer: set `pos_emb_shared:
    false`. Bounds keep the bias finite in float32 up to a million tokens.
    """

    bounds = {"exponent": (-5.0, 5.0), "log_scale": (-20.0, 16.0)}

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.set_learned("exponent", torch.ones(shape.heads))
        self.set_learned("log_scale", torch.tensor(alibi_slopes(shape.heads)).log())

    def log_kernel(self, distance: Tensor) -> Tensor:
        scale = self.per_head("log_scale").exp()
        return -scale * (distance + EPSILON) ** self.per_head("exponent")
