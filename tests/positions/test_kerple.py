"""KERPLE's kernels against the paper's formulas in float64, their first values and bounds."""

import pytest
import torch

from megatron.positions import Position, Shape, build
from tests.positions.formulas import LONG, SHAPE, assert_bias, d, kerple_log, number

LOG3, WHT1, WHT2 = "kerple_log_3para", "kerple_wht_1para", "kerple_wht_2para"


def assert_weight(position: Position, expected: torch.Tensor) -> None:
    # exp turns an absolute error of the exponent, 1e-6 of up to 90, into a relative one
    weight = position.distance_weight(LONG).double()
    torch.testing.assert_close(weight, expected, rtol=2e-4, atol=1e-6)


def test_kerple_log():
    position = build("kerple_log", SHAPE)
    assert_bias(position, kerple_log(position, "", d()))


def test_kerple_power_and_its_multiplicative_weight():
    position = build("kerple_bias_wht", SHAPE)
    a, p = number(position, "a"), number(position, "p", 2)
    assert_bias(position, -a * d() ** p)
    a, p = number(position, "weight_a"), number(position, "weight_p", 2)
    assert_weight(position, torch.exp(-a * d() ** p))


def test_kerple_log_with_three_parameters():
    position = build(LOG3, SHAPE)
    r1, r2, r3 = number(position, "r1"), number(position, "r2"), number(position, "r3", 2)
    assert_bias(position, -r1 * torch.log(1 + r2 * d() ** r3))
    three = build(LOG3, SHAPE, r1=0.7, r2=0.3, r3=1).distance_bias(LONG)
    two = build("kerple_log", SHAPE, p=0.7, a=0.3).distance_bias(LONG)
    torch.testing.assert_close(three, two, rtol=0, atol=0)


@pytest.mark.parametrize("name", [WHT1, WHT2])
def test_kerple_weights_multiply_and_add_nothing(name):
    position = build(name, SHAPE)
    exponent = number(position, "weight_p", 2) if name == WHT2 else 2
    assert_weight(position, torch.exp(-number(position, "weight_a") * d() ** exponent))
    assert position.distance_bias(5) is None


@pytest.mark.parametrize("name", ["kerple_bias_2para", "kerple_bias_3para"])
def test_kerple_bumps_are_positive(name):
    position = build(name, SHAPE)
    exponent = number(position, "r3", 2) if name.endswith("3para") else 2
    expected = number(position, "r1") * torch.exp(-number(position, "r2") * d() ** exponent)
    assert_bias(position, expected, rtol=2e-4)
    assert (position.distance_bias(LONG) >= 0).all()


@pytest.mark.parametrize(
    ("name", "twos"),
    [
        ("kerple_log", {"p"}),
        ("kerple_power", {"p"}),
        (LOG3, {"r1", "r3"}),
        (WHT1, set()),
        (WHT2, {"weight_p"}),
        ("kerple_bias_2para", set()),
        ("kerple_bias_3para", {"r3"}),
        ("kerple_bias_wht", {"p", "weight_p"}),
    ],
)
def test_kerple_numbers_start_uniform(name, twos):
    many_heads = Shape(4096, 64, 768, 512)
    for key, value in build(name, many_heads).named_parameters():
        high = 2 if key in twos else 1
        assert 0 <= value.min() < 0.01 * high, key
        assert 0.99 * high < value.max() <= high, key
        assert value.mean().item() == pytest.approx(high / 2, rel=0.05), key


def test_kerple_numbers_act_within_their_bounds():
    names = ["kerple_log", LOG3, "kerple_power", "kerple_bias_wht", WHT1, WHT2]
    for name in [*names, "kerple_bias_2para"]:
        position = build(name, SHAPE)
        with torch.no_grad():
            for value in position.parameters():
                value.fill_(-1.0)
        assert all((value == torch.tensor(0.01)).all() for value in position.learned().values())
    position = build("kerple_power", SHAPE)
    with torch.no_grad():
        position.a.fill_(0.1)
        position.p.fill_(5.0)
    assert_bias(position, (-0.1 * d() ** 2).expand(12, -1))


def test_a_number_of_kerple_can_be_fixed_and_the_others_learned():
    position = build("kerple_log", SHAPE, p=2.2)
    assert list(position.learned()) == ["a"]
    assert_bias(position, -2.2 * torch.log(1 + number(position, "a") * d()))
    weight = build("kerple_bias_wht", SHAPE, weight_a=0.001, weight_p=2, p=0.5)
    assert list(weight.learned()) == ["a"]
    expected = torch.exp(-0.001 * d(200) ** 2).expand(12, -1)
    torch.testing.assert_close(weight.distance_weight(200).double(), expected, rtol=1e-5, atol=1e-6)
