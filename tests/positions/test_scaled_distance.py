"""The published experiments on scaled distances, against their formulas in float64."""

import math

import torch
from torch import Tensor

from megatron.config import load
from megatron.config.legacy import MEANINGS
from megatron.model import from_config
from megatron.positions import Position, build
from tests.positions.formulas import SHAPE, SLOPES, assert_bias, column, d, number

# Facts of the released code, for windows of 512 tokens and more: mean and rms of 0 … 511.
MEAN = 255.5
RMS = math.sqrt(sum(n * n for n in range(512)) / 512 + 1e-6)
FAR = 16384
SIZES = ["num_layers=1", "hidden_size=24", "num_attention_heads=12", "seq_length=16"]


def slopes(factor: float) -> Tensor:
    return column([max(0.01, factor * slope) for slope in SLOPES])


def named(name: str, *words: str) -> Position:
    """The encoding that a configuration with a published name builds."""
    return from_config(load([], [*SIZES, f"pos-emb={name}", *words]), vocab=16).position


def clipped(distance: Tensor) -> Tensor:
    return torch.where(distance < 512, distance, 511 + (distance - 511) / 512)


NORMALIZED = (d(FAR) - MEAN) / RMS
CLIPPED = (clipped(d(FAR)) - MEAN) / RMS


def test_names_with_original_have_alibis_slopes_times_a_factor():
    for name, scaling, factor, distance in (
        ("kerple_power_original", 0, 1, d(FAR)),
        ("kerple_power_original__", 3, 8, d(FAR)),
        ("kerple_power_norm_original__", None, 1, NORMALIZED),
        ("kerple_power_norm_original_scaling__", 9, 512, NORMALIZED),
        ("kerple_power_norm_original_scaling__", 10, 10, NORMALIZED),
        ("kerple_power_original_norm", 2, 4, NORMALIZED),
        ("kerple_power_norm_clip_original_scaling__", 160, 160, CLIPPED),
    ):
        words = [] if scaling is None else [f"alibi_scaling={scaling}"]
        expected = -slopes(factor) * distance
        assert_bias(named(name, *words), expected, rtol=1e-5, atol=2e-5 * factor)


def test_names_with_a_learn_the_slopes():
    position = named("kerple_power_norm_a_")
    assert_bias(position, -number(position, "a") * NORMALIZED, rtol=1e-5)
    position = named("kerple_power_a_")
    assert_bias(position, -number(position, "a") * d(FAR))
    assert [*position.learned()] == ["a"]


def expected_of_network(position: Position, distance: Tensor) -> Tensor:
    """-a · (W1 gelu(W0 x + b0) + b1), in float64."""
    numbers = dict(position.named_parameters()) | dict(position.named_buffers())
    weight_0, bias_0, weight_1, bias_1 = (
        numbers[name].detach().double() for name in ("weight_0", "bias_0", "weight_1", "bias_1")
    )
    hidden = weight_0 @ distance[None] + bias_0[:, None]
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    return -number(position, "a") * (weight_1 @ hidden + bias_1[:, None])


def test_names_with_learned_have_a_network_whose_weights_stay():
    for name in ("kerple_power_learned_norm", "kerple_power_learned_norm_a_"):
        position = named(name)
        assert_bias(position, expected_of_network(position, NORMALIZED), rtol=1e-5, atol=1e-5)
        assert [*position.learned()] == ["a"]
    again = build("scaled_distance", SHAPE, network="fixed")
    assert torch.equal(again.get_buffer("weight_1"), named(name).get_buffer("weight_1"))


def test_the_network_can_be_learned():
    position = build("scaled_distance", SHAPE, network="learned", normalized=False, a=1.0)
    learned = {name: list(value.shape) for name, value in position.learned().items()}
    assert learned == {"weight_0": [32, 1], "bias_0": [32], "weight_1": [12, 32], "bias_1": [12]}
    theirs = [name for name, _ in position.reference()]
    assert theirs == ["bias_a", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]


def test_every_published_name_builds():
    for name in MEANINGS:
        assert named(name).distance_bias(8) is not None
