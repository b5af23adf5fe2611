"""Rotary's scalings against Hugging Face and the papers, xPos against torchscale in float64."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as apply_neox
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


def test_scaled_frequencies_are_those_of_hugging_face():
    for scaling in HUGGING_FACE:
        for factor in (1.0, 2.0, 32.0):
            for base, share in ((10000.0, 1.0), (10000.0, 0.25), (500000.0, 1.0)):
                options = {"factor": factor, "base": base, "rotary_pct": share}
                ours = build("rotary", SHAPE, scaling=scaling, **options)
                frequencies, amplitude = hugging_face(scaling, factor, base, share)
                torch.testing.assert_close(ours.inv_freq, frequencies, rtol=3e-6, atol=0)
                assert ours.inv_freq.dtype == torch.float32
                assert ours.amplitude == pytest.approx(amplitude, rel=1e-12)


def test_llama3_and_an_untruncated_yarn_are_those_of_hugging_face():
    llama3 = {"high_freq_factor": 8.0, "low_freq_factor": 2.0}
    yarn = {"attention_factor": 1.3, "truncate": False}
    for name, options in (("llama3", llama3), ("yarn", yarn)):
        rope = {"rope_type": name, "rope_theta": 10000.0, "factor": 8.0, **options}
        rope["original_max_position_embeddings"] = 256
        config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=rope)
        expected, amplitude = ROPE_INIT_FUNCTIONS[name](config, None)
        ours = build("rotary", SHAPE, scaling=name, factor=8.0, original_length=256, **options)
        torch.testing.assert_close(ours.inv_freq, expected, rtol=3e-6, atol=0)
        assert ours.amplitude == amplitude


LONGROPE = {
    "factor": 4.0,
    "original_length": 512,
    "long_factor": [1.0 + pair / 8 for pair in range(32)],
    "short_factor": [1.0 + pair / 64 for pair in range(32)],
}


@pytest.mark.parametrize(("length", "attention_factor"), [(512, None), (513, 1.3)])
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


def test_xpos_needs_an_even_head_dim():
    with pytest.raises(UserError, match="head_dim: is 9 features, not an even number; change"):
        build("xpos", Shape(4, 9, 36, 512))


OF_12 = Shape(heads=12, head_dim=64, hidden=768, train_length=512)


# float32 angles are 1e-3 apart at 16384
@pytest.mark.parametrize(("share", "start", "tolerance"), [(0.25, 0, 2e-4), (1.0, 16000, 5e-3)])
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
    expected = apply_neox(q, k, cos, sin)
    found = build("rotary", OF_12, rotary_pct=share).on_queries_keys(q, k, start=start)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def test_rotary_angles_keep_single_positions_apart_in_bfloat16():
    position = 16383
    rotary = build("rotary", OF_12).bfloat16()
    ones = torch.ones(1, 12, 1, 64)
    turned = rotary.on_queries_keys(ones, ones, start=position)[0][0, 0, 0]
    frequency = 10000.0 ** -(torch.arange(32, dtype=torch.float64) / 32)
    expected = torch.cos(position * frequency) - torch.sin(position * frequency)
    # float32 angles near 16384
    torch.testing.assert_close(turned[:32].double(), expected, rtol=0, atol=3e-3)
