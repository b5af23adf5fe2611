"""An encoding in a small shape to try it in, and what it does to scores there and far away."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.model.gpt import GPT
from megatron.model.settings import Architecture, AttentionSettings
from megatron.positions import Position, Shape, build

VOCAB = 61
FAR = (16384, 131072)


@dataclass(frozen=True)
class Subject:
    """An encoding with its options, and the small shape that it is tried in."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    heads: int = 4
    head_dim: int = 8
    train_length: int = 64

    def position(self, seed: int = 0) -> Position:
        """The encoding with first values of this seed."""
        torch.manual_seed(seed)
        shape = Shape(self.heads, self.head_dim, self.heads * self.head_dim, self.train_length)
        return build(self.name, shape, **self.options).eval()

    def gpt(self, backend: str = "auto", layers: int = 2) -> GPT:
        """A small model with the encoding, one object for every layer or one for each as it needs."""
        positions = [self.position(seed) for seed in range(layers)]
        model = Architecture(
            hidden_size=self.heads * self.head_dim,
            num_layers=layers,
            num_attention_heads=self.heads,
            seq_length=self.train_length,
            init_method_std=0.2,  # large, so that attention looks somewhere
            output_layer_init_method="normal",
        )
        torch.manual_seed(0)
        return GPT(
            model,
            AttentionSettings(attention_backend=backend),
            positions=positions if positions[0].per_layer else positions[:1],
            vocab=VOCAB,
        ).eval()


def tables(position: Position, length: int) -> dict[str, Tensor]:
    """The tables that an encoding has, by name: each [heads, length]."""
    found = {"bias": position.distance_bias(length), "weight": position.distance_weight(length)}
    return {name: table for name, table in found.items() if table is not None}


def adds_to_embeddings(position: Position) -> bool:
    """Whether the encoding changes what enters the first layer."""
    return bool(position.on_embeddings(torch.zeros(1, 8, position.shape.hidden)).any())


def scores(
    position: Position, q: Tensor, k: Tensor, x: Tensor | None = None, start: int = 0
) -> Tensor:
    """Scaled scores with all that the encoding does to them, the first token at `start`: [heads, length, length].

    q, k [1, heads, length, head_dim]; x [1, length, hidden]: the layer's input, for encodings that look at content
    """
    length = q.shape[2]
    q, k = position.on_queries_keys(q, k, start)
    index = torch.arange(length)
    back = (index[:, None] - index).clamp(min=0)
    found = (q @ k.transpose(-1, -2))[0] / math.sqrt(q.shape[-1])
    table = tables(position, length)
    if "weight" in table:
        found = found * table["weight"][:, back]
    if "bias" in table:
        found = found + table["bias"][:, back]
    if position.has("index_bias"):
        found = found + position.index_bias(start + index, start + index)
    if position.has("on_scores") and x is not None:
        found = position.on_scores(found[None], x, {})[0]
    return found.tril()


def far_effects(position: Position, far: int) -> list[Tensor]:
    """What the encoding does at tokens just before `far`, hook by hook."""
    shape, near = position.shape, 32
    torch.manual_seed(1)
    q, k = torch.randn(2, 1, shape.heads, near, shape.head_dim)
    found = [*tables(position, far).values(), *position.on_queries_keys(q, k, start=far - near)]
    if position.has("index_bias"):
        found.append(position.index_bias(torch.arange(far - 4, far), torch.arange(far)))
    found.append(position.on_embeddings(torch.randn(1, near, shape.hidden), start=far - near))
    return found


def reach(position: Position) -> int:
    """16384, or the training length where an encoding ends before that."""
    try:
        position.on_embeddings(torch.zeros(1, 1, position.shape.hidden), start=FAR[0] - 1)
    except UserError:
        return position.shape.train_length
    return FAR[0]
