"""Models with random weights: ours as runs that are exported, transformers' own as folders."""

import json
import shutil
from functools import partial
from pathlib import Path
from unittest import mock

import tokenizers
import torch
import transformers
import yaml

from megatron.checkpoints.write import write_checkpoint
from megatron.config import load
from megatron.interop import export as exporting
from megatron.model import GPT, Cache, from_config

VOCAB = 61
CASES = yaml.safe_load(Path(__file__).with_name("cases.yml").read_text(encoding="utf-8"))
MODELS: dict[str, dict] = CASES["models"]


def words(settings: dict) -> list[str]:
    """Keys of ours as `key=value`."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


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
    with mock.patch.object(exporting, "compare", return_value={}):  # the test compares it
        exporting.export(path, folder / "out")
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

HEAD = {"GPT2": "LMHeadModel"}
CONFIG = {"Qwen3_5": "Qwen3_5TextConfig", "Gemma3": "Gemma3TextConfig"}


def of_theirs(case: str) -> transformers.PreTrainedModel:
    """One of their models."""
    settings = dict(MODELS[case])
    name = settings.pop("class")
    config = getattr(transformers, CONFIG.get(name, f"{name}Config"))(
        **settings, bos_token_id=0, eos_token_id=0, pad_token_id=None
    )
    torch.manual_seed(3)
    model = getattr(transformers, name + HEAD.get(name, "ForCausalLM"))(config)
    if name == "Mpt":  # its class does not give it to the function that computes the bias
        build, bias_max = (
            model.transformer.build_mpt_alibi_tensor,
            config.attn_config.alibi_bias_max,
        )
        model.transformer.build_mpt_alibi_tensor = partial(build, alibi_bias_max=bias_max)
    # Further away, three layers of the delta rule multiply rounding to 5e-5, in their class too.
    spread(model, 0.7 if name == "Qwen3_5" else 1.0)
    if name == "OPT":  # two rows that no text reads, and no file of ours keeps
        model.model.decoder.embed_positions.weight.data[:2] = 0
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
