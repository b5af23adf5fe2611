"""ALiBi: a fixed linear penalty on distance (Train Short, Test Long, arXiv 2108.12409)."""

import math

import torch
from torch import Tensor

from megatron.positions.base import DistanceBias, Shape, positive, register


def slopes(heads: int) -> list[float]:
    """The official slopes, in the official order: 2^(-8h/heads) for a power of two, else those of the next lower
    power followed by every second one of the next higher (attention_with_linear_biases, `get_slopes`)."""
    lower = 2 ** math.floor(math.log2(heads))
    ladder = [2 ** (-8 * (head + 1) / lower) for head in range(lower)]
    return ladder if lower == heads else ladder + slopes(2 * lower)[0::2][: heads - lower]


class Sloped(DistanceBias):
    """A kernel with one fixed ALiBi slope per head.

    slope_factor: multiplies every slope
    """

    reference_names = {"slopes": "slopes"}
    slopes: Tensor

    def __init__(self, shape: Shape, *, slope_factor: float = 1.0) -> None:
        super().__init__(shape)
        self.slope_factor = positive("slope_factor", slope_factor)
        self.register_buffer("slopes", torch.tensor(slopes(shape.heads)), persistent=False)

    @property
    def scaled_slopes(self) -> Tensor:
        """[heads, 1] float32"""
        return self.slope_factor * self.slopes[:, None]


@register("alibi")
class Alibi(Sloped):
    """-slope · d; as a kernel, exp(-slope · d)."""

    def log_kernel(self, distance: Tensor) -> Tensor:
        return -self.scaled_slopes * distance


@register("gaussian")
class Gaussian(Sloped):
    """-slope · d²; as a kernel, the Gaussian exp(-slope · d²) of MEP (arXiv 2403.17698), on ALiBi's slopes."""

    def log_kernel(self, distance: Tensor) -> Tensor:
        return -self.scaled_slopes * distance**2
