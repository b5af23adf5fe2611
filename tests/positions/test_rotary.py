"""Rotary and its scalings against Hugging Face, xPos against torchscale in float64."""

import math
import re

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXRotaryEmbedding,
    apply_rotary_pos_emb,
)

from megatron.attention import attention
from megatron.errors import UserError
from megatron.positions import Shape, build, load_file
from megatron.positions.rotary import spelled_out

SHAPE = Shape(heads=4, head_dim=64, hidden=256, train_length=512)
LONGROPE = {
    "factor": 4.0,
    "long_factor": [1.0 + pair / 8 for pair in range(32)],
    "short_factor": [1.0 + pair / 64 for pair in range(32)],
}
SCALINGS = [
    ("linear", {"factor": 32.0}),
    ("yarn", {"factor": 2.0}),
    ("yarn", {"factor": 32.0, "attention_factor": 1.3, "truncate": False}),
    ("llama3", {"factor": 8.0, "high_freq_factor": 8.0, "low_freq_factor": 2.0}),
    ("longrope", LONGROPE),
    ("longrope", {**LONGROPE, "attention_factor": 1.3}),
]


def hugging_face(scaling: str, length: int, base: float, part: float, **options):
    """Frequencies, and the factor on cos and sin, for a text of so many tokens."""
    rope = {"rope_type": scaling, "rope_theta": base, "partial_rotary_factor": part, **options}
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=512, rope_parameters=rope
    )
    return ROPE_INIT_FUNCTIONS[scaling](config, None, seq_len=length)


def test_scaled_frequencies_are_those_of_hugging_face():
    for scaling, options in SCALINGS:
        for base, part in ((10000.0, 1.0), (500000.0, 0.25)):
            if scaling == "longrope" and part != 1:
                continue
            for length in (512, 513):  # longrope has others from there on
                theirs = {**options, "original_max_position_embeddings": 512}
                expected, amplitude = hugging_face(scaling, length, base, part, **theirs)
                ours = build("rotary", SHAPE, base=base, rotary_pct=part)
                ours.use_scaling({"name": scaling, **options})
                ours.prepare(length)
                frequencies = ours.short_inv_freq if ours.is_short else ours.inv_freq
                torch.testing.assert_close(frequencies, expected, rtol=3e-6, atol=0)
                assert ours.amplitude == pytest.approx(amplitude, rel=1e-12)
    # Their `dynamic` is our ntk with factor = length / original length.
    expected, _ = hugging_face("dynamic", 1024, 10000.0, 1.0, factor=1.0)
    ours = build("rotary", SHAPE)
    ours.use_scaling({"name": "ntk", "factor": 2.0})
    torch.testing.assert_close(ours.inv_freq, expected, rtol=3e-6, atol=0)


# float32 angles are 1e-3 apart at 16384
@pytest.mark.parametrize(("part", "start", "tolerance"), [(0.25, 0, 2e-4), (1.0, 16000, 5e-3)])
def test_rotary_turns_as_hugging_face_does(part, start, tolerance):
    rope = {"rope_theta": 10000.0, "partial_rotary_factor": part, "rope_type": "default"}
    config = GPTNeoXConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=32768,
        rope_parameters=rope,
        rotary_pct=part,
    )
    q, k = torch.randn(2, 2, 4, 300, 64)
    cos, sin = GPTNeoXRotaryEmbedding(config)(q, torch.arange(start, start + 300)[None])
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    turned = build("rotary", SHAPE, rotary_pct=part).on_queries_keys(q, k, start=start)
    for ours, theirs in zip(turned, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)


def test_a_relative_is_rotary_with_its_scaling_and_two_act_together():
    for name in ("pi", "ntk", "by_parts", "yarn", "llama3"):
        relative = build(name, SHAPE, factor=4, original_length=256)
        scaling = "linear" if name == "pi" else name
        rotary = build("rotary", SHAPE, scaling=scaling, factor=4, original_length=256)
        assert torch.equal(relative.inv_freq, rotary.inv_freq), name
        assert relative.amplitude == rotary.amplitude
    both = build("p_rope", SHAPE, scaling="linear", factor=4, fraction=0.5)
    fast = 1 / (4 * 10000.0 ** (torch.arange(16) / 32))
    torch.testing.assert_close(both.inv_freq, torch.cat([fast, torch.zeros(16)]))
    # From j = 16 on, 10000^(j/32) > 512 / 2π: those pairs turn less than once within 512 tokens.
    yarn = build("rotary", SHAPE, scaling="yarn", factor=4)
    faded = build("clipped_rope", SHAPE, scaling="yarn", factor=4)
    half_cosine = (1 + (torch.arange(16, dtype=torch.float64) * math.pi / 15).cos()) / 2
    factors = torch.cat([torch.ones(16), half_cosine]).float()
    torch.testing.assert_close(faded.inv_freq, yarn.inv_freq * factors, rtol=1e-6, atol=1e-25)


def test_longrope_refuses_keys_that_were_cached_with_other_frequencies():
    options = {"scaling": "longrope", **LONGROPE}
    for ours in (
        build("rotary", SHAPE, **options),
        build("sum", SHAPE, parts=[{"rotary": options}]),
    ):
        for before in (1, 511, 600):
            ours.check_cached(before, before + 1)
        with pytest.raises(UserError, match="other frequencies beyond 512 tokens, so cached keys"):
            ours.check_cached(512, 513)


def torchscale(x: Tensor, start: int, *, downscale: bool) -> Tensor:
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


def halves(x: Tensor) -> Tensor:
    """Neighbouring pairs (0, 1), (2, 3), … to our layout (j, j + half)."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


# float32 angles times 1 / scale = 20
@pytest.mark.parametrize(("start", "tolerance"), [(0, 1e-4), (1000, 5e-3)])
def test_xpos_is_torchscales_up_to_the_order_of_features(start, tolerance):
    q, k = torch.randn(2, 1, 4, 512, 64)
    ours = build("xpos", SHAPE).on_queries_keys(halves(q), halves(k), start=start)
    for turned, x, downscale in zip(ours, (q, k), (False, True), strict=True):
        expected = halves(torchscale(x, start, downscale=downscale))
        torch.testing.assert_close(turned.double(), expected, rtol=tolerance, atol=tolerance)


def test_xpos_says_where_it_would_overflow():
    x = torch.ones(1, 4, 1, 64)
    for dtype, fine, beyond in ((torch.float32, 34000, 65535), (torch.float16, 3000, 4095)):
        xpos, features = build("xpos", SHAPE), x.to(dtype)
        assert torch.cat(xpos.on_queries_keys(features, features, start=fine)).isfinite().all()
        with pytest.raises(UserError, match=r"xpos overflows float\d\d beyond 3\d+ tokens"):
            xpos.on_queries_keys(features, features, start=beyond)


def test_xpos_with_one_decay_is_the_score_of_rotary_times_xi_to_the_distance():
    """(R_m q xi^m)·(R_n k xi^-n) = q·R_(n-m) k xi^(m-n): kexue.fm/archives/9431."""
    q, k, v = torch.randn(3, 1, 4, 300, 64)
    xpos = build("xpos", SHAPE, xi=0.99)
    index = torch.arange(300, dtype=torch.float64)
    turned_q, turned_k = build("rotary", SHAPE).on_queries_keys(q, k)
    distance = (index[:, None] - index).clamp(min=0)
    scores = (turned_q @ turned_k.mT / 8).double() * 0.99**distance
    weights = scores.masked_fill(index[:, None] < index, -math.inf).softmax(-1)
    weight = xpos.distance_weight(300)
    out = attention(*xpos.on_queries_keys(q, k), v, weight=weight, backend="eager")
    torch.testing.assert_close(out.double(), weights @ v.double(), rtol=0, atol=2e-5)


def test_listed_frequencies_turn_as_the_definition_does():
    frequencies = [1.5, 0.25, 0.0]
    encoding = build("rotary", Shape(2, 8, 16, 16), rotary_pct=0.75, frequencies=frequencies)
    q, k = torch.randn(2, 1, 2, 5, 8, dtype=torch.float64)
    turned, _ = encoding.on_queries_keys(q.float(), k.float(), 3)
    expected = q.clone()
    for place in range(5):
        for pair, frequency in enumerate(frequencies):
            angle = (3 + place) * frequency
            x, y = q[..., place, pair], q[..., place, pair + 3]
            expected[..., place, pair] = x * math.cos(angle) - y * math.sin(angle)
            expected[..., place, pair + 3] = y * math.cos(angle) + x * math.sin(angle)
    torch.testing.assert_close(turned.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequencies": [1.0, 0.1]}, "frequencies: 2 numbers are given; give 4 numbers, one for"),
        ({"frequencies": [1, 0.1, -1, 0]}, "frequencies: -1 is not a positive number"),
        ({"frequencies": 0.1}, "frequencies: 0.1 is not a list; write frequencies: 4 numbers"),
        (
            {"frequencies": [1, 0.1, 0.01, 0], "scaling": "ntk", "factor": 2},
            "frequencies: they have no base that could change",
        ),
    ],
)
def test_frequencies_that_do_not_fit_are_refused(options, message):
    with pytest.raises(UserError, match=re.escape(message)):
        build("rotary", Shape(2, 8, 16, 16), **options)


def test_a_users_subclass_is_not_spelled_as_rotary(own_registry, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from megatron.positions import register\n"
        "from megatron.positions.rotary import Rotary\n\n"
        "@register('half_as_fast')\n"
        "class HalfAsFast(Rotary):\n"
        "    def __init__(self, shape):\n"
        "        super().__init__(shape)\n"
        "        self.frequencies = self.frequencies / 2\n"
    )
    load_file(path)
    assert spelled_out("half_as_fast", {}) == ("half_as_fast", {})
    name, options = spelled_out("yarn", {"factor": 4.0})
    assert (name, options["scaling"]) == ("rotary", "yarn")
