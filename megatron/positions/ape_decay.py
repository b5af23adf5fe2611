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
    """-linear · d - log · log(1 + d) - root · √d, three learned positive numbers per head.

    The additive part of Adaptive Positional Encoding, without its rotation and its factor on the
    scores; `sum` joins it to rotary. The paper's text and code were not available: the formula is
    from a third party's notes. First values are ours: linear from ALiBi's slopes, log and root from
    U(0, 1).

    linear, log, root: learned unless given as one number or one per head
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
