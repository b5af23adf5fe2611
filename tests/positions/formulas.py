"""What tests of encodings share: the papers' formulas in float64, for 12 heads."""

import math

import torch
from torch import Tensor

from megatron.positions import Position, Shape

SHAPE = Shape(heads=12, head_dim=64, hidden=768, train_length=512)
LONG = 131072
# The official code's list for 12 heads (attention_with_linear_biases, get_slopes): the slopes of
# 8 heads, then 4 in between.
SLOPES = [2.0**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
# The slopes of the tanh kernel in MEP's code.
TANH_SLOPES = [0.25737, 0.12873, 0.06437, 0.03219, 0.0163, 0.00849, 0.00457, 0.00256]
TANH_SLOPES += [0.36406, 0.18203, 0.09103, 0.04552]
# The Gaussian slopes of an older version of the authors' code.
OLD_GAUSSIAN_SLOPES = [0.01064, 0.00269, 0.00068, 0.00017, 6e-05, 3e-05, 2e-05, 1e-05]
OLD_GAUSSIAN_SLOPES += [0.02143, 0.00536, 0.00135, 0.00034]


def column(values: list[float]) -> Tensor:
    """One number per head: [heads, 1] float64."""
    return torch.tensor(values, dtype=torch.float64)[:, None]


S = column(SLOPES)


def d(length: int = LONG) -> Tensor:
    """Distances 0 … length - 1: [length] float64."""
    return torch.arange(length, dtype=torch.float64)


def number(position: Position, name: str, high: float = math.inf) -> Tensor:
    """A learned number of KERPLE as the paper's code bounds it: [heads, 1] float64."""
    return position.get_parameter(name).detach().double().clamp(0.01, high)[:, None]


def assert_bias(
    position: Position, expected: Tensor, rtol: float = 3e-6, atol: float = 1e-6
) -> None:
    """The bias is `expected` [heads, length], within float32's resolution of the value."""
    bias = position.distance_bias(expected.shape[1])
    torch.testing.assert_close(bias.double(), expected, rtol=rtol, atol=atol)


def mean(*log_kernels: Tensor) -> Tensor:
    """log of the mean kernel, from log kernels: each [heads, length] float64."""
    return torch.stack(log_kernels).logsumexp(dim=0) - math.log(len(log_kernels))


def tanh(slopes: Tensor, distance: Tensor) -> Tensor:
    """The log kernel of MEP's tanh."""
    return torch.log(1e-6 + 1 + torch.tanh(-slopes * distance))


def kerple_log(position: Position, path: str, distance: Tensor) -> Tensor:
    """-p log(1 + a d) with the numbers at `path`, such as "kernels.1."."""
    p, a = number(position, f"{path}p"), number(position, f"{path}a")
    return -p * torch.log(1 + a * distance)
