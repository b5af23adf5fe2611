"""MEP and its language of mixtures against the log of the mean kernel in float64."""

import math

import pytest
import torch

from megatron.positions import build
from tests.positions.formulas import (
    OLD_GAUSSIAN_SLOPES,
    SHAPE,
    TANH_SLOPES,
    S,
    assert_bias,
    column,
    d,
    kerple_log,
    mean,
    number,
    tanh,
)

HALF = {"exp": 0.5}


def test_mep_free_is_the_log_of_the_mean_kernel():
    position = build("mep_free", SHAPE)
    assert_bias(position, mean(-S * d(), -S * d() / 2, -S * d() ** 2))
    near = d(200)
    kernels = torch.exp(-S * near) + torch.exp(-S * near / 2) + torch.exp(-S * near**2)
    assert_bias(position, torch.log(kernels / 3))  # as the paper prints it


def test_mep_param_is_the_log_of_the_mean_kernel():
    position = build("mep_param", SHAPE)
    a, p = number(position, "kernels.1.a"), number(position, "kernels.1.p")
    assert_bias(position, torch.log((torch.exp(-S * d() ** 2) + (1 + a * d()) ** -p) / 2))


def test_a_mixture_weighs_its_kernels_as_the_yaml_says():
    position = build("mep", SHAPE, kernels=["exp", {"exp": 0.25}], weights=[0.9, 0.1])
    expected = torch.log(0.9 * torch.exp(-S * d(500)) + 0.1 * torch.exp(-S * d(500) / 4))
    assert_bias(position, expected)


def test_learned_weights_are_a_softmax_over_the_kernels_of_each_head():
    position = build("mep", SHAPE, kernels=["exp", "gaussian"], weights="learned")
    equal = build("mep", SHAPE, kernels=["exp", "gaussian"]).distance_bias(100)
    torch.testing.assert_close(position.distance_bias(100), equal)
    with torch.no_grad():
        position.weight_logits.normal_()
    first, second = position.weight_logits.detach().double().softmax(dim=0)[:, :, None]
    near = d(100)
    expected = torch.log(first * torch.exp(-S * near) + second * torch.exp(-S * near**2))
    assert_bias(position, expected, atol=1e-5)


def test_learned_weights_may_be_one_softmax_for_all_heads():
    position = build("mep", SHAPE, kernels=["exp", "gaussian"], weights="learned_shared")
    assert position.weight_logits.shape == (2, 1)
    assert_bias(position, mean(-S * d(), -S * d() ** 2))
    with torch.no_grad():
        position.weight_logits.copy_(torch.tensor([[math.log(3.0)], [0.0]]))
    assert_bias(position, torch.logaddexp(math.log(0.75) - S * d(), math.log(0.25) - S * d() ** 2))


# Published mixtures: names of the authors' configuration files, and what these names mean.


PUBLISHED = [
    (
        "ali05_gaussian_all002",
        [HALF, "gaussian"],
        [0.5, 0.5],
        lambda d: mean(-S * d / 2, -S * d**2),
    ),
    (
        "ali_ali05_tanh_all003",
        ["exp", HALF, "tanh"],
        [1 / 3, 1 / 3, 1 / 3],
        lambda d: mean(-S * d, -S * d / 2, tanh(column(TANH_SLOPES), d)),
    ),
    (
        "ali_05_tanh_gau_all004",
        ["exp", HALF, "tanh", "gaussian"],
        [0.25] * 4,
        lambda d: mean(-S * d, -S * d / 2, tanh(column(TANH_SLOPES), d), -S * d**2),
    ),
    (  # the same as a mixture of a mixture
        "ali and tanh_gau",
        ["exp", {"mep": {"kernels": ["tanh", "gaussian"]}}],
        "equal",
        lambda d: mean(-S * d, mean(tanh(column(TANH_SLOPES), d), -S * d**2)),
    ),
    (
        "ali_ali05_gaussian with the older Gaussian slopes",
        ["exp", HALF, {"gaussian": {"slopes": OLD_GAUSSIAN_SLOPES}}],
        "equal",
        lambda d: mean(-S * d, -S * d / 2, -column(OLD_GAUSSIAN_SLOPES) * d**2),
    ),
    (
        "gaussian h1",
        [{"gaussian": {"slopes": 0.01064}}],
        "equal",
        lambda d: (-0.01064 * d**2).expand(12, -1),
    ),
    (
        "ali h8, gaussian h8",
        [{"exp": {"slopes": 2**-8}}, {"gaussian": {"slopes": 2**-8}}],
        "equal",
        lambda d: mean(-(2**-8) * d, -(2**-8) * d**2).expand(12, -1),
    ),
    (
        "ali_sigmoid",
        ["exp", {"tanh": {"slopes": S[:, 0].tolist(), "slope_factor": 0.5}}],
        [2 / 3, 1 / 3],
        lambda d: mean(-S * d, torch.log(torch.sigmoid(-S * d) + 0.5e-6)) + math.log(4 / 3),
    ),
    (
        "poly",
        [{"kerple_log": {"a": 0.1, "p": 2.2}}],
        "equal",
        lambda d: (-2.2 * torch.log(1 + 0.1 * d)).expand(12, -1),
    ),
]


def test_published_mixtures_without_parameters_can_be_written():
    for _, kernels, weights, expected in PUBLISHED:
        position = build("mep", SHAPE, kernels=kernels, weights=weights)
        assert list(position.parameters()) == []
        assert_bias(position, expected(d()))


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("ali05_gaussian_kerplelog", [HALF, "gaussian", "kerple_log"]),
        ("ali_ali05_gau_kerplelog", ["exp", HALF, "gaussian", "kerple_log"]),
        ("t5_kerplelog_gau_alibi", ["gaussian", "exp", "t5", "kerple_log"]),
    ],
)
def test_published_mixtures_with_parameters_can_be_written(name, kernels):
    position = build("mep", SHAPE, kernels=kernels)
    logs = []
    for index, kernel in enumerate(kernels):
        path = f"kernels.{index}."
        if kernel == "kerple_log":
            logs.append(kerple_log(position, path, d()))
        elif kernel == "t5":
            logs.append(t5(position.get_parameter(f"{path}weight").detach().double(), d()))
        elif kernel == HALF:
            logs.append(-S * d() / 2)
        else:
            logs.append(FIXED[kernel])
    assert_bias(position, mean(*logs), atol=2e-6)


FIXED = {"exp": -S * d(), "gaussian": -S * d() ** 2, "tanh": tanh(column(TANH_SLOPES), d())}


def t5(weight: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """√64 · weight[bucket(d)], weight [32, heads]: the log kernel [heads, length]."""
    octave = (distance.clamp(min=16) / 16).log2() / math.log2(128 / 16)  # exact at powers of two
    far = (16 + (octave * 16).floor()).clamp(max=31)
    bucket = torch.where(distance < 16, distance, far).long()
    return math.sqrt(64) * weight[bucket].t()
