"""Models with random weights: ours as runs that are exported, transformers' own as folders."""

import json
import shutil
from pathlib import Path

import tokenizers
import torch
import transformers

from megatron.checkpoints.write import write_checkpoint
from megatron.config import load
from megatron.interop.export import export
from megatron.model import GPT, Cache, from_config

VOCAB = 61


def random_ids(length: int, texts: int = 2) -> torch.Tensor:
    return torch.randint(VOCAB, (texts, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def spread(model: torch.nn.Module, scale: float = 1.0) -> None:
    """Move weights far from first values, at which a slip is hidden."""
    for parameter in model.parameters():
        far = 0.3 if parameter.dim() == 1 else 0.12
        parameter.add_(torch.randn(parameter.shape) * far * scale)


# --- Ours ---

TRAINED = 64
SHAPE = [
    "num_layers=2",
    "hidden_size=32",
    "num_attention_heads=4",
    f"seq_length={TRAINED}",
    "max_position_embeddings=320",
    "make_vocab_size_divisible_by=1",
]
BYTES = {"type": "CharLevelTokenizer", "vocab_size": VOCAB, "eod": 0}
BUMP = '''"""A bump near each token, on a slope."""

import torch
from torch import Tensor, nn

from megatron.positions import DistanceBias, Shape, positive, register
from megatron.positions.alibi import (
    alibi_slopes,
)


@register("exported_bump")
class Bump(DistanceBias):
    def __init__(self, shape: Shape, *, width: float = 8.0) -> None:
        super().__init__(shape)
        self.width = positive("width", width)
        self.height = nn.Parameter(torch.rand(shape.heads))
        self.register_buffer("slope", torch.tensor(alibi_slopes(shape.heads)), persistent=False)

    def log_kernel(self, distance: Tensor) -> Tensor:
        bump = self.bounded("height")[:, None] * torch.exp(-distance / self.width)
        return bump - self.slope[:, None] * distance
'''


def a_run(
    folder: Path, *settings: str, tokenizer=BYTES, vocab: int = VOCAB, **record
) -> tuple[Path, GPT]:
    """A run with a checkpoint, and its model."""
    config = load([], [*SHAPE, *settings])
    model = from_config(config, vocab=vocab).eval()
    spread(model)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    facts = {"vocab": vocab, "tokenizer": tokenizer, **record}
    write_checkpoint(folder / "run", 5, weights, config, facts)
    return folder / "run", model


def exported(folder: Path, *settings: str) -> tuple[Path, GPT]:
    """An exported folder, and the model that it was written from."""
    path, model = a_run(folder, *settings)
    export(path, folder / "out")
    return folder / "out", model


@torch.no_grad()
def greedy(model: GPT, ids: torch.Tensor, tokens: int) -> list[int]:
    """The likeliest continuation by our own model, with a cache: [tokens]."""
    cache, chosen = Cache(), []
    for _ in range(tokens):
        ids = model(ids, cache=cache)[:, -1:].argmax(-1)
        chosen.append(int(ids))
    return chosen


# --- Theirs ---

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
DENSE = {"num_experts": 0, "layer_types": ["full_attention"] * 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
YARN = {"beta_fast": 16.0, "truncate": False, "attention_factor": 1.2}
SCALED = {"factor": 4.0, "original_max_position_embeddings": 64}


def rope(kind: str, **more) -> dict:
    return {"rope_parameters": {"rope_type": kind, **more}}


CASES = {
    "pythia": ("GPTNeoX", SIZES),
    "neox one after the other, without bias": (
        "GPTNeoX",
        {**SIZES, "use_parallel_residual": False, "attention_bias": False},
    ),
    "neox tied, gelu_new": (
        "GPTNeoX",
        {**SIZES, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"},
    ),
    "gpt2": ("GPT2", {**GPT_2, "n_inner": 80, "layer_norm_epsilon": 1e-2}),
    "llama": ("Llama", SIZES),
    "llama grouped, biases, tied, linear": (
        "Llama",
        {**GROUPED, **BIASES, "tie_word_embeddings": True, **rope("linear", factor=4.0)},
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
    "qwen3": (
        "Qwen3",
        {**SIZES, "num_key_value_heads": 1, "head_dim": 24, "attention_bias": True},
    ),
    "qwen3 next": (
        "Qwen3Next",
        {**GROUPED, **DENSE, "head_dim": 24, "attention_bias": True},
    ),
    "qwen3.5": ("Qwen3_5", {**GROUPED, **DELTA, "num_hidden_layers": 4, "head_dim": 16}),
    "qwen3.5 tied, biases": (
        "Qwen3_5",
        {
            **{**GROUPED, **DELTA, "linear_num_value_heads": 2, "num_hidden_layers": 3},
            **{"tie_word_embeddings": True, "attention_bias": True, "head_dim": 16},
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
        },
    ),
}
HEAD = {"GPT2": "LMHeadModel"}
CONFIG = {"Qwen3_5": "Qwen3_5TextConfig"}


def of_theirs(case: str) -> transformers.PreTrainedModel:
    """One of their models."""
    name, settings = CASES[case]
    config = getattr(transformers, CONFIG.get(name, f"{name}Config"))(
        **settings, bos_token_id=0, eos_token_id=0, pad_token_id=None
    )
    torch.manual_seed(3)
    model = getattr(transformers, name + HEAD.get(name, "ForCausalLM"))(config)
    # Further away, three layers of the delta rule multiply rounding to 5e-5, in their class too.
    spread(model, 0.7 if name == "Qwen3_5" else 1.0)
    return model.eval()


def edited(source: Path, place: Path, **changes) -> Path:
    """A copy of a folder with other keys in its config.json; None leaves a key out."""
    shutil.copytree(source, place)
    config = json.loads((place / "config.json").read_text()) | changes
    keys = {key: value for key, value in config.items() if changes.get(key, 0) is not None}
    (place / "config.json").write_text(json.dumps(keys))
    return place


def words_tokenizer(place: Path, *words: str) -> Path:
    """A tokenizer.json of whole words."""
    vocab = {word: number for number, word in enumerate(["<|endoftext|>", "Hello", *words])}
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="Hello"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    whole.save(str(place))
    return place
