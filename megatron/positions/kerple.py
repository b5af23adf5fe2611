"""KERPLE: kernels with learned shape per head (arXiv 2205.09921, section 4).

Where the bias goes: the paper's equation 1 has it inside the division by √head_dim. The released
code adds it after the division, and the paper's results come from that code. Every encoding here
follows the code: q·k/√head_dim + bias.

First values: log, power, bias+wht and 2-para-wht are in the released code and start as there.
3-para-log, 1-para-wht and the two forms with a positive bias are in the paper only (section 5.3,
appendix A.3). They take the code's values for similar numbers: exponents and the first number of a
log kernel from U(0, 2), all others from U(0, 1).

Learned numbers are at least 0.01, and exponents at most 2. An option fixes the number of its name:
one number, or a list with one per head. Layers share them if
`pos_emb_shared` is true, as in the released code.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor

from megatron.positions.base import KERNEL, DistanceBias, Fork, Position, Shape
from megatron.positions.per_head import Given, PerHead
from megatron.positions.registry import register

FLOOR = 0.01  # the forks' lower bound on every learned number
POSITIVE = (FLOOR, math.inf)
EXPONENT = (FLOOR, 2.0)  # beyond 2 the kernels are no longer conditionally positive definite


class Kerple(PerHead):
    """Numbers per head that are learned, or fixed by the user.

    draws: names of these numbers in the order in which they are drawn, each from U(0, high), and
        their bounds. Each name is an option: one number for all heads, or a list of one per head,
        fixes it
    """

    draws: ClassVar[dict[str, tuple[float, tuple[float, float]]]] = {}

    def __init__(self, shape: Shape, **fixed: Given | None) -> None:
        super().__init__(shape)
        self.bounds = {name: bounds for name, (_, bounds) in self.draws.items()}
        for name, (high, _) in self.draws.items():
            value = fixed.get(name)
            start = torch.rand(shape.heads) * high if value is None else self.origin
            self.set_option(name, value, start)


class WeightKernel(Position):
    """A kernel that multiplies the scores q·k/√head_dim."""

    def weight_kernel(self, distance: Tensor) -> Tensor:
        """[length] float32 -> [heads, length] float32 in [0, 1]."""
        raise NotImplementedError

    def distance_weight(self, length: int) -> Tensor:
        return self.table(lambda distance: self.weight_kernel(self.rounded(distance)), length)


@register("kerple_log")
class KerpleLog(Kerple, DistanceBias):
    """A learned logarithmic penalty on distance: -p · log(1 + a·d).

    First values: p ~ U(0, 2), a ~ U(0, 1); both stay at least 0.01. The paper calls them r1 and r2.

    p, a: learned, unless you give one number or one per head
    """

    claims = KERNEL
    draws = {"p": (2.0, POSITIVE), "a": (1.0, POSITIVE)}
    fork = Fork({"p": "bias_p", "a": "bias_a"})

    def log_kernel(self, distance: Tensor) -> Tensor:
        return -self.per_head("p") * torch.log1p(self.per_head("a") * distance)

    def paper_kernel(self, distance: Tensor) -> Tensor:
        return -self.per_head("p") * torch.log(1 + self.per_head("a") * distance.bfloat16())


@register("kerple_log_3para")
class KerpleLog3(Kerple, DistanceBias):
    """The logarithmic penalty with a learned exponent: -r1 · log(1 + r2·d^r3).

    The paper's 3-para-log (section 5.3, table 5), which is not in the released code. With r3 = 1 it
    is kerple_log. First values: r1 and r3 ~ U(0, 2), r2 ~ U(0, 1); all stay at least 0.01, r3 at
    most 2.

    r1, r2, r3: learned, unless you give one number or one per head
    """

    claims = KERNEL
    draws = {"r1": (2.0, POSITIVE), "r2": (1.0, POSITIVE), "r3": (2.0, EXPONENT)}

    def log_kernel(self, distance: Tensor) -> Tensor:
        power = distance ** self.per_head("r3")
        return -self.per_head("r1") * torch.log1p(self.per_head("r2") * power)


@register("kerple_power", aliases=("kerple_power_ap_",))
class KerplePower(Kerple, DistanceBias):
    """A penalty with a learned power of the distance: -a · d^p.

    First values: a ~ U(0, 1), p ~ U(0, 2); a stays at least 0.01, p from 0.01 to 2. The paper calls
    them r1 and r2.

    a, p: learned, unless you give one number or one per head
    """

    claims = KERNEL
    draws = {"a": (1.0, POSITIVE), "p": (2.0, EXPONENT)}
    fork = Fork({"a": "bias_a", "p": "bias_p"})

    def log_kernel(self, distance: Tensor) -> Tensor:
        return -self.per_head("a") * distance ** self.per_head("p")


@register("kerple_wht_2para", aliases=("kerple_power__ap",))
class KerpleWeight(Kerple, WeightKernel):
    """A learned weight that fades with distance: q·k/√head_dim times exp(-weight_a · d^weight_p).

    The paper's 2-para-wht (appendix A.3, table 6). First values: weight_a ~ U(0, 1) (the paper's
    r1), weight_p ~ U(0, 2) (r2).

    weight_a, weight_p: learned, unless you give one number or one per head
    """

    draws = {"weight_a": (1.0, POSITIVE), "weight_p": (2.0, EXPONENT)}
    fork = Fork({"weight_a": "wei_a", "weight_p": "wei_p"})

    def weight_kernel(self, distance: Tensor) -> Tensor:
        return torch.exp(-self.per_head("weight_a") * distance ** self.per_head("weight_p"))


@register("kerple_wht_1para")
class KerpleWeight1(Kerple, WeightKernel):
    """A learned Gaussian weight of the scores: q·k/√head_dim times exp(-weight_a · d²).

    The paper's 1-para-wht (appendix A.3, table 6), which is not in the released code. First value:
    weight_a ~ U(0, 1) (the paper's r1).

    weight_a: learned, unless you give one number or one per head
    """

    draws = {"weight_a": (1.0, POSITIVE)}

    def weight_kernel(self, distance: Tensor) -> Tensor:
        return torch.exp(-self.per_head("weight_a") * distance**2)


@register("kerple_bias_wht", aliases=("kerple_power_ap_ap",))
class KerpleBiasWeight(KerplePower, KerpleWeight):
    """Weight and power penalty together: exp(-weight_a · d^weight_p) · q·k/√head_dim - a · d^p.

    The paper's "bias+wht" (section 5.3).

    a, p, weight_a, weight_p: learned, unless you give one number or one per head
    """

    draws = {**KerplePower.draws, **KerpleWeight.draws}
    fork = Fork({**KerplePower.fork.names, **KerpleWeight.fork.names})


@register("kerple_bias_2para")
class KerpleBump(Kerple, DistanceBias):
    """A learned positive bump near the token: +r1 · exp(-r2 · d²).

    The paper's 2-para-bias (appendix A.3, table 6), which is not in the released code and does not
    extrapolate in the paper. First values: r1 and r2 ~ U(0, 1).

    r1, r2: learned, unless you give one number or one per head
    """

    claims = ("never_rises", "conditionally_positive_definite")
    draws = {"r1": (1.0, POSITIVE), "r2": (1.0, POSITIVE)}

    def log_kernel(self, distance: Tensor) -> Tensor:
        return self.per_head("r1") * torch.exp(-self.per_head("r2") * distance**2)


@register("kerple_bias_3para")
class KerpleBump3(Kerple, DistanceBias):
    """The positive bump with a learned exponent: +r1 · exp(-r2 · d^r3).

    The paper's 3-para-bias (appendix A.3, table 6), which is not in the released code and does not
    extrapolate in the paper. First values: r1 and r2 ~ U(0, 1), r3 ~ U(0, 2) within [0.01, 2].

    r1, r2, r3: learned, unless you give one number or one per head
    """

    claims = ("never_rises", "conditionally_positive_definite")
    draws = {"r1": (1.0, POSITIVE), "r2": (1.0, POSITIVE), "r3": (2.0, EXPONENT)}

    def log_kernel(self, distance: Tensor) -> Tensor:
        power = distance ** self.per_head("r3")
        return self.per_head("r1") * torch.exp(-self.per_head("r2") * power)
