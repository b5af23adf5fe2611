"""mla layers against transformers' DeepSeek-V3 and Kimi Linear, and beside the rest of a model."""

import pytest
import torch
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from megatron.attention.terms import Terms
from megatron.config import load
from megatron.errors import UserError
from megatron.evaluation.methods import MeasuredAttention
from megatron.hybrids import LatentAttention
from megatron.model import (
    GPT,
    Architecture,
    AttentionSettings,
    from_config,
    position_from_config,
)
from megatron.model.block import AttentionInputs, Block
from megatron.model.cache import LayerCache
from megatron.positions import Shape, build
from tests.architectures import architecture
from tests.encodings import every_signature
from tests.model.test_cache import in_pieces
from tests.support import of_encoding

HEADS, HIDDEN = 4, 32
SHAPES = {
    "narrow values": {"q_lora_rank": 20, "kv_lora_rank": 24, "v_head_dim": 12},
    "wide values, no latent of queries": {"kv_lora_rank": 10, "v_head_dim": 36},
    "biases, pairs of halves": {"q_lora_rank": 6, "kv_lora_rank": 64, "v_head_dim": 24},
}
OF_HEAD = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16}
MODEL = ["num_layers=3", "hidden_size=32", "num_attention_heads=4", "seq_length=48"]
MODEL += ["init_method_std=0.15", "layers=[mla, mla, gated_delta]", "v_head_dim=20"]
NAMES = {
    "query": "q_proj",
    "query.down": "q_a_proj",
    "query.norm": "q_a_layernorm",
    "query.up": "q_b_proj",
    "latent_key": "kv_a_proj_with_mqa",
    "latent_norm": "kv_a_layernorm",
    "key_value": "kv_b_proj",
    "dense": "o_proj",
}


def latent(**keys) -> Architecture:
    return architecture(
        intermediate_size=48,
        layers="mla",
        norm="rmsnorm",
        activation="swiglu",
        use_bias_in_mlp=False,
        **OF_HEAD,
        **keys,
    )


def weights_of(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of our layer under the names of theirs."""
    weights = dict(layer.state_dict())
    gate, up = weights.pop("mlp.dense_h_to_4h.weight").chunk(2)
    weights |= {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    weights["mlp.down_proj.weight"] = weights.pop("mlp.dense_4h_to_h.weight")
    renamed = {}
    for name, weight in weights.items():
        part = name.removeprefix("attention.")
        if part != name:
            module, _, ending = part.rpartition(".")
            name = f"self_attn.{NAMES[module]}.{ending}"
        renamed[name] = weight
    return renamed


@pytest.mark.parametrize("case", SHAPES)
def test_a_layer_is_that_of_transformers_deepseek_v3_with_a_dense_mlp(case):
    """Outputs and gradients, without a cache, and decoding in pieces with one."""
    biases, interleaved = case.startswith("biases"), not case.startswith("biases")
    sizes = {"q_lora_rank": None} | SHAPES[case]
    keys = {key: biases for key in ("use_bias_in_attn_linear", "use_bias_in_attn_output")}
    ours = Block(latent(**keys, **sizes), "mla")
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        intermediate_size=48,
        first_k_dense_replace=1,
        num_hidden_layers=1,
        rms_norm_eps=1e-5,
        attention_bias=biases,
        rope_interleave=interleaved,
        **OF_HEAD,
        **sizes,
    )
    config._attn_implementation = "eager"
    theirs = deepseek.DeepseekV3DecoderLayer(config, layer_idx=0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    theirs.load_state_dict(weights_of(ours))
    position = build("rotary", Shape(HEADS, 8, HIDDEN, 64), interleaved=interleaved)

    x = torch.randn(2, 41, HIDDEN, requires_grad=True)
    turns = deepseek.DeepseekV3RotaryEmbedding(config)(x, torch.arange(41)[None])
    hidden = torch.full((41, 41), -torch.inf).triu(1)[None, None]
    expected = theirs(x, attention_mask=hidden, position_embeddings=turns)
    result = ours(x, AttentionInputs(position, Terms()))
    torch.testing.assert_close(result, expected, rtol=0, atol=2e-6)
    upstream = torch.randn_like(expected)
    theirs_of = dict(theirs.named_parameters())
    their_weights = [theirs_of[name] for name in weights_of(ours) if not name.startswith("mlp.")]
    their_gradients = torch.autograd.grad((expected * upstream).sum(), [x, *their_weights])
    our_weights = [
        weight for name, weight in ours.named_parameters() if not name.startswith("mlp.")
    ]
    our_gradients = torch.autograd.grad((result * upstream).sum(), [x, *our_weights])
    scale = max(float(gradient.abs().max()) for gradient in their_gradients)
    for mine, gradient in zip(our_gradients, their_gradients, strict=True):
        torch.testing.assert_close(mine / scale, gradient / scale, rtol=0, atol=2e-6)

    cache, their_cache, start = LayerCache(), DynamicCache(), 0
    with torch.no_grad():
        for piece in x.split([1, 30, 1, 9], dim=1):
            end = start + piece.shape[1]
            there = theirs(
                piece,
                attention_mask=hidden[..., start:end, :end],
                position_embeddings=[part[:, start:end] for part in turns],
                past_key_values=their_cache,
            )
            here = ours(piece, AttentionInputs(position, Terms(), start=start, cache=cache))
            torch.testing.assert_close(here, there, rtol=0, atol=2e-6)
            torch.testing.assert_close(here, expected[:, start:end], rtol=0, atol=4e-6)
            start = end
    # The cache holds what theirs holds, and no key or value of a head.
    assert cache.keys.rows.shape == (2, 1, 41, 8)
    torch.testing.assert_close(cache.values.rows, their_cache.layers[0].keys, rtol=0, atol=2e-6)


@torch.no_grad()
def test_a_layer_without_positions_is_the_attention_of_transformers_kimi_linear():
    name = "transformers.models.kimi_linear"
    pytest.importorskip(name, reason="this release of transformers has no Kimi Linear")
    from transformers.models.kimi_linear import configuration_kimi_linear, modeling_kimi_linear

    sizes = SHAPES["narrow values"]
    ours = LatentAttention(latent(use_bias_in_attn_linear=False, **sizes))
    theirs = modeling_kimi_linear.KimiLinearAttention(
        configuration_kimi_linear.KimiLinearConfig(
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            num_hidden_layers=1,
            attn_implementation="eager",
            **OF_HEAD,
            **sizes,
        ),
        layer_idx=0,
    )
    weights = {}
    for weight_name, weight in ours.state_dict().items():
        module, _, ending = weight_name.rpartition(".")
        weights[f"{NAMES[module]}.{ending}"] = weight
    theirs.load_state_dict(weights)
    x = torch.randn(2, 41, HIDDEN)
    hidden = torch.full((41, 41), -torch.inf).triu(1)[None, None]
    position = build("none", Shape(HEADS, 8, HIDDEN, 64))
    result = ours(x, AttentionInputs(position, Terms()))
    torch.testing.assert_close(result, theirs(x, hidden)[0], rtol=0, atol=2e-6)


def model(*words: str) -> GPT:
    return from_config(load([], [*MODEL, *words]), vocab=50).eval()


@every_signature
@torch.no_grad()
def test_every_encoding_decodes_in_pieces_as_in_one_pass_or_is_refused(name):
    ids = torch.randint(50, (2, 81))
    words = [*of_encoding(name), "max_position_embeddings=96"]
    position = position_from_config(load([], [*MODEL[:4], *words]))
    keys_of_heads = not position.grouped_queries or position.score_width != 1
    if keys_of_heads or position.heads_per_query != 1:
        with pytest.raises(UserError, match="layers: mla cannot have"):
            model(*words)
        return
    gpt = model(*words)
    expected = gpt(ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(in_pieces(gpt, ids, [1, 64, 5, 1, 10]), expected, rtol=0, atol=1e-4)


@torch.no_grad()
def test_documents_windows_and_sinks_act_as_on_each_document_alone():
    ids = torch.randint(1, 50, (1, 60))
    ids[0, [20, 41]] = 0
    words = ["layers=[mla]", "window=15", "softmax_type=learnable"]
    for encoding in ("rotary", "kerple_log", "fox"):
        config = load([], [*MODEL, *words, f"pos_emb={encoding}", "reset_attention_mask=true"])
        gpt = from_config(config, vocab=50, end_of_document=0).eval()
        for layer in gpt.layers:
            layer.attention.softmax_offset.uniform_(1, 2)
        together = gpt(ids)
        gpt.use_attention(AttentionSettings.of(config.attention).of_one_document())
        alone = torch.cat([gpt(part) for part in ids.split([21, 21, 18], dim=1)], dim=1)
        torch.testing.assert_close(together, alone, rtol=0, atol=2e-5)
        assert (gpt(ids) - together).abs().max() > 1e-2


@torch.no_grad()
def test_methods_move_the_part_of_the_heads_that_the_encoding_acts_on():
    """rerope by its definition: rotations of at most 11 tokens, in float64."""
    gpt = model("layers=[mla]", "num_layers=1", "pos_emb=rotary").double()
    x, captured = torch.randn(1, 30, HIDDEN).double(), []
    layer = gpt.layers[0].attention
    gpt.layers[0].register_forward_pre_hook(lambda _, arguments: captured.append(arguments[1]))
    gpt.use_attention(MeasuredAttention(method="rerope,window=11"))
    gpt(torch.zeros(1, 30, dtype=torch.long))
    result = layer(x, captured[0])

    rank, turned, plain, values = 32, 4, 8, 20
    q = layer.query(x).view(30, HEADS, plain + turned).transpose(0, 1)
    latent, key = layer.latent_key(x)[0].split([rank, turned], dim=1)
    latent = latent * (latent.square().mean(1, keepdim=True) + 1e-6).rsqrt()
    k, v = layer.key_value(latent).view(30, HEADS, -1).transpose(0, 1).split([plain, values], 2)
    distance = (torch.arange(30)[:, None] - torch.arange(30)).clamp(max=11).double()
    scores = q[..., :plain] @ k.mT
    for pair, frequency in ((0, 1.0), (1, 0.01)):
        cos, sin = (distance * frequency).cos(), (distance * frequency).sin()
        first, second = q[..., plain + pair, None], q[..., plain + pair + 2, None]
        scores += (first * cos - second * sin) * key[:, pair]
        scores += (second * cos + first * sin) * key[:, pair + 2]
    scores = (scores / 12**0.5).masked_fill(distance < 0, -torch.inf)
    expected = layer.dense((scores.softmax(-1) @ v).transpose(0, 1).flatten(1))
    torch.testing.assert_close(result[0], expected, rtol=0, atol=1e-9)
