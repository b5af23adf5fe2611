"""The parts of a GPT, each chosen by a key: sizes, layouts, first values, decoding."""

import math

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron.config import load
from megatron.config.config import Config
from megatron.errors import UserError
from megatron.model import (
    GPT,
    Architecture,
    AttentionSettings,
    Cache,
    from_config,
    positions_from_config,
)
from megatron.model.settings import initialize
from megatron.model.size import forward_flops, parameters
from megatron.positions import REGISTRY
from tests.encodings import every_signature
from tests.support import of_encoding

TINY = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
GROUPED = ["num_key_value_heads=2"]
LLAMA = [*GROUPED, "norm=rmsnorm", "activation=swiglu", "use_bias_in_attn_linear=false"]
GATE = ["layers=gated_attention", "attention_gate=head"]
COMBINATIONS = {
    "grouped": GROUPED,
    "one key head": ["num_key_value_heads=1", "head_dim=12"],
    "llama": [*LLAMA, "use_bias_in_mlp=false"],
    "qwen2": [*LLAMA, "use_bias_in_attn_linear=true", "use_bias_in_attn_output=false"],
    "qwen3": [*LLAMA, "head_dim=16", "qk_norm=true", "intermediate_size=40"],
    "qwen3 next": [*LLAMA, "head_dim=16", "qk_norm=true", "layers=gated_attention"],
    "gates of heads": [*GROUPED, *GATE, "softmax_type=learnable"],
    "no bias": ["use_bias_in_norms=false", "qk_norm=true", "use_bias_in_attn_output=false"],
    "olmo2": [*LLAMA, "norm_placement=post", "qk_norm=full", "head_dim=12"],
    "gemma3": [*LLAMA, "norm_placement=both", "qk_norm=true", "activation=geglu_new"],
    "gpt-j": ["parallel_residual=true", "shared_norm=true", "use_bias_in_output=true"],
    "bloom": ["embedding_norm=true", "clip_qkv=0.5", "query_pre_attn_scalar=5"],
    "olmo": [*LLAMA, "norm=layernorm", "use_weight_in_norms=false", "activation=geglu"],
    "sinks": [*GROUPED, "softmax_type=off-by-one"],
    "latents": ["layers=[mla]", "v_head_dim=20", "q_lora_rank=12", "softmax_type=learnable"],
    "latents beside attention": [*("layers=[attention, mla]", "qk_rope_head_dim=8", *GROUPED)],
    "layer norm of heads": ["qk_norm=true", "parallel_residual=true", "activation=relu"],
}
every_combination = pytest.mark.parametrize("parts", COMBINATIONS.values(), ids=COMBINATIONS)


def configured(*words: str) -> Config:
    return load([], [*TINY, "init_method_std=0.15", *words])


def model(*words: str) -> GPT:
    return from_config(configured(*words), vocab=50).eval()


@every_combination
def test_numbers_and_operations_are_those_of_the_built_model(parts):
    config = configured(*parts, "pos_emb=none", "attention_backend=eager")
    gpt = from_config(config, vocab=50)
    assert parameters(config, 50).whole == sum(parameter.numel() for parameter in gpt.parameters())
    ids = torch.zeros(1, 24, dtype=torch.long)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        gpt(ids)
    # The definition of attention computes masked pairs too, as PaLM counts.
    counted = 24 * forward_flops(Architecture.of(config.model), 50, keys=24)
    assert counter.get_total_flops() == counted


@every_combination
@torch.no_grad()
def test_decoding_in_pieces_is_the_whole_pass(parts):
    ids = torch.randint(50, (2, 81))
    for pos_emb in ("rotary", "mep_free", "cable", "cope"):
        gpt, cache = model(f"pos_emb={pos_emb}", *parts), Cache()
        pieces = [gpt(part, cache=cache) for part in ids.split([1, 5, 64, 11], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), gpt(ids), rtol=0, atol=1e-4)
        cached_keys, attention = cache.layers[0].keys, gpt.layers[0].attention
        assert cached_keys.shape[1] == getattr(attention, "key_heads", 1)  # a latent has one


@every_signature
@torch.no_grad()
def test_every_encoding_takes_grouped_queries_or_refuses_them_when_it_is_read(name):
    encoding = of_encoding(name)
    if REGISTRY[name].grouped_queries:
        assert model(*GROUPED, *encoding)(torch.randint(50, (2, 40))).isfinite().all()
        return
    expected = "num_key_value_heads: 2 is less than num_attention_heads = 4, but"
    with pytest.raises(UserError, match=expected):
        configured(*GROUPED, *encoding)
    config = configured(*encoding)
    architecture = Architecture.of(config.model)
    architecture.num_key_value_heads = 2
    positions, _ = positions_from_config(config)
    with pytest.raises(UserError, match=expected):
        GPT(architecture, AttentionSettings(), positions=positions, vocab=50)


@pytest.mark.parametrize(
    ("words", "matrix", "output"),
    [
        ([], 0.02, 0.02 / math.sqrt(8)),
        (["init_method=small_init"], math.sqrt(2 / 5 / 256), 0.02 / math.sqrt(8)),
        (["init_method=small_init_init"], math.sqrt(2 / 5 / 256), 0.02 / math.sqrt(8)),
        (["output_layer_init_method=wang_init"], 0.02, 2 / 4 / 16),
        (["output_layer_init_method=normal"], 0.02, 0.02),
    ],
)
def test_first_values_have_the_standard_deviation_of_their_method(words, matrix, output):
    shape = ["num_layers=4", "hidden_size=256", "num_attention_heads=4", "seq_length=16"]
    layer = from_config(load([], [*shape, *words]), vocab=8).layers[3]
    wide = layer.mlp.dense_h_to_4h.weight, layer.attention.query_key_value.weight
    for weight in wide:
        assert weight.std().item() == pytest.approx(matrix, rel=0.02)
    for weight in (layer.mlp.dense_4h_to_h.weight, layer.attention.dense.weight):
        assert weight.std().item() == pytest.approx(output, rel=0.02)


def test_first_values_go_by_the_kind_of_a_module_and_not_by_its_name():
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.alpha = nn.Parameter(torch.full((3,), 0.5))
            self.table = nn.Parameter(torch.full((3, 3), 0.5))

    parts = {"scale": Scale(), "squares": nn.RMSNorm(3), "convolution": nn.Linear(64, 64)}
    parts["input_layernorm"] = nn.Linear(3, 3)
    initialize(nn.ModuleDict(parts), Architecture.of(load([], TINY).model))
    assert parts["scale"].alpha.tolist() == [0.5] * 3
    assert parts["scale"].table.tolist() == [[0.5] * 3] * 3
    assert parts["squares"].weight.tolist() == [1.0] * 3
    assert parts["convolution"].weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert parts["input_layernorm"].bias.tolist() == [0.0] * 3


def test_saying_what_follows_anyway_changes_no_hash():
    assert configured("num_key_value_heads=4").hash == configured().hash
    assert configured("use_bias_in_attn_output=true").hash == configured().hash
    assert configured("num_key_value_heads=2").hash != configured().hash
