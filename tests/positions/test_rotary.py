"""Rotary positions against Hugging Face's rotation, near and far."""

import pytest
import torch
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXRotaryEmbedding,
    apply_rotary_pos_emb,
)

from megatron.positions import build
from tests.positions.formulas import SHAPE


@pytest.mark.parametrize("share", [1.0, 0.25])
# float32 angles are 1e-3 apart at 16384
@pytest.mark.parametrize(("start", "tolerance"), [(0, 2e-4), (16000, 5e-3)])
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
    # float32 angles near 16384
    torch.testing.assert_close(turned[:32].double(), expected, rtol=0, atol=3e-3)
