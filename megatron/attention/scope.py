"""The geometry of attention in blocks: which keys a block of queries attends to, and table views.

With a block's queries in reverse order, bias[h, i - j] is a view of the reversed table: each row
starts one element later (a Hankel matrix, strides (·, 1, 1)). So no bias is copied.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.terms import Terms

BLOCK, BACKWARD_BLOCK = 256, 128  # queries


@dataclass(frozen=True)
class Scope:
    """Lengths, and which keys a query may attend to: see megatron.attention.attention."""

    queries: int
    keys: int
    window: int | None = None

    @classmethod
    def of(cls, q: Tensor, k: Tensor, terms: Terms) -> "Scope":
        return cls(q.shape[2], k.shape[2], terms.window)

    def blocks(self, size: int) -> Iterator["QueryBlock"]:
        """Blocks of at most `size` queries."""
        before = self.keys - self.queries
        for start in range(0, self.queries, size):
            end = min(start + size, self.queries)
            first_key = 0
            if self.window is not None:
                first_key = max(0, before + start - self.window + 1)
            yield QueryBlock(start, end, first_key, before + end, self.queries - end + first_key)

    def reversed_tables(self, terms: Terms, k: Tensor) -> tuple[Tensor, Tensor | None]:
        """Bias and weight as `QueryBlock.view` reads them, in float32 or wider.

        [heads, >= keys] -> [heads, keys + BLOCK - 1], from the farthest distance on. Without a
        bias, zeros that all heads share: [1, …].
        """
        wide = torch.promote_types(k.dtype, torch.float32)
        window = self.keys if self.window is None else min(self.window, self.keys)
        bias = terms.bias
        if bias is None:
            bias = torch.zeros(1, self.keys, device=k.device)
        tables = []
        # Values at distances beyond the window, and of keys after the query.
        for table, outside in ((bias, -math.inf), (terms.weight, 0.0)):
            if table is not None:
                farthest_first = table[:, :window].to(wide).flip(1)
                room = (self.keys - window, BLOCK - 1)
                table = F.pad(farthest_first, room, value=outside)
            tables.append(table)
        return tables[0], tables[1]

    def restored(self, reversed: Tensor | None, table: Tensor | None) -> Tensor | None:
        """The adjoint of `reversed_tables`: values of the same shape and dtype as `table`."""
        if reversed is None or table is None:
            return None
        nearest_first = reversed[:, : self.keys].flip(1)
        longer = table.shape[1] - self.keys
        return F.pad(nearest_first, (0, longer)).to(table.dtype)


@dataclass(frozen=True)
class QueryBlock:
    """Queries start … end - 1 and the keys that some of them attend to, first_key … end_key - 1.

    offset: where the block's view of the reversed table begins
    """

    start: int
    end: int
    first_key: int
    end_key: int
    offset: int

    @property
    def rows(self) -> int:
        """How many queries."""
        return self.end - self.start

    @property
    def columns(self) -> int:
        """How many keys."""
        return self.end_key - self.first_key

    @property
    def queries(self) -> slice:
        """The block's queries in a tensor of all queries."""
        return slice(self.start, self.end)

    @property
    def keys(self) -> slice:
        """The block's keys in a tensor of all keys."""
        return slice(self.first_key, self.end_key)

    def from_key(self, first_key: int) -> "QueryBlock":
        """The same queries, without the keys before `first_key`."""
        skipped = max(0, first_key - self.first_key)
        return replace(self, first_key=self.first_key + skipped, offset=self.offset + skipped)

    def view(self, table: Tensor) -> Tensor:
        """A view of a reversed table, the last query first: [heads, rows, columns]."""
        shape = (table.shape[0], self.rows, self.columns)
        strides = (table.stride(0), 1, 1)
        return table.as_strided(shape, strides, table.storage_offset() + self.offset)

    def add_diagonals(self, table: Tensor, padded: Tensor) -> None:
        """The adjoint of `view`: add scores to a reversed table.

        padded [heads, batch, rows, columns + rows]: the scores; what follows them is overwritten
        """
        heads, batch, rows, width = padded.shape
        padded[..., width - rows :] = 0
        # Read with rows one shorter than written, each row moves by one: diagonals become columns.
        distances = width - 1
        flat = padded.flatten(2)[:, :, : rows * distances]
        moved = flat.view(heads, batch, rows, distances)
        table[:, self.offset : self.offset + distances].add_(moved.sum((1, 2)))

    def indices(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Indices of the queries, the last one first, and of the keys."""
        query = torch.arange(self.end_key - 1, self.end_key - self.rows - 1, -1, device=device)
        return query, torch.arange(self.first_key, self.end_key, device=device)


def of_heads(table: Tensor, heads: slice) -> Tensor:
    """The rows of these heads, or the one that all heads share."""
    return table if table.shape[0] == 1 else table[heads]
