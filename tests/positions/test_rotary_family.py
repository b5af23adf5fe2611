"""Rotary's scalings against Hugging Face and the papers, xPos against torchscale in float64."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gptj.modeling_gptj import (
    apply_rotary_pos_emb,
    create_sinusoidal_positions,
)

from megatron.attention import attention
from megatron.errors import UserError
from megatron.positions import Shape, build

SHAPE = Shape(heads=4, head_dim=64, hidden=256, train_length=512)
HUGGING_FACE = {"linear": "linear", "ntk": "dynamic", "yarn": "yarn"}


def hugging_face(
    scaling: str, factor: float, base: float, share: float
) -> tuple[torch.Tensor, float]:
    """Frequencies, and the factor on cos and sin.

    Their `dynamic` is our ntk with factor = length / original length.
    """
    rope = {
        "rope_type": HUGGING_FACE[scaling],
        "rope_theta": base,
        "partial_rotary_factor": share,
        "factor": factor,
    }
    if scaling == "yarn":
        rope["original_max_position_embeddings"] = 512
    if scaling == "ntk":
        rope["factor"] = 1.0
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope
    )
    length = int(512 * factor) if scaling == "ntk" else None
    return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, None, seq_len=length)


@pytest.mark.parametrize("scaling", sorted(HUGGING_FACE))
@pytest.mark.parametrize("factor", [1.0, 2.0, 32.0])
@pytest.mark.parametrize(("base", "share"), [(10000.0, 1.0), (10000.0, 0.25), (500000.0, 1.0)])
def test_scaled_frequencies_are_those_of_hugging_face(scaling, factor, base, share):
    ours = build("rotary", SHAPE, scaling=scaling, factor=factor, base=base, rotary_pct=share)
    frequencies, amplitude = hugging_face(scaling, factor, base, share)
    torch.testing.assert_close(ours.inv_freq, frequencies, rtol=3e-6, atol=0)
    assert ours.inv_freq.dtype == torch.float32
    assert ours.amplitude == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize(("high", "low"), [(4.0, 1.0), (8.0, 2.0)])
def test_llama3_frequencies_are_those_of_hugging_face(base, high, low):
    rope = {
        "rope_type": "llama3",
        "rope_theta": base,
        "factor": 8.0,
        "high_freq_factor": high,
        "low_freq_factor": low,
        "original_max_position_embeddings": 256,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=rope)
    expected, amplitude = ROPE_INIT_FUNCTIONS["llama3"](config, None)
    factors = {"high_freq_factor": high, "low_freq_factor": low, "original_length": 256}
    ours = build("rotary", SHAPE, scaling="llama3", factor=8.0, base=base, **factors)
    torch.testing.assert_close(ours.inv_freq, expected, rtol=3e-6, atol=0)
    assert (ours.amplitude, amplitude) == (1.0, 1.0)


def test_yarn_takes_its_factor_and_an_untruncated_ramp_as_hugging_face_does():
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "attention_factor": 1.3,
        "truncate": False,
        "original_max_position_embeddings": 512,
    }
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=rope)
    expected, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, None)
    ours = build("rotary", SHAPE, scaling="yarn", factor=4.0, attention_factor=1.3, truncate=False)
    torch.testing.assert_close(ours.inv_freq, expected, rtol=3e-6, atol=0)
    assert ours.amplitude == amplitude == 1.3


LONGROPE = {
    "factor": 4.0,
    "original_length": 512,
    "long_factor": [1.0 + pair / 8 for pair in range(32)],
    "short_factor": [1.0 + pair / 64 for pair in range(32)],
}


@pytest.mark.parametrize("length", [1, 512, 513, 2048])
@pytest.mark.parametrize("attention_factor", [None, 1.3])
def test_longrope_is_that_of_hugging_face_on_both_sides_of_the_original_length(
    length, attention_factor
):
    options = {**LONGROPE, "attention_factor": attention_factor}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 512,
        **{key: value for key, value in options.items() if key != "original_length"},
    }
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=2048, rope_parameters=rope
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS["longrope"](config, None, seq_len=length)
    ours = build("rotary", SHAPE, scaling="longrope", **options)
    ours.prepare(length)
    q = torch.randn(1, 4, length, 64)
    found = ours.on_queries_keys(q, q)[0]
    angle = torch.arange(length)[:, None] * expected
    pairs = torch.complex(*q.chunk(2, dim=-1)) * torch.polar(torch.tensor(amplitude), angle)
    # Angles in float32 are that much apart.
    tolerance = 1e-5 + 1e-6 * length
    torch.testing.assert_close(
        found, torch.cat([pairs.real, pairs.imag], dim=-1), rtol=0, atol=tolerance
    )


def test_longrope_refuses_keys_that_were_cached_with_other_frequencies():
    ours, x = build("rotary", SHAPE, scaling="longrope", **LONGROPE), torch.ones(1, 4, 1, 64)
    for start in (0, 511, 512, 600):
        ours.prepare(start + 1)
        if start != 512:
            ours.on_queries_keys(x, x, start=start)
            continue
        with pytest.raises(UserError, match="other frequencies beyond 512 tokens, so cached keys"):
            ours.on_queries_keys(x, x, start=start)


def test_resonant_wavelengths_are_whole_and_those_that_stand_still_stay_so():
    ours = build("rotary", SHAPE, resonance=True, fraction=0.5)
    wavelengths = 2 * math.pi / ours.inv_freq[:16].double()
    torch.testing.assert_close(wavelengths, (2 * math.pi / plain()[:16]).round(), rtol=1e-6, atol=0)
    assert not ours.inv_freq[16:].any()
    q, k = torch.randn(2, 1, 4, 40, 64)
    turned = ours.on_queries_keys(q, k)[0]
    assert torch.equal(turned[..., 16:32], q[..., 16:32])
    assert torch.equal(turned[..., 48:], q[..., 48:])


@pytest.mark.parametrize("rotary_pct", [1.0, 0.5])
def test_interleaved_pairs_are_those_of_gpt_j(rotary_pct):
    ours = build("rotary", SHAPE, interleaved=True, rotary_pct=rotary_pct)
    q, k = torch.randn(2, 1, 4, 40, 64)
    turning = int(64 * rotary_pct)
    angles = create_sinusoidal_positions(40, turning)[None]  # [1, 40, (sin, cos) of each pair]
    sin, cos = angles.chunk(2, dim=-1)
    for before, after in zip((q, k), ours.on_queries_keys(q, k), strict=True):
        by_length = before[..., :turning].transpose(1, 2)
        expected = apply_rotary_pos_emb(by_length, sin, cos).transpose(1, 2)
        torch.testing.assert_close(after[..., :turning], expected, rtol=0, atol=1e-5)
        assert torch.equal(after[..., turning:], before[..., turning:])


def plain(base: float = 10000.0) -> torch.Tensor:
    return torch.tensor([base ** (-2 * j / 64) for j in range(32)], dtype=torch.float64)


@pytest.mark.parametrize("factor", [2.0, 16.0])
def test_position_interpolation_is_the_plain_rotation_at_position_over_factor(factor):
    q, k = torch.randn(2, 1, 4, 64, 64)
    stretched = build("rotary", SHAPE, scaling="linear", factor=factor).on_queries_keys(q, k)[0]
    for position in (0, 16, 48):
        found = stretched[:, :, position]
        angle = position / factor * plain()
        x = torch.complex(q[:, :, position, :32].double(), q[:, :, position, 32:].double())
        turned = x * torch.exp(1j * angle)
        torch.testing.assert_close(
            found.double(), torch.cat([turned.real, turned.imag], dim=-1), rtol=0, atol=1e-5
        )


def test_ntk_keeps_the_fastest_feature_and_interpolates_the_slowest():
    inv_freq = build("rotary", SHAPE, scaling="ntk", factor=8.0).inv_freq.double()
    expected = torch.tensor(
        [(10000 * 8 ** (64 / 62)) ** (-2 * j / 64) for j in range(32)], dtype=torch.float64
    )
    torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)
    assert inv_freq[0] == 1
    assert inv_freq[-1].item() == pytest.approx(plain()[-1].item() / 8, rel=1e-6)


@pytest.mark.parametrize("original", [None, 2048])
def test_by_parts_stretches_slow_features_and_leaves_fast_ones_alone(original):
    ours = build(
        "rotary",
        SHAPE,
        scaling="by_parts",
        factor=4.0,
        original_length=original,
        beta_fast=16,
        beta_slow=2,
    )
    length = original or 512
    turns = length * plain() / (2 * math.pi)  # in the original length
    low = math.floor(
        next(j / 100 for j in range(3200) if length * 10000 ** (-j / 3200) <= 16 * 2 * math.pi)
        - 0.005
    )
    high = math.ceil(
        next(j / 100 for j in range(3200) if length * 10000 ** (-j / 3200) <= 2 * 2 * math.pi)
        - 0.005
    )
    share = ((torch.arange(32, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    torch.testing.assert_close(
        ours.inv_freq.double(), plain() * (1 - share + share / 4), rtol=1e-6, atol=0
    )
    # Whole features bound the ramp: one of them may lie just inside it.
    assert (ours.inv_freq.double() / plain())[turns > 16 * 1.4].min().item() == pytest.approx(
        1, rel=1e-6
    )
    assert (ours.inv_freq.double() / plain())[turns < 2 / 1.4].max().item() == pytest.approx(
        1 / 4, rel=1e-6
    )
    assert ours.amplitude == 1


def test_yarn_is_by_parts_with_larger_scores():
    q, k = torch.randn(2, 1, 4, 300, 64)
    yarn, parts = (
        build("rotary", SHAPE, scaling=name, factor=4.0) for name in ("yarn", "by_parts")
    )
    torch.testing.assert_close(yarn.inv_freq, parts.inv_freq, rtol=0, atol=0)
    scores = [torch.einsum("bhqd,bhkd->bhqk", *one.on_queries_keys(q, k)) for one in (yarn, parts)]
    torch.testing.assert_close(
        scores[0], scores[1] * (0.1 * math.log(4) + 1) ** 2, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("scaling", ["linear", "ntk", "by_parts", "yarn"])
def test_a_factor_of_one_changes_nothing(scaling):
    q, k = torch.randn(2, 1, 4, 300, 64)
    expected = build("rotary", SHAPE).on_queries_keys(q, k, start=1000)
    found = build("rotary", SHAPE, scaling=scaling, factor=1).on_queries_keys(q, k, start=1000)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def torchscale(x: torch.Tensor, start: int, *, downscale: bool) -> torch.Tensor:
    """XPOS.forward of torchscale for a text of 512 tokens, in float64.

    x [..., length, 64] has neighbouring features as pairs.
    """
    position = torch.arange(start, start + x.shape[-2], dtype=torch.float64)
    zeta = (torch.arange(0, 64, 2, dtype=torch.float64) + 0.4 * 64) / (1.4 * 64)
    scale = zeta ** ((position - 512 // 2) / 512)[:, None]
    scale = 1 / scale if downscale else scale
    angle = position[:, None] * 10000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (32, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(scale, angle)).flatten(-2)


def halves(x: torch.Tensor) -> torch.Tensor:
    """Neighbouring pairs (0, 1), (2, 3), … to our layout (j, j + half)."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


@pytest.mark.parametrize(
    ("start", "tolerance"), [(0, 1e-4), (1000, 5e-3)]
)  # float32 angles times 1 / scale = 20
def test_xpos_is_torchscales_up_to_the_order_of_features(start, tolerance):
    q, k = torch.randn(2, 1, 4, 512, 64)
    ours = build("xpos", SHAPE).on_queries_keys(halves(q), halves(k), start=start)
    for found, x, downscale in zip(ours, (q, k), (False, True), strict=True):
        expected = halves(torchscale(x, start, downscale=downscale))
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_xpos_scores_decay_by_zeta_and_depend_on_the_distance_alone_to_16384(dtype):
    xpos = build("xpos", SHAPE).to(dtype)
    q, k = torch.randn(2, 1, 4, 1, 64).to(dtype)
    x = (
        torch.complex(*q.double().chunk(2, dim=-1))
        * torch.complex(*k.double().chunk(2, dim=-1)).conj()
    )
    zeta = (torch.arange(0, 64, 2, dtype=torch.float64) / 64 + 0.4) / 1.4
    for start, distance in ((0, 100), (15000, 100), (15000, 1000), (16383, 16383)):
        turn = torch.exp(1j * distance * plain())
        expected = (x * turn * zeta ** (distance / 512)).real.sum(dim=-1)
        query = xpos.on_queries_keys(q, q, start=start if start > distance else distance)[
            0
        ].double()
        key = xpos.on_queries_keys(k, k, start=max(start, distance) - distance)[1].double()
        tolerance = 5e-3 if dtype == torch.float32 else 0.2
        torch.testing.assert_close((query * key).sum(dim=-1), expected, rtol=0, atol=tolerance)


def test_xpos_says_where_it_would_overflow():
    xpos, x = build("xpos", SHAPE), torch.ones(1, 4, 1, 64)
    assert all(side.isfinite().all() for side in xpos.on_queries_keys(x, x, start=34000))
    with pytest.raises(
        UserError, match=r"xpos overflows float32 beyond 34[0-9]* tokens, so length 65536 cannot be"
    ):
        xpos.on_queries_keys(x, x, start=65535)
    assert all(
        side.isfinite().all() for side in xpos.on_queries_keys(x.half(), x.half(), start=3000)
    )
    with pytest.raises(
        UserError, match=r"overflows float16 beyond 30[0-9]* tokens.*larger scale_base"
    ):
        xpos.on_queries_keys(x.half(), x.half(), start=4095)
    wide = build("xpos", SHAPE, scale_base=4096)
    assert all(side.isfinite().all() for side in wide.on_queries_keys(x, x, start=131071))


def test_xpos_with_one_decay_is_the_score_of_rotary_times_xi_to_the_distance():
    """(R_m q xi^m)·(R_n k xi^-n) = q·R_(n-m) k xi^(m-n): kexue.fm/archives/9431, in float64."""
    xi, length = 0.99, 300
    torch.manual_seed(1)
    q, k, v = torch.randn(3, 1, 4, length, 64)
    xpos = build("xpos", SHAPE, xi=xi)
    index = torch.arange(length, dtype=torch.float64)
    turned = [
        torch.complex(*x.double().chunk(2, dim=-1)) * torch.exp(1j * index[:, None] * plain())
        for x in (q, k)
    ]
    scores = (turned[0] @ turned[1].mH).real / 8
    scores = scores * xi ** (index[:, None] - index).clamp(min=0)
    weights = scores.masked_fill(index[:, None] < index, -math.inf).softmax(-1)
    for backend in ("eager", "sdpa"):
        found = attention(
            *xpos.on_queries_keys(q, k), v, weight=xpos.distance_weight(length), backend=backend
        )
        torch.testing.assert_close(found.double(), weights @ v.double(), rtol=0, atol=2e-5)


@pytest.mark.parametrize("xi", [1.0, 0.9999, 0.99, 0.5])
def test_one_decay_is_exact_at_any_length(xi):
    length = 131072
    found = build("xpos", SHAPE, xi=xi).distance_weight(length)
    assert found.shape == (4, length)
    expected = xi ** torch.arange(length, dtype=torch.float64)
    expected = expected.float()  # 0 where float32 has no such number
    torch.testing.assert_close(found, expected.expand(4, -1), rtol=1e-7, atol=1e-44)


def test_one_decay_needs_no_bound_on_the_length():
    x = torch.ones(1, 4, 1, 64)
    decaying = build("xpos", SHAPE, xi=0.5)
    for dtype in (torch.float16, torch.float32):
        sides = decaying.on_queries_keys(x.to(dtype), x.to(dtype), start=131071)
        assert all(side.isfinite().all() for side in sides)
    assert decaying.has("distance_weight")
    assert not build("xpos", SHAPE).has("distance_weight")
    assert build("xpos", SHAPE).distance_weight(8) is None


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("xpos", {"xi": 1.001}, "xi: 1.001 is not between 1e-12 and 1"),
        ("xpos", {"xi": -1}, "xi: -1 is not a positive number"),
        ("rotary", {"scaling": "yarm"}, "scaling: 'yarm' is not known; did you mean yarn?"),
        (
            "rotary",
            {"scaling": 3},
            "scaling: 3 is not known; choose from by_parts, linear, llama3, longrope, none, ntk",
        ),
        (
            "rotary",
            {"scaling": "yarn", "factor": 0.5},
            "factor: 0.5 is less than 1; give how many times longer",
        ),
        (
            "rotary",
            {"factor": 4},
            "factor: 4 has no effect with scaling: none; choose linear, ntk, by_parts, yarn",
        ),
        (
            "rotary",
            {"scaling": "ntk", "factor": 2, "rotary_pct": 0.04},
            "ntk stretches nothing with 2 turning features",
        ),
        (
            "rotary",
            {"scaling": "yarn", "original_length": 0},
            "original_length: 0 is not a positive number",
        ),
        ("rotary", {"beta_fast": 1, "beta_slow": 2}, "beta_fast: 1 is not more than beta_slow: 2"),
        (
            "rotary",
            {"high_freq_factor": 1},
            "high_freq_factor: 1 is not more than low_freq_factor: 1.0",
        ),
        (
            "rotary",
            {"attention_factor": 1.5},
            "attention_factor: 1.5 has no effect with scaling: none; choose yarn or longrope, or",
        ),
        ("rotary", {"interleaved": 1}, "interleaved: 1 is not true or false"),
        ("rotary", {"resonance": "yes"}, "resonance: 'yes' is not true or false"),
        ("rotary", {"fraction": 1.5}, "fraction: 1.5 is more than 1; give the part of the frequ"),
        ("rotary", {"fraction": 0.01}, "fraction: 0.01 of 32 frequencies is none; give at least"),
        (
            "rotary",
            {"long_factor": [1.0] * 32},
            "long_factor: has no effect with scaling: none; choose longrope, or leave it out",
        ),
        (
            "rotary",
            {"scaling": "longrope", "long_factor": [1.0] * 31},
            "long_factor: scaling: longrope needs a list of 32 numbers, one for each feature pair",
        ),
        (
            "rotary",
            {"scaling": "longrope", "long_factor": [0.0] * 32},
            "long_factor: 0.0 is not a positive number",
        ),
        ("rotary", {"base": 1}, "base: 1 is not more than 1; usual values are 10000 and above"),
        ("xpos", {"scale_base": -1}, "pos_emb_args: xpos: scale_base: -1 is not a positive number"),
    ],
)
def test_a_slip_is_named_with_its_cure(name, options, message):
    with pytest.raises(UserError) as fault:
        build(name, SHAPE, **options)
    assert message in str(fault.value)


def test_xpos_needs_an_even_head_dim():
    with pytest.raises(UserError, match="head_dim: is 9 features, not an even number; change"):
        build("xpos", Shape(4, 9, 36, 512))
