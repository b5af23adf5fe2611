"""The state of decoding in pieces: keys, values, and what encodings keep."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class LayerCache:
    """Earlier tokens of one layer.

    memory: what its encoding keeps, or a layer without keys, by name; the first dimension is the
    batch
    keys, values: [batch, key heads, tokens so far, features], once there are some
    """

    memory: dict[str, Tensor] = field(default_factory=dict)
    keys: Tensor | None = None
    values: Tensor | None = None

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all tokens so far: [batch, key heads, keys, features] each."""
        if self.keys is not None and self.values is not None:
            k = torch.cat([self.keys, k], dim=2)
            v = torch.cat([self.values, v], dim=2)
        self.keys, self.values = k, v
        return k, v

    def select(self, texts: Tensor) -> None:
        """Keep some texts of the batch, by their indices [texts] int64."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.index_select(0, texts)
            self.values = self.values.index_select(0, texts)
        for name, state in self.memory.items():
            self.memory[name] = state.index_select(0, texts)


@dataclass
class Cache:
    """Keys, values and more of the text so far, for decoding in pieces.

    GPT.forward(ids, cache=cache) continues that text.

    length: tokens so far; embeddings: what an encoding keeps of their ids
    """

    length: int = 0
    embeddings: LayerCache = field(default_factory=LayerCache)
    layers: list[LayerCache] = field(default_factory=list)
    document_ends: Tensor | None = None

    def select(self, texts: Tensor) -> None:
        """Keep some texts of the batch, by their indices [texts] int64, in this order."""
        for layer in (self.embeddings, *self.layers):
            layer.select(texts)
        if self.document_ends is not None:
            self.document_ends = self.document_ends.index_select(0, texts)
