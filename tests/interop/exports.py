"""Runs with random weights that tests export, and what exported folders are held against."""

import json

import torch

from megatron.checkpoints.write import write_checkpoint
from megatron.config import load
from megatron.interop.export import export
from megatron.model import Cache, from_config
from megatron.positions import FILES, REGISTRY
from tests.support import NEEDED

VOCAB = 61
TRAINED = 64
SHAPE = [
    "num_layers=2",
    "hidden_size=32",
    "num_attention_heads=4",
    f"seq_length={TRAINED}",
    "max_position_embeddings=320",
    "make_vocab_size_divisible_by=1",
]
# No class of transformers has these together, so every encoding takes our own.
OWN = ["norm=rmsnorm", "num_key_value_heads=2", "use_bias_in_mlp=false"]
BYTES = {"type": "CharLevelTokenizer", "vocab_size": VOCAB, "eod": 0}
BUMP = '''"""A bump near each token, on a slope."""

import torch
from torch import Tensor, nn

from megatron.positions import DistanceBias, Shape, positive, register
from megatron.positions.alibi import (
    slopes,
)


@register("exported_bump")
class Bump(DistanceBias):
    def __init__(self, shape: Shape, *, width: float = 8.0) -> None:
        super().__init__(shape)
        self.width = positive("width", width)
        self.height = nn.Parameter(torch.rand(shape.heads))
        self.register_buffer("slope", torch.tensor(slopes(shape.heads)), persistent=False)

    def log_kernel(self, distance: Tensor) -> Tensor:
        bump = self.bounded("height")[:, None] * torch.exp(-distance / self.width)
        return bump - self.slope[:, None] * distance
'''


def arguments(name):
    return f"pos_emb_args={json.dumps(NEEDED.get(name, {}))}"


def forget(name):
    """Let a user's encoding be unknown, as in a new process."""
    FILES.clear()
    del REGISTRY[name]


def a_run(folder, *settings, tokenizer=BYTES, vocab=VOCAB, **record):
    """A run with a checkpoint whose numbers are far from their first values, and its model."""
    config = load([], [*SHAPE, *settings])
    model = from_config(config, vocab=vocab).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * (0.3 if parameter.dim() == 1 else 0.12))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    facts = {"vocab": vocab, "tokenizer": tokenizer, **record}
    write_checkpoint(folder / "run", 5, weights, config, facts)
    return folder / "run", model


def exported(folder, *settings):
    """An exported folder, and the model that it was written from."""
    path, model = a_run(folder, *settings)
    export(path, folder / "out")
    return folder / "out", model


def random_ids(length, texts=1):
    return torch.randint(VOCAB, (texts, length), generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def greedy(model, ids, tokens):
    """The likeliest continuation by our own model, with a cache: [tokens]."""
    cache, found = Cache(), []
    for _ in range(tokens):
        ids = model(ids, cache=cache)[:, -1:].argmax(-1)
        found.append(int(ids))
    return found
