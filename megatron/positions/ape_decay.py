"""The decay of APE: a linear, a logarithmic and a square-root penalty (arXiv 2601.06113)."""

import math

import torch
from torch import Tensor

from megatron.positions.alibi import alibi_slopes
from megatron.positions.base import KERNEL, DistanceBias, Shape
from megatron.positions.per_head import Given, PerHead
from megatron.positions.registry import register

POSITIVE = (1e-6, math.inf)


@register("ape_decay")
class ApeDecay(PerHead, DistanceBias):
    """Learned linear, logarithmic and square-root penalties: -linear·d - log·log(1 + d) - root·√d.

    Each head learns three positive numbers. This is the additive part of Adaptive Positional
    Encoding; its rotation and its factor on the scores are missing, and `sum` combines it with
    rotary. We had neither the paper's text nor its code: the formula comes from someone else's
    notes, and the first values are ours (linear: ALiBi's slopes; log and root: U(0, 1)).

    linear, log, root: learned, unless you give one number or one per head
    """

    claims = KERNEL
    bounds = {"linear": POSITIVE, "log": POSITIVE, "root": POSITIVE}

    def __init__(
        self,
        shape: Shape,
        *,
        linear: Given | None = None,
        log: Given | None = None,
        root: Given | None = None,
    ) -> None:
        super().__init__(shape)
        self.set_option("linear", linear, torch.tensor(alibi_slopes(shape.heads)))
        self.set_option("log", log, torch.rand(shape.heads))
        self.set_option("root", root, torch.rand(shape.heads))

    def log_kernel(self, distance: Tensor) -> Tensor:
        linear = self.per_head("linear") * distance
        log = self.per_head("log") * distance.log1p()
        root = self.per_head("root") * distance.sqrt()
        return -(linear + log + root)
