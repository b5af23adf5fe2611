"""KERPLE: kernels with learned shape per head (arXiv 2205.09921, section 4), shared over layers.

The forks add the bias after the division by √head_dim, while equation 1 has it inside; the paper's results come from
their code, and so does ours.
"""

import math

import torch
from torch import Tensor, nn

from megatron.positions.base import DistanceBias, Shape, register

FLOOR = 0.01  # the forks' lower bound on every learned number


def _uniform(heads: int, high: float) -> nn.Parameter:
    return nn.Parameter(torch.rand(heads) * high)


@register("kerple_log")
class KerpleLog(DistanceBias):
    """-p · log(1 + a·d), p ~ U(0, 2), a ~ U(0, 1), both at least 0.01 (p and a are r1 and r2 of the paper)."""

    bounds = {"p": (FLOOR, math.inf), "a": (FLOOR, math.inf)}
    reference_names = {"p": "bias_p", "a": "bias_a"}

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.p = _uniform(shape.heads, 2.0)
        self.a = _uniform(shape.heads, 1.0)

    def log_kernel(self, distance: Tensor) -> Tensor:
        p, a = self.bounded("p")[:, None], self.bounded("a")[:, None]
        return -p * torch.log1p(a * distance)


@register("kerple_power", aliases=("kerple_power_ap_",))
class KerplePower(DistanceBias):
    """-a · d^p, a ~ U(0, 1) at least 0.01, p ~ U(0, 2) in [0.01, 2] (a and p are r1 and r2 of the paper)."""

    bounds = {"a": (FLOOR, math.inf), "p": (FLOOR, 2.0)}
    reference_names = {"a": "bias_a", "p": "bias_p"}

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.a = _uniform(shape.heads, 1.0)
        self.p = _uniform(shape.heads, 2.0)

    def log_kernel(self, distance: Tensor) -> Tensor:
        return -self.bounded("a")[:, None] * distance ** self.bounded("p")[:, None]


@register("kerple_bias_wht", aliases=("kerple_power_ap_ap",))
class KerpleBiasWeight(KerplePower):
    """Scores q·k/√head_dim times exp(-weight_a · d^weight_p), plus the power bias (section 5.3, "bias+wht")."""

    bounds = {**KerplePower.bounds, "weight_a": (FLOOR, math.inf), "weight_p": (FLOOR, 2.0)}
    reference_names = {**KerplePower.reference_names, "weight_a": "wei_a", "weight_p": "wei_p"}

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.weight_a = _uniform(shape.heads, 1.0)
        self.weight_p = _uniform(shape.heads, 2.0)

    def distance_weight(self, length: int) -> Tensor:
        return self.table(self.weight_kernel, length)

    def weight_kernel(self, distance: Tensor) -> Tensor:
        """[length] float32 -> [heads, length] float32 in (0, 1]."""
        return torch.exp(-self.bounded("weight_a")[:, None] * distance ** self.bounded("weight_p")[:, None])
