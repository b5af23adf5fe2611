"""Families of models as tables: the keys and weights of Hugging Face's classes beside ours.

A table serves both directions: `Family.settings_of` and `weights.read_weights` open a model,
`Family.config_of` and `weights.write_weights` describe one of ours as theirs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.errors import UserError
from megatron.interop.family import Family, Module, Setting
from megatron.interop.forms import ColumnsOfHeads, Heads, Stacked, Transposed

SLIDING, FULL = "sliding_attention", "full_attention"
MOST_LAYERS = 1000


def windows_of_mistral(config: Mapping[str, Any]) -> list[int | None]:
    """Every layer has the window."""
    return [config.get("sliding_window", 4096)]


def layers_of(config: Mapping[str, Any]) -> int:
    """How many layers there are; UserError for a number that no model has."""
    layers = config["num_hidden_layers"]
    if not isinstance(layers, int) or not 1 <= layers <= MOST_LAYERS:
        raise UserError(f"num_hidden_layers: {layers!r} is no number of 1 to {MOST_LAYERS}")
    return layers


def windows_of_qwen(config: Mapping[str, Any]) -> list[int | None]:
    """If use_sliding_window says so, those that layer_types names, or from max_window_layers on."""
    layers = layers_of(config)
    kinds = config.get("layer_types")
    if kinds is None:
        full = min(layers, config.get("max_window_layers", 28))
        kinds = [FULL] * full + [SLIDING] * (layers - full)
    return _windows(config, kinds, 4096)


def windows_of_smollm3(config: Mapping[str, Any]) -> list[int | None]:
    """If use_sliding_window says so, those that layer_types names, or those that do not turn."""
    kinds = config.get("layer_types")
    if kinds is None:
        kinds = [FULL if turns else SLIDING for turns in turning_of_smollm3(config)]
    return _windows(config, kinds, None)


def _windows(
    config: Mapping[str, Any], kinds: Sequence[str], default: int | None
) -> list[int | None]:
    """The window of each layer, from its kind; UserError for a kind that is not known."""
    layers = layers_of(config)
    if len(kinds) != layers or not {SLIDING, FULL} >= {*kinds}:
        raise UserError(f"layer_types: must name {SLIDING} or {FULL} for each of {layers} layers")
    if not config.get("use_sliding_window", False):
        return [None] * layers
    window = config.get("sliding_window", default)
    return [window if kind == SLIDING else None for kind in kinds]


def turning_of_smollm3(config: Mapping[str, Any]) -> list[bool]:
    """Whether each layer turns queries and keys: all but every fourth one, unless it is said."""
    layers = layers_of(config)
    turning = config.get("no_rope_layers")  # 1 for a layer that turns, despite its name
    if turning is None:
        interval = config.get("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(turning) < layers:
        raise UserError(f"no_rope_layers: has {len(turning)} entries for {layers} layers")
    return [bool(one) for one in turning[:layers]]


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
GATED = {"silu": "swiglu", "swish": "swiglu"}
UNTIED = {True: False, False: True}

SIZES = (
    Setting("hidden_size", ("hidden_size",)),
    Setting("num_hidden_layers", ("num_layers",)),
    Setting("num_attention_heads", ("num_attention_heads",)),
    Setting("intermediate_size", ("intermediate_size",)),
    Setting("max_position_embeddings", ("seq_length",)),
    Setting("tie_word_embeddings", ("no_weight_tying",), False, UNTIED),
)
GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    model_type="gpt_neox",
    settings=(
        *SIZES,
        Setting("layer_norm_eps", ("layernorm_epsilon",), 1e-5),
        Setting("hidden_act", ("activation",), "gelu", ACTIVATIONS),
        Setting("use_parallel_residual", ("parallel_residual",), True),
        Setting("attention_bias", ("use_bias_in_attn_linear", "use_bias_in_attn_output"), True),
    ),
    fixed={},
    rotary_share=0.25,
    partial=True,
    trunk="gpt_neox.",
    head=("embed_out", "lm_head"),
    buffers=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    modules=(
        Module("word_embeddings", ("embed_in",)),
        Module("norm", ("final_layer_norm",)),
        *(
            Module(f"layers.{{layer}}.{name}", (f"layers.{{layer}}.{name}",))
            for name in (
                "input_layernorm",
                "post_attention_layernorm",
                "attention.query_key_value",
                "attention.dense",
                "mlp.dense_h_to_4h",
                "mlp.dense_4h_to_h",
            )
        ),
    ),
)
GPT_2 = Family(
    architecture="GPT2LMHeadModel",
    model_type="gpt2",
    settings=(
        Setting("n_embd", ("hidden_size",)),
        Setting("n_layer", ("num_layers",)),
        Setting("n_head", ("num_attention_heads",)),
        Setting("n_positions", ("seq_length",)),
        Setting("n_inner", ("intermediate_size",), None),
        Setting("layer_norm_epsilon", ("layernorm_epsilon",), 1e-5),
        Setting("activation_function", ("activation",), "gelu_new", ACTIVATIONS),
        Setting("tie_word_embeddings", ("no_weight_tying",), True, UNTIED),
    ),
    fixed={},
    only={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
    rotary_share=None,
    trunk="transformer.",
    buffers=(".attn.bias", ".attn.masked_bias"),
    modules=(
        Module("word_embeddings", ("wte",)),
        Module("positions.0", ("wpe",)),
        Module("norm", ("ln_f",)),
        Module("layers.{layer}.input_layernorm", ("h.{layer}.ln_1",)),
        Module("layers.{layer}.post_attention_layernorm", ("h.{layer}.ln_2",)),
        Module(
            "layers.{layer}.attention.query_key_value",
            ("h.{layer}.attn.c_attn",),
            ColumnsOfHeads(),
        ),
        Module("layers.{layer}.attention.dense", ("h.{layer}.attn.c_proj",), Transposed()),
        Module("layers.{layer}.mlp.dense_h_to_4h", ("h.{layer}.mlp.c_fc",), Transposed()),
        Module("layers.{layer}.mlp.dense_4h_to_h", ("h.{layer}.mlp.c_proj",), Transposed()),
    ),
)
OF_LLAMA = (
    *SIZES,
    Setting("rms_norm_eps", ("layernorm_epsilon",), 1e-6),
    Setting("hidden_act", ("activation",), "silu", GATED),
)
BIAS = Setting("attention_bias", ("use_bias_in_attn_linear", "use_bias_in_attn_output"), False)
LLAMA_MODULES = (
    Module("word_embeddings", ("embed_tokens",)),
    Module("norm", ("norm",)),
    Module("layers.{layer}.input_layernorm", ("layers.{layer}.input_layernorm",)),
    Module("layers.{layer}.post_attention_layernorm", ("layers.{layer}.post_attention_layernorm",)),
    Module(
        "layers.{layer}.attention.query_key_value",
        tuple(f"layers.{{layer}}.self_attn.{part}_proj" for part in "qkv"),
        Heads(),
    ),
    Module("layers.{layer}.attention.dense", ("layers.{layer}.self_attn.o_proj",)),
    Module(
        "layers.{layer}.mlp.dense_h_to_4h",
        ("layers.{layer}.mlp.gate_proj", "layers.{layer}.mlp.up_proj"),
        Stacked(2),
    ),
    Module("layers.{layer}.mlp.dense_4h_to_h", ("layers.{layer}.mlp.down_proj",)),
)
QWEN_3_MODULES = (
    *LLAMA_MODULES,
    Module("layers.{layer}.attention.query_norm", ("layers.{layer}.self_attn.q_norm",)),
    Module("layers.{layer}.attention.key_norm", ("layers.{layer}.self_attn.k_norm",)),
)
QWEN_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
OLD_ROTATION = (".rotary_emb.inv_freq",)
LLAMA = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    settings=(
        *OF_LLAMA,
        Setting("num_key_value_heads", ("num_key_value_heads",), None),
        Setting("head_dim", ("head_dim",), None),
        BIAS,
        Setting("mlp_bias", ("use_bias_in_mlp",), False),
    ),
    fixed={"norm": "rmsnorm"},
    trunk="model.",
    buffers=OLD_ROTATION,
    modules=LLAMA_MODULES,
)
WITHOUT_BIAS = {
    "norm": "rmsnorm",
    "use_bias_in_attn_linear": False,
    "use_bias_in_attn_output": False,
    "use_bias_in_mlp": False,
}
MISTRAL = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    settings=(
        *OF_LLAMA,
        Setting("num_key_value_heads", ("num_key_value_heads",), 8),
        Setting("head_dim", ("head_dim",), None),
    ),
    fixed=WITHOUT_BIAS,
    windows=windows_of_mistral,
    window_keys=("sliding_window",),
    trunk="model.",
    buffers=OLD_ROTATION,
    modules=LLAMA_MODULES,
)
QWEN_2 = Family(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    settings=(
        *OF_LLAMA,
        Setting("num_key_value_heads", ("num_key_value_heads",), 32),
        Setting("head_dim", ("head_dim",), None),
    ),
    fixed={**WITHOUT_BIAS, "use_bias_in_attn_linear": True},
    windows=windows_of_qwen,
    window_keys=QWEN_WINDOW,
    trunk="model.",
    buffers=OLD_ROTATION,
    modules=LLAMA_MODULES,
)
QWEN_3 = Family(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    settings=(
        *OF_LLAMA,
        Setting("num_key_value_heads", ("num_key_value_heads",), 32),
        Setting("head_dim", ("head_dim",), 128),
        BIAS,
    ),
    fixed={"norm": "rmsnorm", "qk_norm": True, "use_bias_in_mlp": False},
    windows=windows_of_qwen,
    window_keys=QWEN_WINDOW,
    trunk="model.",
    buffers=OLD_ROTATION,
    modules=QWEN_3_MODULES,
)
SMOLLM_3 = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    settings=(
        *OF_LLAMA,
        Setting("num_key_value_heads", ("num_key_value_heads",), 4),
        Setting("head_dim", ("head_dim",), None),
        BIAS,
        Setting("mlp_bias", ("use_bias_in_mlp",), False),
    ),
    fixed={"norm": "rmsnorm"},
    written={"pad_token_id": None},
    rotary_base=2000000.0,
    windows=windows_of_smollm3,
    window_keys=("use_sliding_window", "sliding_window", "layer_types"),
    turning=turning_of_smollm3,
    turning_keys=("no_rope_layers", "no_rope_layer_interval"),
    trunk="model.",
    modules=LLAMA_MODULES,
)
FAMILIES = {
    family.architecture: family
    for family in (GPT_NEOX, GPT_2, LLAMA, MISTRAL, QWEN_2, QWEN_3, SMOLLM_3)
}
"""Every family by the name of Hugging Face's class."""
