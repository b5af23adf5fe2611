"""What encodings add or multiply by distance, against the papers' formulas in float64."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from megatron.config import load
from megatron.model import from_config
from megatron.positions import Position, Shape, build
from megatron.positions.alibi import alibi_slopes

SHAPE = Shape(heads=12, head_dim=64, hidden=768, train_length=512)
LONG = 131072
D = torch.arange(LONG, dtype=torch.float64)
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


S, OLD, HEAD = column(SLOPES), column(OLD_GAUSSIAN_SLOPES), column([*range(1, 13)])
ALIBI, HALF, GAUSSIAN = -S * D, -S * D / 2, -S * D**2
# Facts of MEP's code, for windows of 512 tokens and more: mean and rms of 0 … 511.
MEAN, RMS = 255.5, math.sqrt(sum(n * n for n in range(512)) / 512 + 1e-6)
NORMALIZED = (D - MEAN) / RMS
CLIPPED = (torch.where(D < 512, D, 511 + (D - 511) / 512) - MEAN) / RMS
BUCKET = T5Attention._relative_position_bucket(
    -torch.arange(LONG), bidirectional=False, num_buckets=32, max_distance=128
)


class Numbers:
    """The learned numbers of an encoding as they act: [heads, 1] float64."""

    def __init__(self, position: Position) -> None:
        self.position = position

    def __call__(self, name: str, low: float = 0.01, high: float = math.inf) -> Tensor:
        return self.position.get_parameter(name).detach().double().clamp(low, high)[:, None]

    def exponent(self, name: str) -> Tensor:
        return self(name, high=2)

    def free(self, name: str) -> Tensor:
        return self(name, low=-math.inf)


def tanh(slopes: Tensor) -> Tensor:
    return torch.log(1e-6 + 1 + torch.tanh(-slopes * D))


def sandwich(dbar: int, base: float, first: int) -> Tensor:
    cosines = torch.full_like(D, -dbar / 2)
    for i in range(first, first + dbar // 2):
        cosines += torch.cos(D / base ** (2 * i / dbar))
    return cosines / (8 * HEAD / 12)


def t5(of: Numbers, path: str = "") -> Tensor:
    weight = of.position.get_parameter(f"{path}weight").detach().double()
    return math.sqrt(64) * weight[BUCKET].t()


def kerple_log(of: Numbers, path: str = "") -> Tensor:
    return -of(f"{path}p") * torch.log(1 + of(f"{path}a") * D)


def mean(*log_kernels: Tensor) -> Tensor:
    """The log of the mean kernel, from log kernels: each [heads, length] float64."""
    return torch.stack(log_kernels).logsumexp(dim=0) - math.log(len(log_kernels))


def softmax(of: Numbers) -> Tensor:
    """exp and gaussian with weights for each head."""
    weights = of.position.weight_logits.detach().double().log_softmax(dim=0)[:, :, None]
    return torch.logaddexp(weights[0] + ALIBI, weights[1] + GAUSSIAN)


class Case(NamedTuple):
    """An encoding, its options, its formula, and how near float32 comes to it."""

    name: str
    options: dict[str, Any]
    formula: Callable[[Numbers], Tensor]
    rtol: float = 3e-6
    atol: float = 1e-6


def mixture(kernels: list[Any], *logs: Callable[[Numbers], Tensor] | Tensor) -> Case:
    """A mean of kernels."""

    def formula(of: Numbers) -> Tensor:
        return mean(*(log if isinstance(log, Tensor) else log(of) for log in logs))

    return Case("mep", {"kernels": kernels}, formula, atol=2e-6)


EXP_HALF = {"exp": 0.5}
TANH = tanh(column(TANH_SLOPES))
NAPE = [2.0**-head for head in range(6)] + [0.0] * 6  # arXiv 2506.16640, get_nape_slopes
CASES = [
    Case("alibi", {}, lambda of: ALIBI),
    Case("alibi", {"slope_factor": 0.5}, lambda of: HALF),
    Case("alibi", {"slopes": 0.25, "slope_factor": 0.5}, lambda of: (-0.125 * D).expand(12, -1)),
    Case("alibi", {"slopes": NAPE}, lambda of: -column(NAPE) * D),
    Case("alibi", {"learned_slopes": True}, lambda of: -of("slopes", low=1e-6) * D),
    Case("gaussian", {"slopes": OLD_GAUSSIAN_SLOPES}, lambda of: -OLD * D**2),
    Case("tanh", {}, lambda of: TANH, rtol=1e-6, atol=2e-7),
    Case("sandwich", {}, lambda of: sandwich(128, 10000.0, 1)),
    Case(
        "sandwich",
        {"dbar": 64, "base": 500.0, "first_frequency": 0},
        lambda of: sandwich(64, 500.0, 0),
    ),
    Case("bam", {}, lambda of: -of.free("log_scale").exp() * (D + 1e-5) ** of.free("exponent")),
    Case(
        "ape_decay",
        {},
        lambda of: (
            -of("linear", 1e-6) * D - of("log", 1e-6) * D.log1p() - of("root", 1e-6) * D**0.5
        ),
    ),
    Case("scale_invariant", {"tau": 3.5}, lambda of: (-2 * torch.log(1 + D / 3.5)).expand(12, -1)),
    Case("t5", {}, t5),
    Case("kerple_log", {}, kerple_log),
    Case(
        "kerple_log_3para",
        {},
        lambda of: -of("r1") * torch.log(1 + of("r2") * D ** of.exponent("r3")),
    ),
    Case("kerple_power", {}, lambda of: -of("a") * D ** of.exponent("p")),
    Case("kerple_bias_wht", {}, lambda of: -of("a") * D ** of.exponent("p")),
    Case("kerple_bias_2para", {}, lambda of: of("r1") * torch.exp(-of("r2") * D**2), rtol=2e-4),
    Case(
        "kerple_bias_3para",
        {},
        lambda of: of("r1") * torch.exp(-of("r2") * D ** of.exponent("r3")),
        rtol=2e-4,
    ),
    Case("mep_free", {}, lambda of: mean(ALIBI, HALF, GAUSSIAN)),
    Case("mep_param", {}, lambda of: mean(GAUSSIAN, kerple_log(of, "kernels.1.")), atol=2e-6),
    Case(
        "mep_param_t5",
        {},
        lambda of: mean(GAUSSIAN, ALIBI, t5(of, "kernels.2."), kerple_log(of, "kernels.3.")),
        atol=2e-6,
    ),
    # A mixture in a mixture, ALiBi with half slopes, and steeper slopes of tanh: ali_sigmoid.
    mixture([EXP_HALF, {"mep": {"kernels": ["tanh", "gaussian"]}}], HALF, mean(TANH, GAUSSIAN)),
    mixture(
        ["exp", {"tanh": {"slopes": SLOPES, "slope_factor": 0.5}}],
        ALIBI,
        torch.log(2 * torch.sigmoid(-S * D) + 1e-6),
    ),
    mixture([{"kerple_log": {"a": 0.1, "p": 2.2}}], (-2.2 * torch.log(1 + 0.1 * D)).expand(12, -1)),
    Case(
        "mep",
        {"kernels": ["exp", {"exp": 0.25}], "weights": [0.9, 0.1]},
        lambda of: torch.logaddexp(math.log(0.9) + ALIBI, math.log(0.1) + ALIBI / 4),
    ),
    Case("mep", {"kernels": ["exp", "gaussian"], "weights": "learned"}, softmax, atol=1e-5),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_bias_is_its_formula(case):
    position = build(case.name, SHAPE, **case.options)
    if case.name in ("bam", "mep", "kerple_power"):  # first values are equal, or within bounds
        with torch.no_grad():
            for number in position.parameters():
                number.add_(torch.linspace(-1.5, 2, number.numel()).view(number.shape))
    expected = case.formula(Numbers(position))
    bias = position.distance_bias(LONG).double()
    torch.testing.assert_close(bias, expected, rtol=case.rtol, atol=case.atol)


def test_a_weight_is_its_formula_and_adds_nothing():
    for name in ("kerple_wht_1para", "kerple_wht_2para", "kerple_bias_wht"):
        position = build(name, SHAPE)
        of = Numbers(position)
        exponent = 2 if name == "kerple_wht_1para" else of.exponent("weight_p")
        expected = torch.exp(-of("weight_a") * D**exponent)
        weight = position.distance_weight(LONG).double()
        # exp turns an absolute error of the exponent, 1e-6 of up to 90, into a relative one
        torch.testing.assert_close(weight, expected, rtol=2e-4, atol=1e-6)
        assert (position.distance_bias(5) is None) == (name != "kerple_bias_wht")


def test_scale_invariant_attention_gives_a_distance_what_the_paper_says():
    """The paper's condition: exp of the score of a standard normal product, by quadrature."""
    tau = 10.0
    position = build("scale_invariant", SHAPE, tau=tau)
    weight, bias = (
        table.double() for table in (position.distance_weight(LONG), position.distance_bias(LONG))
    )
    assert torch.equal(weight[:, :1], torch.ones(12, 1).double())
    product = torch.linspace(-30, 30, 6001, dtype=torch.float64)
    density = torch.exp(-(product**2) / 2) / math.sqrt(2 * math.pi) * 0.01
    for distance in (0, 1, 10, 1000, LONG - 1):
        scores = weight[0, distance] * product + bias[0, distance]
        expected = math.exp(0.5) / (1 + distance / tau)
        assert (scores.exp() * density).sum().item() == pytest.approx(expected, rel=2e-6)


def test_first_values_are_the_papers():
    torch.testing.assert_close(
        build("bam", SHAPE).distance_bias(LONG), ALIBI.float(), rtol=1e-6, atol=1e-5
    )
    many_heads = Shape(4096, 64, 768, 512)
    for name, twos in (
        ("kerple_log", {"p"}),
        ("kerple_power", {"p"}),
        ("kerple_log_3para", {"r1", "r3"}),
        ("kerple_wht_1para", set()),
        ("kerple_bias_2para", set()),
        ("kerple_bias_3para", {"r3"}),
        ("kerple_bias_wht", {"p", "weight_p"}),
    ):
        for key, value in build(name, many_heads).named_parameters():
            high = 2 if key in twos else 1
            assert 0 <= value.min() < 0.01 * high, key
            assert 0.99 * high < value.max() <= high, key
            assert value.mean().item() == pytest.approx(high / 2, rel=0.05), key


def test_slopes_are_the_official_ones_in_the_official_order():
    for heads, expected in (
        (1, [2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (12, SLOPES),
        (25, [2 ** (-n / 2) for n in range(1, 17)] + [2 ** (-n / 4) for n in range(1, 19, 2)]),
    ):
        assert alibi_slopes(heads) == pytest.approx(expected, rel=1e-12)
    # Of the tanh kernel, for which 12 are published: in the ratio of the steeper ones.
    ratio = (column(TANH_SLOPES) / S)[S > 0.04]
    torch.testing.assert_close(ratio, torch.full((8,), 0.5148).double(), rtol=1e-3, atol=0)
    bias = build("tanh", Shape(16, 64, 1024, 512)).distance_bias(100).double()
    expected = torch.log(1e-6 + 1 + torch.tanh(-0.5148 * column(alibi_slopes(16)) * D[:100]))
    torch.testing.assert_close(bias, expected, rtol=1e-6, atol=2e-7)


# --- The experiments of MEP's code on scaled distances, by their published names ---

SIZES = ["num_layers=1", "hidden_size=24", "num_attention_heads=12", "seq_length=16"]


def named(name: str, *words: str) -> Position:
    """The encoding that a configuration with a published name builds."""
    return from_config(load([], [*SIZES, f"pos-emb={name}", *words]), vocab=16).position


def assert_named(position: Position, expected: Tensor, atol: float = 1e-6) -> None:
    bias = position.distance_bias(LONG).double()
    torch.testing.assert_close(bias, expected, rtol=1e-5, atol=atol)


def test_names_with_original_have_alibis_slopes_times_a_factor():
    for name, scaling, factor, distance in (
        ("kerple_power_original", 0, 1, D),
        ("kerple_power_original__", 3, 8, D),
        ("kerple_power_norm_original_scaling__", 9, 512, NORMALIZED),
        ("kerple_power_norm_original_scaling__", 10, 10, NORMALIZED),
        ("kerple_power_original_norm", 2, 4, NORMALIZED),
        ("kerple_power_norm_clip_original_scaling__", 160, 160, CLIPPED),
    ):
        floored = column([max(0.01, factor * slope) for slope in SLOPES])
        position = named(name, f"alibi_scaling={scaling}")
        assert_named(position, -floored * distance, atol=2e-5 * factor)


def test_names_with_a_learn_the_slopes_and_those_with_learned_have_a_network_that_stays():
    position = named("kerple_power_norm_a_")
    assert_named(position, -Numbers(position)("a") * NORMALIZED, atol=1e-5)
    position = named("kerple_power_learned_norm_a_")
    assert [*position.learned()] == ["a"]
    weight_0, bias_0, weight_1, bias_1 = (
        position.get_buffer(key).double() for key in ("weight_0", "bias_0", "weight_1", "bias_1")
    )
    hidden = weight_0 @ NORMALIZED[None] + bias_0[:, None]
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    expected = -Numbers(position)("a") * (weight_1 @ hidden + bias_1[:, None])
    assert_named(position, expected, atol=1e-5)
    again = build("scaled_distance", SHAPE, network="fixed")
    assert torch.equal(again.get_buffer("weight_1"), weight_1.float())
    learned = build("scaled_distance", SHAPE, network="learned", a=1.0)
    theirs = [name for name, _ in learned.reference()]
    assert theirs == ["bias_a", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
