"""An encoding in the small shape that it is checked in."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.model.gpt import GPT
from megatron.model.settings import Architecture, AttentionSettings
from megatron.positions import Position, Shape, build

VOCAB = 61


def random_ids(length: int, batch: int = 1, seed: int = 2) -> Tensor:
    """Token numbers of a random text: [batch, length] int64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (batch, length), generator=generator)


@dataclass(frozen=True)
class Subject:
    """An encoding with its options, and the small shape that it is checked in."""

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
        """A small model with the encoding: one for all layers, or one for each if it needs that."""
        positions = [self.position(seed) for seed in range(layers)]
        model = Architecture(
            hidden_size=self.heads * self.head_dim,
            num_layers=layers,
            num_attention_heads=self.heads,
            seq_length=self.train_length,
            init_method_std=0.2,  # large, so that attention is far from uniform
            output_layer_init_method="normal",
        )
        torch.manual_seed(0)
        return GPT(
            model,
            AttentionSettings(attention_backend=backend),
            positions=positions if positions[0].per_layer else positions[:1],
            vocab=VOCAB,
        ).eval()
