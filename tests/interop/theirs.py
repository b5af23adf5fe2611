"""Small models of transformers' own classes, and folders that hold them."""

import json
import shutil
from pathlib import Path

import tokenizers
import torch
import transformers

VOCAB = 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 320,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GPT_2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 320}
BIASES = {"attention_bias": True, "mlp_bias": True}
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
YARN = {"beta_fast": 16.0, "truncate": False, "attention_factor": 1.2}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 64}


def rope(kind: str, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, **more}}


CASES = {
    "pythia": ("GPTNeoX", SIZES),
    "neox one after the other": ("GPTNeoX", {**SIZES, "use_parallel_residual": False}),
    "neox tied, gelu_new": (
        "GPTNeoX",
        {**SIZES, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "neox without bias": ("GPTNeoX", {**SIZES, "attention_bias": False, "layer_norm_eps": 1e-2}),
    "gpt2": ("GPT2", GPT_2),
    "gpt2 wide": ("GPT2", {**GPT_2, "n_inner": 80, "layer_norm_epsilon": 1e-2}),
    "llama": ("Llama", SIZES),
    "llama grouped, biases": ("Llama", {**GROUPED, **BIASES}),
    "llama tied, linear": (
        "Llama",
        {**GROUPED, "tie_word_embeddings": True, **rope("linear", factor=4.0)},
    ),
    "llama3": ("Llama", {**GROUPED, **rope("llama3", **SCALED, **LLAMA_3)}),
    "llama yarn": ("Llama", {**GROUPED, **rope("yarn", **SCALED)}),
    "llama yarn, more": ("Llama", {**SIZES, **rope("yarn", **SCALED, **YARN)}),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 23, "rms_norm_eps": 1e-2}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen2 window": (
        "Qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 23, "max_window_layers": 0},
    ),
    "qwen2 windows": (
        "Qwen2",
        {
            **GROUPED,
            **{"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 23},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "smollm3": (
        "SmolLM3",
        {**GROUPED, "num_hidden_layers": 8, **rope("default", rope_theta=500.0)},
    ),
    "smollm3 windows": (
        "SmolLM3",
        {
            **{**GROUPED, **BIASES, "num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]},
            **{"use_sliding_window": True, "sliding_window": 23, "tie_word_embeddings": False},
        },
    ),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 16, "attention_bias": True}),
    "qwen3 one key head": ("Qwen3", {**SIZES, "num_key_value_heads": 1, "head_dim": 24}),
}
SAME_OTHERWISE = ("n_inner", "hidden_act", "rope_parameters", "pretraining_tp", "max_window_layers")
"""Keys that may be spelled in more than one way; `settings_of` must read them alike."""
HEAD = {"GPT2": "LMHeadModel"}


def of_theirs(case: str) -> transformers.PreTrainedModel:
    """One of their models with random weights, far from values at which a slip is hidden."""
    name, settings = CASES[case]
    config = getattr(transformers, f"{name}Config")(
        **settings, bos_token_id=0, eos_token_id=0, pad_token_id=None
    )
    torch.manual_seed(3)
    model = getattr(transformers, name + HEAD.get(name, "ForCausalLM"))(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * (0.3 if parameter.dim() == 1 else 0.12))
    return model.eval()


def random_ids(length: int) -> torch.Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(length))


def edited(source: Path, place: Path, **changes) -> Path:
    """A copy of a folder with other keys in its config.json; None leaves a key out."""
    shutil.copytree(source, place)
    config = json.loads((place / "config.json").read_text())
    for key, value in changes.items():
        config.pop(key, None)
        if value is not None:
            config[key] = value
    (place / "config.json").write_text(json.dumps(config))
    return place


def words_tokenizer(place: Path, *words: str) -> Path:
    """A tokenizer.json of whole words."""
    vocab = {word: number for number, word in enumerate(["<|endoftext|>", "Hello", *words])}
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="Hello"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    place.parent.mkdir(parents=True, exist_ok=True)
    whole.save(str(place))
    return place
