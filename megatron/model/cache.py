"""The state of decoding in pieces: keys, values, and what encodings keep."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

ROOM = 64  # tokens for which there is room beyond those that come first


class Growing:
    """Rows of keys or of values that tokens append to: [batch, heads, keys, features].

    There is room for later tokens behind them, so that one more token does not copy all earlier
    ones. Where autograd records, rows are copied all the same, because it needs them as they were.
    """

    def __init__(self) -> None:
        self.length = 0
        self._room: Tensor | None = None

    def append(self, new: Tensor) -> Tensor:
        """The rows so far with new ones behind them: [batch, heads, keys, features], a view."""
        start, end = self.length, self.length + new.shape[2]
        if torch.is_grad_enabled():
            self._room = new if self._room is None else torch.cat([self.rows, new], dim=2)
        else:
            if self._room is None or end > self._room.shape[2]:
                capacity = end + max(ROOM, start // 2)
                room = new.new_empty(*new.shape[:2], capacity, new.shape[3])
                if start:
                    room[:, :, :start] = self.rows
                self._room = room
            self._room[:, :, start:end] = new
        self.length = end
        return self.rows

    @property
    def rows(self) -> Tensor:
        """All rows so far: [batch, heads, keys, features]."""
        assert self._room is not None
        return self._room[:, :, : self.length]

    def select(self, texts: Tensor) -> None:
        """Keep some texts of the batch, by their indices [texts] int64."""
        if self.length:
            self._room = self.rows.index_select(0, texts)


@dataclass
class LayerCache:
    """Earlier tokens of one layer.

    memory: what its encoding keeps, or a layer without keys, by name; the first dimension is the
    batch
    """

    memory: dict[str, Tensor] = field(default_factory=dict)
    keys: Growing = field(default_factory=Growing)
    values: Growing = field(default_factory=Growing)

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all tokens so far: [batch, key heads, keys, features] each."""
        return self.keys.append(k), self.values.append(v)

    def select(self, texts: Tensor) -> None:
        """Keep some texts of the batch, by their indices [texts] int64."""
        self.keys.select(texts)
        self.values.select(texts)
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
