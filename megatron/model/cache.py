"""The state of decoding in pieces: keys, values, and what encodings keep."""

from collections.abc import Mapping
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
            self._make_room(new, end)[:, :, start:end] = new
        self.length = end
        return self.rows

    @property
    def rows(self) -> Tensor:
        """All rows so far: [batch, heads, keys, features]."""
        assert self._room is not None
        return self._room[:, :, : self.length]

    def keep(self, first: int, last: int) -> None:
        """Keep the `first` rows and the `last` ones, and forget those between them."""
        self._room = without_middle(self.rows, first, last, dim=2)
        self.length = first + last

    def select(self, texts: Tensor) -> None:
        """Keep some texts of the batch, by their indices [texts] int64."""
        self._room = self.rows.index_select(0, texts)

    def _make_room(self, new: Tensor, end: int) -> Tensor:
        """The tensor with room for rows up to `end`."""
        if self._room is None or end > self._room.shape[2]:
            batch, heads, _, features = new.shape
            capacity = end + max(ROOM, self.length // 2)
            room = new.new_empty(batch, heads, capacity, features)
            if self.length:
                room[:, :, : self.length] = self.rows
            self._room = room
        return self._room


@dataclass
class LayerCache:
    """Earlier tokens of one layer.

    memory: what its encoding keeps, by name; the first dimension is the batch
    sinks: tokens at the beginning of the text that are never forgotten
    forgotten: tokens after these that are not kept any more
    """

    memory: dict[str, Tensor] = field(default_factory=dict)
    sinks: int = 0
    forgotten: int = 0
    keys: Growing = field(default_factory=Growing)
    values: Growing = field(default_factory=Growing)

    @property
    def length(self) -> int:
        """The number of tokens that are kept."""
        return self.keys.length

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those of all kept tokens and the new ones: [batch, key heads, keys, features] each."""
        return self.keys.append(k), self.values.append(v)

    def forget(self, first: int, sinks: int, memory_of_keys: Mapping[str, int]) -> None:
        """Forget the tokens before `first`, but for the first `sinks` of the text.

        memory_of_keys: what in `memory` has an entry for each key, and its dimension for them.
        Nothing is moved until as many can be forgotten as stay, so that a token moves about once.
        """
        self.sinks = sinks
        text = self.length + self.forgotten
        first = min(first, text - 1)  # a running sum goes on from the last token
        last = text - first  # tokens that stay, beside the sinks
        forgotten = first - sinks - self.forgotten
        if forgotten <= 0 or forgotten < last:
            return
        self.keys.keep(sinks, last)
        self.values.keep(sinks, last)
        for name, dim in memory_of_keys.items():
            if name in self.memory:
                self.memory[name] = without_middle(self.memory[name], sinks, last, dim)
        self.forgotten += forgotten

    def indices(self, keys: int, device: torch.device) -> Tensor:
        """The index in the text of each of the first `keys` kept tokens: [keys] int64."""
        index = torch.arange(keys, device=device)
        return index + self.forgotten * (index >= self.sinks)

    def select(self, texts: Tensor) -> None:
        """Keep some texts of the batch, by their indices [texts] int64."""
        self.keys.select(texts)
        self.values.select(texts)
        for name, kept in self.memory.items():
            self.memory[name] = kept.index_select(0, texts)


@dataclass
class Cache:
    """Keys, values and more of the text so far, for decoding in pieces.

    GPT.forward(ids, cache=cache) continues that text.

    length: tokens so far, with those that are forgotten
    rolling: whether layers forget what no later token can see, because of a window or chunks
    """

    length: int = 0
    layers: list[LayerCache] = field(default_factory=list)
    document_ends: Tensor | None = None
    rolling: bool = False

    def select(self, texts: Tensor) -> None:
        """Keep some texts of the batch, by their indices [texts] int64, in this order."""
        for layer in self.layers:
            layer.select(texts)
        if self.document_ends is not None:
            self.document_ends = self.document_ends.index_select(0, texts)


def first_visible(start: int, window: int | None, chunk: int | None, beyond: int = 0) -> int | None:
    """The first key that queries from index `start` on may need; None: they may need all.

    beyond: keys before the first visible one that scores depend on. With chunks it is a multiple
    of them, so that chunks still begin where they did.
    """
    if window is None and chunk is None:
        return None
    first = 0
    if window is not None:
        first = start - window + 1
    if chunk is not None:
        first = max(first, (start // chunk - 1) * chunk)
    first = max(0, first - beyond)
    return first if chunk is None else first // chunk * chunk


def without_middle(x: Tensor, first: int, last: int, dim: int) -> Tensor:
    """The first and the last entries along a dimension, in a tensor of their own."""
    beginning = x.narrow(dim, 0, first)
    end = x.narrow(dim, x.shape[dim] - last, last)
    return torch.cat([beginning, end], dim=dim)
