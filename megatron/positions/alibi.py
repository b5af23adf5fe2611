"""ALiBi: a linear penalty on distance (Train Short, Test Long, arXiv 2108.12409), and what shares its slopes."""

import math

import torch
from torch import Tensor

from megatron.positions.base import DistanceBias, Shape
from megatron.positions.per_head import Given, PerHead, numbers
from megatron.positions.registry import positive, register, switch

SLOPE_FLOOR = 1e-6  # of learned slopes; the smallest slope ever published is 1e-5


def slopes(heads: int) -> list[float]:
    """The official slopes, in the official order: 2^(-8h/heads) for a power of two, else those of the next lower
    power followed by every second one of the next higher (attention_with_linear_biases, `get_slopes`)."""
    lower = 2 ** math.floor(math.log2(heads))
    ladder = [2 ** (-8 * (head + 1) / lower) for head in range(lower)]
    return ladder if lower == heads else ladder + slopes(2 * lower)[0::2][: heads - lower]


class Sloped(PerHead, DistanceBias):
    """A kernel with one slope s per head.

    slope_factor: multiplies every slope
    slopes: where not given, the kernel's published ones; else one number for all heads, or a list of one per head
    learned_slopes: whether the slopes are only where learning starts; learned ones are at least 1e-6
    """

    bounds = {"slopes": (SLOPE_FLOOR, math.inf)}
    reference_names = {
        "alibi_slopes": "slopes"
    }  # the forks store ALiBi's, whichever slopes a kernel uses

    def __init__(
        self,
        shape: Shape,
        *,
        slope_factor: float = 1.0,
        slopes: Given | None = None,
        learned_slopes: bool = False,
    ) -> None:
        super().__init__(shape)
        factor, heads = positive("slope_factor", slope_factor), shape.heads
        start = self.published_slopes(heads) if slopes is None else numbers("slopes", slopes, heads)
        start = [factor * slope for slope in start]
        if switch("learned_slopes", learned_slopes):
            self.set_learned("slopes", torch.tensor(start))
        else:
            self.set_fixed("slopes", start)
        self.register_buffer("alibi_slopes", torch.tensor(_official(heads)), persistent=False)

    def published_slopes(self, heads: int) -> list[float]:
        return _official(heads)


_official = slopes  # inside Sloped, `slopes` is the option


@register("alibi")
class Alibi(Sloped):
    """-s · d; as a kernel, exp(-s · d)."""

    claims = ("zero_at_0", "never_rises")

    def log_kernel(self, distance: Tensor) -> Tensor:
        return -self.per_head("slopes") * distance


@register("gaussian")
class Gaussian(Sloped):
    """-s · d²; as a kernel, the Gaussian exp(-s · d²) of MEP (arXiv 2403.17698), on ALiBi's slopes."""

    claims = ("zero_at_0", "never_rises")

    def log_kernel(self, distance: Tensor) -> Tensor:
        return -self.per_head("slopes") * distance**2
