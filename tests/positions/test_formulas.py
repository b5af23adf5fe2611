"""Tables against the papers' formulas in float64, and rotations against Hugging Face."""

import math

import pytest
import torch
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.t5.modeling_t5 import T5Attention

from megatron.positions import Position, Shape, at_least, build, within
from megatron.positions.alibi import slopes

SHAPE = Shape(heads=12, head_dim=64, hidden=768, train_length=512)
LENGTH = 16384
# The official code's list for 12 heads (attention_with_linear_biases, get_slopes): those of 8, then 4 in between.
SLOPES_12 = [2.0**-n for n in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]


def distances() -> torch.Tensor:
    return torch.arange(LENGTH, dtype=torch.float64)


def parameter(position: Position, name: str) -> torch.Tensor:
    return position.get_parameter(name).detach().double()[:, None]


def assert_table(position: Position, expected: torch.Tensor) -> None:
    """Within float32's resolution of the value, everywhere."""
    torch.testing.assert_close(
        position.distance_bias(LENGTH).double(), expected, rtol=3e-6, atol=1e-6
    )


def s() -> torch.Tensor:
    return torch.tensor(SLOPES_12, dtype=torch.float64)[:, None]


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (8, [2.0**-n for n in range(1, 9)]),
        (12, SLOPES_12),
        (16, [2 ** (-n / 2) for n in range(1, 17)]),
        (25, [2 ** (-n / 2) for n in range(1, 17)] + [2 ** (-n / 4) for n in range(1, 19, 2)]),
    ],
)
def test_slopes_are_the_official_ones_in_the_official_order(heads, expected):
    assert slopes(heads) == pytest.approx(expected, rel=1e-12)


def test_alibi():
    assert_table(build("alibi", SHAPE), -s() * distances())
    assert_table(build("alibi", SHAPE, slope_factor=0.5), -s() * distances() / 2)


@pytest.mark.parametrize("d", [257, 4097, 16383])
def test_far_distances_are_not_rounded(d):
    table = build("alibi", SHAPE).bfloat16().distance_bias(LENGTH)
    assert table[8, d].item() == pytest.approx(-(2**-0.5) * d, rel=1e-6)


def test_mep_free_is_the_log_of_the_mean_kernel():
    d = distances()
    logs = torch.stack([-s() * d, -s() * d / 2, -s() * d**2])
    largest = logs.max(dim=0).values
    expected = largest + torch.log(torch.exp(logs - largest).mean(dim=0))
    assert_table(build("mep_free", SHAPE), expected)
    near = torch.log((torch.exp(-s() * d) + torch.exp(-s() * d / 2) + torch.exp(-s() * d**2)) / 3)[
        :, :200
    ]  # as printed
    torch.testing.assert_close(
        build("mep_free", SHAPE).distance_bias(200).double(), near, rtol=3e-6, atol=1e-6
    )


def test_mep_free_ends_as_alibi_with_half_slopes():
    far = build("mep_free", SHAPE).distance_bias(LENGTH)[:, -1].double()
    torch.testing.assert_close(
        far, (-s()[:, 0] * (LENGTH - 1) / 2 - math.log(3)), rtol=1e-6, atol=1e-4
    )


def test_mep_param_is_the_log_of_the_mean_kernel():
    position, d = build("mep_param", SHAPE), distances()
    a, p = (
        parameter(position, "kernels.1.a").clamp(min=0.01),
        parameter(position, "kernels.1.p").clamp(min=0.01),
    )
    assert_table(position, torch.log((torch.exp(-s() * d**2) + (1 + a * d) ** -p) / 2))


def test_a_mixture_weighs_its_kernels_as_told():
    d = distances()[:500]
    position = build("mep", SHAPE, kernels=["exp", {"exp": 0.25}], weights=[0.9, 0.1])
    expected = torch.log(0.9 * torch.exp(-s() * d) + 0.1 * torch.exp(-s() * d / 4))
    torch.testing.assert_close(position.distance_bias(500).double(), expected, rtol=3e-6, atol=1e-6)


def test_learned_weights_are_a_softmax_over_the_kernels_of_each_head():
    position, d = (
        build("mep", SHAPE, kernels=["exp", "gaussian"], weights="learned"),
        distances()[:100],
    )
    torch.testing.assert_close(
        position.distance_bias(100),
        build("mep", SHAPE, kernels=["exp", "gaussian"]).distance_bias(100),
    )
    with torch.no_grad():
        position.weight_logits.normal_()
    first, second = position.weight_logits.detach().double().softmax(dim=0)[:, :, None]
    expected = torch.log(first * torch.exp(-s() * d) + second * torch.exp(-s() * d**2))
    torch.testing.assert_close(position.distance_bias(100).double(), expected, rtol=3e-6, atol=1e-5)


@pytest.mark.parametrize("kernel", ["exp", "gaussian"])
def test_a_mixture_of_one_kernel_is_that_kernel(kernel):
    single = build({"exp": "alibi"}.get(kernel, kernel), SHAPE).distance_bias(LENGTH)
    torch.testing.assert_close(build("mep", SHAPE, kernels=[kernel]).distance_bias(LENGTH), single)


def test_kerple_log():
    position = build("kerple_log", SHAPE)
    p, a = parameter(position, "p").clamp(min=0.01), parameter(position, "a").clamp(min=0.01)
    assert_table(position, -p * torch.log(1 + a * distances()))


def test_kerple_power_and_its_multiplicative_weight():
    position, d = build("kerple_bias_wht", SHAPE), distances()
    a, p = parameter(position, "a").clamp(min=0.01), parameter(position, "p").clamp(0.01, 2)
    assert_table(position, -a * d**p)
    a, p = (
        parameter(position, "weight_a").clamp(min=0.01),
        parameter(position, "weight_p").clamp(0.01, 2),
    )
    torch.testing.assert_close(
        position.distance_weight(LENGTH).double(), torch.exp(-a * d**p), rtol=2e-4, atol=1e-6
    )  # exp turns an absolute error of the exponent, 1e-6 of up to 90, into a relative one


def test_kerple_power_with_exponent_one_is_alibi():
    position = build("kerple_power", SHAPE)
    with torch.no_grad():
        position.p.fill_(1.0)
        position.a.copy_(torch.tensor(SLOPES_12).clamp(min=0.01))
    expected = -torch.tensor(SLOPES_12).clamp(min=0.01)[:, None] * torch.arange(LENGTH)
    torch.testing.assert_close(position.distance_bias(LENGTH), expected)


def test_kerple_starts_in_the_papers_ranges():
    log, power = (
        build("kerple_log", Shape(4096, 64, 768, 512)),
        build("kerple_power", Shape(4096, 64, 768, 512)),
    )
    for parameter_, high in ((log.p, 2), (log.a, 1), (power.p, 2), (power.a, 1)):
        assert 0 <= parameter_.min() < 0.01 * high
        assert 0.99 * high < parameter_.max() <= high


def test_bounds_hold_forward_and_let_the_gradient_pass():
    x = torch.tensor([-1.0, 0.5, 3.0], requires_grad=True)
    torch.testing.assert_close(within(x, 0.01, 2.0), torch.tensor([0.01, 0.5, 2.0]))
    torch.testing.assert_close(at_least(x, 0.01), torch.tensor([0.01, 0.5, 3.0]))
    far = torch.tensor([-100.0, -3.0, 1e-7])
    torch.testing.assert_close(
        at_least(far, 1e-6), torch.full((3,), 1e-6), rtol=0, atol=0
    )  # met exactly
    within(x, 0.01, 2.0).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3))


def test_t5_buckets_are_those_of_hugging_face():
    position = build("t5", SHAPE)
    expected = T5Attention._relative_position_bucket(
        -torch.arange(LENGTH), bidirectional=False, num_buckets=32, max_distance=128
    )
    found = position.bucket(torch.arange(LENGTH, dtype=torch.float32))
    assert torch.equal(found, expected)
    assert found[[15, 16, 17, 127, 128, 16383]].tolist() == [15, 16, 16, 31, 31, 31]
    bias = position.distance_bias(LENGTH)
    torch.testing.assert_close(
        bias, 8 * position.weight.detach()[expected].t()
    )  # √64, as GPT-NeoX scales it


@pytest.mark.parametrize("share", [1.0, 0.25])
@pytest.mark.parametrize(
    ("start", "tolerance"), [(0, 2e-4), (16000, 5e-3)]
)  # float32 angles: 1e-3 apart at 16384
def test_rotary_turns_as_hugging_face_does(share, start, tolerance):
    length = 300
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": share, "rope_type": "default"}
    config = GPTNeoXConfig(
        hidden_size=768,
        num_attention_heads=12,
        max_position_embeddings=32768,
        rope_parameters=rope,
        rotary_pct=share,
    )
    q, k = torch.randn(2, 2, 12, length, 64)
    ids = torch.arange(start, start + length)[None]
    cos, sin = GPTNeoXRotaryEmbedding(config)(q, ids)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    found = build("rotary", SHAPE, rotary_pct=share).on_queries_keys(q, k, start=start)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("position", [257, 1857, 16383])
def test_rotary_angles_keep_single_positions_apart_in_bfloat16(position):
    rotary = build("rotary", SHAPE).bfloat16()
    ones = torch.ones(1, 12, 1, 64)
    turned = rotary.on_queries_keys(ones, ones, start=position)[0][0, 0, 0]
    frequency = 10000.0 ** -(torch.arange(32, dtype=torch.float64) / 32)
    expected = torch.cos(position * frequency) - torch.sin(position * frequency)
    torch.testing.assert_close(
        turned[:32].double(), expected, rtol=0, atol=3e-3
    )  # float32 angles near 16384


def test_sinusoidal_is_the_papers_table_with_the_halves_side_by_side():
    t, i = (
        torch.arange(LENGTH, dtype=torch.float64)[:, None],
        torch.arange(384, dtype=torch.float64),
    )
    angle = t * 10000.0 ** (-2 * i / 768)
    expected = torch.cat([angle.sin(), angle.cos()], dim=1)
    found = build("sinusoidal", SHAPE).on_embeddings(torch.zeros(1, LENGTH, 768))[0].double()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)  # float32 angles near 16384
    moved = build("sinusoidal", SHAPE).on_embeddings(torch.zeros(1, 5, 768), start=100)[0].double()
    torch.testing.assert_close(moved, expected[100:105], rtol=0, atol=1e-5)


def test_sinusoidal_tells_neighbours_apart_in_bfloat16():
    table = build("sinusoidal", SHAPE).bfloat16().on_embeddings(torch.zeros(1, LENGTH, 768))[0]
    assert (table[1:] - table[:-1]).abs().amax(dim=1).min() > 0.1


def test_learned_positions_are_a_table_of_their_own():
    position = build("learned", SHAPE, max_positions=600)
    found = position.on_embeddings(torch.zeros(1, 5, 768), start=7)[0]
    torch.testing.assert_close(found, position.weight[7:12])
    assert position.weight.std().item() == pytest.approx(0.02, rel=0.02)


def test_gradients_of_learned_numbers_equal_finite_differences():
    for name in (
        "kerple_log",
        "kerple_power",
        "kerple_bias_wht",
        "t5",
        "mep_param",
        "mep_param_t5",
    ):
        position = build(name, Shape(3, 4, 12, 16)).double()
        with torch.no_grad():
            for value in position.parameters():
                value.uniform_(0.1, 0.9)
        inputs = tuple(position.parameters())

        def tables(*values, position=position):
            named = dict(zip(dict(position.named_parameters()), values, strict=True))
            bias = torch.func.functional_call(
                _Table(position, "distance_bias"), {f"of.{k}": v for k, v in named.items()}, 40
            )
            if position.distance_weight(1) is None:
                return bias
            table = _Table(position, "distance_weight")
            return bias, torch.func.functional_call(
                table, {f"of.{k}": v for k, v in named.items()}, 40
            )

        assert torch.autograd.gradcheck(tables, inputs)


class _Table(torch.nn.Module):
    """A hook as a module's forward, so that functional_call can feed it parameters."""

    def __init__(self, of: Position, hook: str):
        super().__init__()
        self.of, self.hook = of, hook

    def forward(self, length: int):
        return getattr(self.of, self.hook)(length)


@pytest.mark.parametrize(
    "name",
    ["alibi", "gaussian", "kerple_log", "kerple_power", "kerple_bias_wht", "mep_free", "mep_param"],
)
def test_a_decaying_bias_starts_at_zero_and_never_rises(name):
    table = build(name, SHAPE).distance_bias(LENGTH)
    torch.testing.assert_close(table[:, 0], torch.zeros(12), rtol=0, atol=1e-6)
    assert (table.diff(dim=1) <= 1e-6).all()
