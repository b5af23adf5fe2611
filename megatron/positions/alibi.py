"""ALiBi: a linear penalty on distance (Train Short, Test Long, arXiv 2108.12409).

The Gaussian and the tanh kernel of MEP (arXiv 2403.17698) are here too: they use ALiBi's slopes.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron.positions.base import KERNEL, DistanceBias, Fork, Shape
from megatron.positions.per_head import Given, PerHead, numbers
from megatron.positions.registry import positive, register

SLOPE_FLOOR = 1e-6  # of learned slopes; the smallest slope ever published is 1e-5
# The authors' list for 12 heads (ParallelSNOPE.tanh_kernel_slopes). The steep ones are 0.515 times
# ALiBi's slopes, the other four 0.522 to 0.655 times.
TANH_SLOPES = [
    0.25737,
    0.12873,
    0.06437,
    0.03219,
    0.0163,
    0.00849,
    0.00457,
    0.00256,
    0.36406,
    0.18203,
    0.09103,
    0.04552,
]
TANH_RATIO = 0.5148
MOST_BIAS = 100.0  # slopes beyond are no float32
EPSILON = 1e-6  # the authors': at large distances the kernel is 1e-6, not 0


def alibi_slopes(heads: int, bias_max: float = 8) -> list[float]:
    """The official slopes in the official order (attention_with_linear_biases, `get_slopes`).

    2^(-8h/heads) for a power of two, with bias_max = 8. Else the slopes of the next lower power of
    two, followed by every second slope of the next higher one.
    """
    lower = 2 ** math.floor(math.log2(heads))
    ladder = [2 ** (-bias_max * (head + 1) / lower) for head in range(lower)]
    if lower == heads:
        return ladder
    in_between = alibi_slopes(2 * lower, bias_max)[0::2]
    return ladder + in_between[: heads - lower]


class Sloped(PerHead, DistanceBias):
    """A kernel with one slope s per head.

    slope_factor: multiplies every slope
    slopes: one number, or a list with one per head; by default the published slopes. A head with 0
        has no bias, as half the heads of NAPE (arXiv 2506.16640): [1, 0.5, 0, 0]
    learned_slopes: whether the slopes are learned, starting from the given ones; they stay at least
        1e-6
    """

    bounds = {"slopes": (SLOPE_FLOOR, math.inf)}
    # The forks store ALiBi's slopes for every kernel, whichever slopes it uses.
    fork = Fork({"alibi_slopes": "slopes"})

    def __init__(
        self,
        shape: Shape,
        *,
        slope_factor: float = 1.0,
        slopes: Given | None = None,
        learned_slopes: bool = False,
    ) -> None:
        super().__init__(shape)
        factor = positive("slope_factor", slope_factor)
        if slopes is None:
            slopes = self.published_slopes(shape.heads)
        slopes = numbers("slopes", slopes, shape.heads, zero=True)
        start = [factor * slope for slope in slopes]
        if learned_slopes:
            positive("learned_slopes", min(start), least=SLOPE_FLOOR)
            self.set_learned("slopes", torch.tensor(start))
        else:
            self.set_fixed("slopes", start)
        official = torch.tensor(alibi_slopes(shape.heads))
        self.register_buffer("alibi_slopes", official, persistent=False)

    def published_slopes(self, heads: int) -> list[float]:
        """The slopes of the paper for this number of heads."""
        return alibi_slopes(heads)


@register("alibi")
class Alibi(Sloped):
    """A fixed penalty that grows linearly with distance: -s · d; as a kernel, exp(-s · d).

    bias_max: the smallest slope is 2^-bias_max (MPT's name for it); the paper's is 2^-8
    """

    claims = KERNEL

    def __init__(self, shape: Shape, *, bias_max: float = 8.0, **sloped: Any) -> None:
        self.bias_max = positive("bias_max", bias_max, most=MOST_BIAS)
        super().__init__(shape, **sloped)

    def published_slopes(self, heads: int) -> list[float]:
        return alibi_slopes(heads, self.bias_max)

    def log_kernel(self, distance: Tensor) -> Tensor:
        return -self.per_head("slopes") * distance


@register("gaussian")
class Gaussian(Sloped):
    """A fixed penalty that grows with the square of the distance: -s · d², with ALiBi's slopes s.

    This is MEP's Gaussian kernel exp(-s · d²) (arXiv 2403.17698).
    """

    claims = KERNEL

    def log_kernel(self, distance: Tensor) -> Tensor:
        return -self.per_head("slopes") * distance**2

    def paper_kernel(self, distance: Tensor) -> Tensor:
        return -self.per_head("slopes") * (distance**2).bfloat16()


@register("tanh")
class Tanh(Sloped):
    """A fixed penalty from MEP's tanh kernel: log(1e-6 + 1 + tanh(-s · d)).

    The slopes s are those of the authors' code. The authors (arXiv 2403.17698) published slopes for
    12 heads only (`tanh_kernel_slopes`). For other numbers of heads we use 0.5148 times ALiBi's
    slopes, which is close to the ratio for 12 heads. With slopes s/2 it equals the sigmoid kernel
    of slope s plus the constant log 2.
    """

    claims = ("zero_at_0", "never_rises")

    def published_slopes(self, heads: int) -> list[float]:
        if heads == len(TANH_SLOPES):
            return TANH_SLOPES
        return [TANH_RATIO * slope for slope in alibi_slopes(heads)]

    def log_kernel(self, distance: Tensor) -> Tensor:
        # In float32 1 + tanh(-x) loses every digit from x = 9 on; 2 / (1 + exp(2x)) loses none.
        kernel = 2 * torch.sigmoid(-2 * self.per_head("slopes") * distance)
        return torch.log(EPSILON + kernel)

    def paper_kernel(self, distance: Tensor) -> Tensor:
        return torch.log(self.paper_probability(distance))

    def paper_probability(self, distance: Tensor) -> Tensor:
        tanh = torch.tanh(-self.per_head("slopes") * distance.bfloat16())
        return EPSILON + 1 + tanh
