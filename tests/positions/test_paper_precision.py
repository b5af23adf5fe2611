"""paper_precision rounds where KERPLE's and MEP's code rounds: their formulas, run in bfloat16.

On the CPU torch computes each bfloat16 operation in float32 and rounds the result, as CUDA does.
"""

import math

import pytest
import torch
from torch import Tensor

from megatron.positions import Position, build
from tests.positions.test_formulas import SHAPE, SLOPES

LENGTH = 2048
BF16 = torch.bfloat16
WHOLE = torch.arange(LENGTH)  # the forks' distances: [length] int64
ROUNDED = WHOLE.to(BF16)


def half(values: list[float] | Tensor) -> Tensor:
    """One bfloat16 number per head: [heads, 1]."""
    return torch.as_tensor(values).to(BF16).view(-1, 1)


def of(position: Position, name: str, high: float = math.inf) -> Tensor:
    return half(position.get_parameter(name).detach().clamp(0.01, high))


def exp_kernel(distance: Tensor, factor: float = 1.0) -> Tensor:
    return torch.exp(-half([factor * slope for slope in SLOPES]) * distance)


def gaussian_kernel(distance: Tensor) -> Tensor:
    return torch.exp(-half(SLOPES) * distance.pow(2))


def kerple_log(position: Position, distance: Tensor) -> Tensor:
    return -of(position, "p") * torch.log(1 + of(position, "a") * distance)


def t5(position: Position) -> Tensor:
    buckets = position.bucket(WHOLE.float())
    return position.get_parameter("weight").detach().to(BF16)[buckets].t() * math.sqrt(64)


def mep_free(_: Position) -> Tensor:
    kernels = exp_kernel(WHOLE) + exp_kernel(WHOLE, 0.5) + gaussian_kernel(WHOLE)
    return torch.log(kernels / 3.0)


def mep_param_t5(position: Position) -> Tensor:
    _, _, t5_kernel, log_kernel = position.kernels
    kernels = gaussian_kernel(ROUNDED) + exp_kernel(ROUNDED)
    kernels = kernels + torch.exp(t5(t5_kernel)) + torch.exp(kerple_log(log_kernel, ROUNDED))
    return torch.log(kernels / 4.0)


FORMULAS = {
    "kerple_power": lambda position: -ROUNDED.pow(of(position, "p", 2)) * of(position, "a"),
    "mep_free": mep_free,
    "mep_param_t5": mep_param_t5,
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_bias_is_that_of_the_forks_in_bfloat16(name):
    position = build(name, SHAPE)
    exact = position.distance_bias(LENGTH)
    position.use_paper_precision(True)
    bias = position.distance_bias(LENGTH)
    expected = FORMULAS[name](position).float()
    underflown = expected == -math.inf
    assert underflown.any() == (name == "mep_free")
    assert (bias[underflown] == -1e9).all()
    # log and log1p of few numbers differ by the last bit of bfloat16 between kernels of one torch
    torch.testing.assert_close(bias[~underflown], expected[~underflown], rtol=2**-7, atol=0)
    same = (bias == expected)[~underflown].float().mean()
    assert same > 0.99
    assert not torch.equal(bias, exact)
    position.use_paper_precision(False)
    torch.testing.assert_close(position.distance_bias(LENGTH), exact, rtol=0, atol=0)


def test_weights_are_rounded_too():
    position = build("kerple_wht_2para", SHAPE)
    position.use_paper_precision(True)
    power = ROUNDED.pow(of(position, "weight_p", 2))
    expected = (-power * of(position, "weight_a")).exp().float()
    weight = position.distance_weight(LENGTH)
    torch.testing.assert_close(weight, expected, rtol=2**-7, atol=0)


def test_rotary_turns_by_angles_of_rounded_positions_and_frequencies():
    position = build("rotary", SHAPE)
    q = torch.randn(1, 12, LENGTH, 64)
    exact, _ = position.on_queries_keys(q, q)
    position.use_paper_precision(True)
    turned, _ = position.on_queries_keys(q, q)
    frequencies = (1.0 / 10000 ** (torch.arange(0, 64, 2).float() / 64)).to(BF16)
    angle = (ROUNDED[:, None] * frequencies).float()
    cos, sin = angle.cos().to(BF16).float(), angle.sin().to(BF16).float()
    cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    half_turned = torch.cat([-q[..., 32:], q[..., :32]], -1)
    torch.testing.assert_close(turned, q * cos + half_turned * sin, rtol=1e-5, atol=1e-5)
    assert (turned - exact).abs().max() > 0.5
