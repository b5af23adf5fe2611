"""Scalable softmax against its formula in float64."""

import math

import pytest
import torch
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

from megatron.conformance.subject import scores
from megatron.evaluation.methods import MeasuredAttention
from megatron.positions import Shape, build
from tests.model.test_cache import in_pieces, model
from tests.positions.test_authors import output_of

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)


def test_weights_are_powers_of_the_number_of_visible_keys():
    """The paper's n^(s z) / sum n^(s z) with its bias: exp((s log n + b) z)."""
    ours = build("ssmax", SHAPE, bias=True).double()
    s, b = torch.tensor([[0.2, 0.43, 1.1], [0.5, -0.3, 0.0]], dtype=torch.float64)
    ours.scale.data.copy_(s)
    ours.offset.data.copy_(b)
    q, k, v = torch.randn(3, 2, 3, 20, 8, dtype=torch.float64)
    z, n = q @ k.mT / math.sqrt(8), torch.arange(1, 21)[:, None]
    powers = (n ** (s[..., None, None] * z) * torch.exp(b[..., None, None] * z)).tril()
    expected = powers @ v / powers.sum(-1, keepdim=True)
    out = output_of(scores(ours, q, k), v)
    torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-9)


def test_without_learning_the_factor_is_one_at_the_training_length_and_less_before():
    ours = build("ssmax", SHAPE, scale=None, learned=False)
    assert [*ours.parameters()] == []
    factor = ours.score_scale(torch.arange(1, 257))
    expected = torch.arange(1, 257).log() / math.log(64)
    torch.testing.assert_close(factor, expected.expand(3, -1), rtol=1e-6, atol=1e-7)


@torch.no_grad()
def test_attn_temperature_is_that_of_llama_4_in_a_layer_without_positions():
    options = {"floor_scale": 8, "attn_scale": 0.3}
    config = Llama4TextConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        num_hidden_layers=1,
        no_rope_layers=[0],
        attn_temperature_tuning=True,
        attn_implementation="eager",
        **options,
    )
    layer = Llama4TextAttention(config, 0).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 50, 32, dtype=torch.float64)
    future = torch.full((50, 50), -math.inf, dtype=torch.float64).triu(1)
    theirs, _ = layer(x, None, future[None, None])
    q, k, v = (
        project(x).view(2, 50, 4, 8).transpose(1, 2)
        for project in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    position = build("attn_temperature", Shape(4, 8, 32, 64), **options).double()
    out = output_of(scores(position, q, k), v)
    ours = layer.o_proj(out.transpose(1, 2).reshape(2, 50, 32))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    plain = output_of(scores(build("none", Shape(4, 8, 32, 64)).double(), q, k), v)
    torch.testing.assert_close(out[:, :, :7], plain[:, :, :7], rtol=0, atol=1e-12)
    assert (out - plain)[:, :, 7:].abs().amax((0, 1, 3)).min() > 1e-3


INDEX = torch.arange(141)
DISTANCE = INDEX[:, None] - INDEX
IN_WINDOW = DISTANCE < 20
IN_BLOCKS = INDEX[:, None] // 24 - INDEX // 24 <= 1  # half of seq_length
IN_WINDOW_OR_SINKS = IN_WINDOW | (INDEX < 3)
VISIBLE = {
    "window": ({"window": 20}, IN_WINDOW),
    "blockwise": ({"blockwise": True}, IN_BLOCKS),
    "both": ({"window": 20, "blockwise": True}, IN_WINDOW),
    "sinks": ({"window": 20, "sinks": 3}, IN_WINDOW_OR_SINKS),
    "lm_infinite": ({"method": "lm_infinite,window=20,sinks=3"}, IN_WINDOW_OR_SINKS),
}


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["ssmax", "logn_scale"])
@pytest.mark.parametrize(("settings", "visible"), VISIBLE.values(), ids=VISIBLE)
@torch.no_grad()
def test_n_is_the_number_of_keys_that_a_query_attends_to(settings, visible, name, backend):
    """The output of a layer by a mask in float64, whose rows are counted."""
    is_ssmax = name == "ssmax"
    gpt = model("ssmax" if is_ssmax else "none", "num_layers=1")
    gpt.use_attention(
        MeasuredAttention(attention_backend=backend, logn_scale=not is_ssmax, **settings)
    )
    layer, tensors = gpt.layers[0].attention, []
    layer.query_key_value.register_forward_hook(lambda _, x, fused: tensors.append(fused))
    layer.dense.register_forward_hook(lambda _, x, y: tensors.append(x[0]))
    ids = torch.randint(50, (2, 141))
    logits = gpt(ids)

    fused, out = (tensor.double() for tensor in tensors)
    q, k, v = fused.view(2, 141, 4, 24).transpose(1, 2).split(8, dim=3)
    mask = visible.tril()
    log_n = mask.sum(1).double().log()
    factor = 0.43 * log_n if is_ssmax else (log_n / math.log(48)).clamp(min=1)
    scores = factor[:, None] * (q @ k.mT) / math.sqrt(8)
    attended = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
    torch.testing.assert_close(out, attended.transpose(1, 2).flatten(2), rtol=0, atol=1e-5)
    in_parts = in_pieces(gpt, ids, [1, 30, 1, 50, 59])
    torch.testing.assert_close(in_parts, logits, rtol=0, atol=1e-4)
