"""The geometry of attention in blocks: which keys a block of queries attends to, and table views.

With a block's queries in reverse order, bias[h, i - j] is a view of the reversed table: each row
starts one element later (a Hankel matrix, strides (·, 1, 1)). So no bias is copied.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.eager import ScoreBias, mask

BLOCK, BACKWARD_BLOCK = 256, 128  # queries
EXACT_SPREAD = 256
"""Up to here, float32 holds a difference with an error of at most 8e-6."""
LEAST_ROWS = 16


@dataclass(frozen=True)
class Scope:
    """Lengths, and which keys a query may attend to: see megatron.attention.attention."""

    queries: int
    keys: int
    window: int | None
    chunk: int | None

    @property
    def before(self) -> int:
        """Keys before the first query."""
        return self.keys - self.queries

    def blocks(self, size: int) -> Iterator["QueryBlock"]:
        """Blocks of at most `size` queries; all queries of a block are in one chunk."""
        start = 0
        while start < self.queries:
            end = min(start + size, self.queries)
            first_key = 0
            if self.chunk is not None:
                chunk = (self.before + start) // self.chunk
                chunk_end = (chunk + 1) * self.chunk - self.before
                end = min(end, chunk_end)
                first_key = max(0, (chunk - 1) * self.chunk)
            if self.window is not None:
                first_key = max(first_key, self.before + start - self.window + 1)
            end_key = self.before + end
            offset = self.queries - end + first_key
            yield QueryBlock(start, end, first_key, end_key, offset)
            start = end

    def reversed(self, table: Tensor, outside: float, dtype: torch.dtype) -> Tensor:
        """The table from its farthest distance: [heads, >= keys] -> [heads, keys + BLOCK - 1].

        outside: the value at distances beyond the window and of keys after the query
        """
        window = self.keys if self.window is None else min(self.window, self.keys)
        farthest_first = table[:, :window].to(dtype).flip(1)
        return F.pad(farthest_first, (self.keys - window, BLOCK - 1), value=outside)

    def reversed_tables(
        self, bias: Tensor | None, weight: Tensor | None, k: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Bias and weight as `QueryBlock.view` reads them, in float32 or wider.

        Without a bias, zeros that all heads share: [1, …].
        """
        wide = torch.promote_types(k.dtype, torch.float32)
        if bias is None:
            bias = torch.zeros(1, self.keys, device=k.device)
        reversed_bias = self.reversed(bias, -math.inf, wide)
        reversed_weight = None if weight is None else self.reversed(weight, 0.0, wide)
        return reversed_bias, reversed_weight

    def restored(self, reversed: Tensor | None, table: Tensor | None) -> Tensor | None:
        """The adjoint of `reversed`: values of the same shape and dtype as `table`."""
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

    def indices(self, scope: Scope, device: torch.device) -> tuple[Tensor, Tensor]:
        """Indices of the queries, the last one first, and of the keys."""
        first = scope.before + self.start
        last = scope.before + self.end - 1
        query = torch.arange(last, first - 1, -1, device=device)
        key = torch.arange(self.first_key, self.end_key, device=device)
        return query, key

    def mask(self, scope: Scope, segments: Tensor) -> Tensor:
        """True for keys after the query or of another document: [batch, 1, rows, columns] bool.

        Rows are ordered as in `view`.
        """
        query, key = self.indices(scope, segments.device)
        return mask(query, key, None, None, segments)


def of_heads(table: Tensor, heads: slice) -> Tensor:
    """The rows of these heads, or the one that all heads share."""
    return table if table.shape[0] == 1 else table[heads]


@dataclass(frozen=True)
class Inputs:
    """The arguments of `megatron.attention.attention`; scope: its lengths, window and chunk."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    weight: Tensor | None
    segments: Tensor | None
    scope: Scope
    index_bias: Callable[[Tensor, Tensor], Tensor] | None = None
    score_bias: ScoreBias | None = None

    @classmethod
    def of(
        cls,
        scope: Scope,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        weight: Tensor | None,
        segments: Tensor | None,
        u: Tensor | None,
        w: Tensor | None,
    ) -> "Inputs":
        """With u and w of a bias by content."""
        score_bias = None if w is None else ScoreBias(u, w)
        return cls(q, k, v, bias, weight, segments, scope, score_bias=score_bias)

    @property
    def on_cpu(self) -> bool:
        return self.q.device.type == "cpu"

    @property
    def content_alone(self) -> bool:
        """Whether a bias by content is all that is added under the causal mask.

        In half precision only numbers for each key are: as a feature of a query, u would be
        rounded.
        """
        if self.score_bias is None or not self.on_cpu:
            return False
        scope = self.scope
        options = (self.bias, self.weight, self.segments, self.index_bias)
        if any(option is not None for option in (*options, scope.window, scope.chunk)):
            return False
        return self.score_bias.u is None or self.q.dtype in (torch.float32, torch.float64)

    def exact_rows(self, most: int) -> int:
        """How many queries a block may have: at most `most`.

        In a block, float32 holds the differences of u·w from that of its last token. Where they
        are large, it loses digits, unless the block is small.
        """
        if self.score_bias is None:
            return most
        rows = most
        while rows > LEAST_ROWS:
            # The largest product, at most, of the queries of a block and their own keys.
            spread = 0.0
            for block in Scope(self.scope.queries, self.scope.keys, None, None).blocks(rows):
                own_keys = slice(block.end_key - block.rows, block.end_key)
                u, w = self.score_bias.relative(block.queries, own_keys, self.score_bias.w.dtype)
                largest = w.abs().amax(2)
                if u is not None:
                    largest = largest * u.abs().amax(2)
                spread = max(spread, float(largest.sum(-1).max()))
            if spread <= EXACT_SPREAD:
                break
            rows //= 2
        return rows
