"""Attention in blocks of queries that read the distance table in place, and its gradients.

With a block's queries in reverse order, bias[h, i - j] is a view of the reversed table: each row
starts one element later (a Hankel matrix, strides (·, 1, 1)). So no bias is copied, and keys that
no query of the block attends to are skipped. Nothing of size queries · keys ever exists: gradients
are recomputed block by block, and summed in float32 or wider, in a fixed order.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.attention.content import ScoreBias, plus_content
from megatron.attention.eager import mask

BLOCK, BACKWARD_BLOCK = 256, 128  # queries
TILE_SCORES = 2**18
"""Scores of some heads that a core holds at once in the backward pass: 1 MiB, as its cache."""
MOST_SCORES = 2**23
"""Scores that exist at once in the forward pass where a view of the table is not enough: 32 MiB."""
# cuDNN's kernel has given NaN gradients under a mask (pytorch#196678).
KERNELS_WITH_MASK = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


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

    def blocks(self, size: int) -> Iterator["Block"]:
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
            yield Block(start, end, first_key, end_key, offset)
            start = end

    def reversed(self, table: Tensor, outside: float, dtype: torch.dtype) -> Tensor:
        """The table from its farthest distance: [heads, >= keys] -> [heads, keys + BLOCK - 1].

        outside: the value at distances beyond the window and of keys after the query
        """
        window = self.keys if self.window is None else min(self.window, self.keys)
        farthest_first = table[:, :window].to(dtype).flip(1)
        return F.pad(farthest_first, (self.keys - window, BLOCK - 1), value=outside)

    def restored(self, reversed: Tensor | None, table: Tensor | None) -> Tensor | None:
        """The adjoint of `reversed`: values of the same shape and dtype as `table`."""
        if reversed is None or table is None:
            return None
        nearest_first = reversed[:, : self.keys].flip(1)
        longer = table.shape[1] - self.keys
        return F.pad(nearest_first, (0, longer)).to(table.dtype)


@dataclass(frozen=True)
class Block:
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
    def keys(self) -> slice:
        """The block's keys in a tensor of all keys."""
        return slice(self.first_key, self.end_key)

    def view(self, table: Tensor) -> Tensor:
        """A view of a reversed table, the last query first: [heads, rows, columns]."""
        shape = (table.shape[0], self.rows, self.end_key - self.first_key)
        strides = (table.stride(0), 1, 1)
        return table.as_strided(shape, strides, table.storage_offset() + self.offset)

    def add_diagonals(self, table: Tensor, scores: Tensor) -> None:
        """The adjoint of `view`: add scores [heads, batch, rows, columns] to a reversed table."""
        heads, batch, rows, columns = scores.shape
        distances = rows + columns - 1
        padded = scores.new_empty(heads, rows, columns + rows)
        summed = padded[:, :, :columns]
        summed.copy_(scores[:, 0])
        for sample in range(1, batch):
            summed.add_(scores[:, sample])
        padded[:, :, columns:] = 0
        # Read with rows one shorter than written, each row moves by one: diagonals become columns.
        flat = padded.flatten(1)[:, : rows * distances]
        moved = flat.view(heads, rows, distances)
        table[:, self.offset : self.offset + distances].add_(moved.sum(1))

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


def in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    segments: Tensor | None,
    scope: Scope,
    index_bias: Callable[[Tensor, Tensor], Tensor] | None = None,
    score_bias: ScoreBias | None = None,
) -> Tensor:
    """See megatron.attention.attention. Under autograd every block's scores are kept."""
    reversed_bias, reversed_weight = _reversed_tables(bias, weight, k, scope)
    size = BLOCK
    in_view = weight is None and segments is None and index_bias is None and score_bias is None
    if not in_view:
        scores_of_a_query = q.shape[0] * q.shape[1] * scope.keys
        size = min(BLOCK, max(1, MOST_SCORES // scores_of_a_query))
    if scope.queries > size:
        # Every block reads them: where they are views of a fused projection, a copy pays.
        k, v = k.contiguous(), v.contiguous()
    room = None
    if score_bias is not None and not torch.is_grad_enabled():
        rows = min(size, scope.queries)
        room = reversed_bias.new_empty(q.shape[0] * q.shape[1] * rows * scope.keys)
    outputs = []
    for block in scope.blocks(size):
        added = block.view(reversed_bias)[None]  # [1, heads, rows, columns]
        if index_bias is not None:
            added = added + index_bias(*block.indices(scope, q.device))
        if segments is not None:
            added = added.masked_fill(block.mask(scope, segments), -math.inf)
        factor = None if reversed_weight is None else block.view(reversed_weight)
        queries = q[:, :, block.start : block.end].flip(2)
        keys, values = k[:, :, block.keys], v[:, :, block.keys]
        if score_bias is not None:
            u, w = score_bias.relative(slice(block.start, block.end), block.keys, added.dtype)
            added = plus_content(added, None if u is None else u.flip(2), w, room)
        out = _attend(queries, keys, values, added, factor)
        outputs.append(out.flip(2))
    return torch.cat(outputs, dim=2)


def _attend(q: Tensor, k: Tensor, v: Tensor, added: Tensor, factor: Tensor | None) -> Tensor:
    """One block: softmax(factor · q·k/√head_dim + added) v, [batch, heads, rows, features of v]."""
    if factor is not None:  # a factor is not additive, so no fused kernel computes it
        wide = added.dtype
        products = q.to(wide) @ k.to(wide).transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = products * factor + added
        out = scores.softmax(dim=-1) @ v.to(wide)
        return out.to(q.dtype)
    if q.device.type == "cpu":
        # torch's fused kernel takes values as wide as keys alone.
        features, wider = v.shape[-1], q.shape[-1] - v.shape[-1]
        values = F.pad(v, (0, wider)) if wider else v
        return F.scaled_dot_product_attention(q, k, values, attn_mask=added)[..., :features]
    # CUDA's kernels need aligned rows in q's dtype. Copy first: then gradients add up in float32.
    with sdpa_kernel(KERNELS_WITH_MASK):
        aligned = added.contiguous().to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=aligned)


def _reversed_tables(
    bias: Tensor | None, weight: Tensor | None, k: Tensor, scope: Scope
) -> tuple[Tensor, Tensor | None]:
    """Bias (or zeros) and weight as `Block.view` reads them, in float32 or wider."""
    wide = torch.promote_types(k.dtype, torch.float32)
    if bias is None:
        bias = torch.zeros(k.shape[1], scope.keys, device=k.device)
    reversed_bias = scope.reversed(bias, -math.inf, wide)
    reversed_weight = None if weight is None else scope.reversed(weight, 0.0, wide)
    return reversed_bias, reversed_weight


class Blocked(torch.autograd.Function):
    """`in_blocks`, without index_bias; its gradients take memory in proportion to length."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, ctx.scope = inputs
        ctx.save_for_backward(*tensors)
        q, k, v, bias, weight, segments, u, w = tensors
        score_bias = None if w is None else ScoreBias(u, w)
        return in_blocks(q, k, v, bias, weight, segments, ctx.scope, score_bias=score_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, weight, segments, u, w = ctx.saved_tensors
        scope = ctx.scope
        content_bias = None if w is None else ContentGradients.of(u, w)
        tables = _reversed_tables(bias, weight, k, scope)
        wants_dbias, wants_dweight = ctx.needs_input_grad[3:5]
        dbias = torch.zeros_like(tables[0]) if wants_dbias else None
        dweight = torch.zeros_like(tables[0]) if wants_dweight else None

        dq, dk, dv = _gradients(
            _heads_first(q.flip(2)),
            _heads_first(k),
            _heads_first(v),
            _heads_first(dout.flip(2)),
            tables,
            (dbias, dweight),
            segments,
            scope,
            content_bias,
        )
        dq = dq.transpose(0, 1).flip(2).to(q.dtype)
        dk = dk.transpose(0, 1).to(k.dtype)
        dv = dv.transpose(0, 1).to(v.dtype)
        dbias = scope.restored(dbias, bias)
        dweight = scope.restored(dweight, weight)
        du, dw = (None, None) if content_bias is None else content_bias.found()
        return dq, dk, dv, dbias, dweight, None, du, dw, None


def _heads_first(x: Tensor) -> Tensor:
    """[batch, heads, length, head_dim] -> [heads, batch, length, head_dim], contiguous."""
    return x.transpose(0, 1).contiguous()


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    tables: tuple[Tensor, Tensor | None],
    table_gradients: tuple[Tensor | None, Tensor | None],
    segments: Tensor | None,
    scope: Scope,
    content_bias: "ContentGradients | None" = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in float32 or wider; all tensors are [heads, batch, length, head_dim].

    q, dout, dq: the last query first; tables: reversed bias and weight;
    table_gradients: where to add the gradients of these two, None where one is not wanted
    """
    bias, weight = tables
    dbias, dweight = table_gradients
    scale = 1 / math.sqrt(q.shape[-1])
    wide = bias.dtype
    wide_q = q.to(wide) * scale
    wide_k, wide_v, wide_dout = k.to(wide), v.to(wide), dout.to(wide)
    dq = torch.empty_like(wide_q)
    dk, dv = torch.zeros_like(wide_k), torch.zeros_like(wide_v)

    for block in scope.blocks(BACKWARD_BLOCK):
        rows = slice(scope.queries - block.end, scope.queries - block.start)
        columns = block.keys
        masked = None
        if segments is not None:
            masked = block.mask(scope, segments).transpose(0, 1)

        for heads in _groups_of_heads(q, block):
            products = wide_q[heads, :, rows] @ wide_k[heads, :, columns].mT
            factor = None if weight is None else block.view(weight[heads])[:, None]
            added = block.view(bias[heads])[:, None]
            if content_bias is not None:
                added = content_bias.plus(added, heads, block)
            probabilities = _probabilities(products, added, factor, masked)

            dprobabilities = wide_dout[heads, :, rows] @ wide_v[heads, :, columns].mT
            dscores = torch.ops.aten._softmax_backward_data(dprobabilities, probabilities, -1, wide)
            if dbias is not None:
                block.add_diagonals(dbias[heads], dscores)
            if content_bias is not None:
                content_bias.add(heads, block, dscores)
            if dweight is not None:
                block.add_diagonals(dweight[heads], dscores * products)

            # Tables need dscores in float32. What is rounded to q's dtype in the end does not.
            dproducts = dscores if factor is None else dscores.mul_(factor)
            dproducts = dproducts.to(q.dtype)
            dq[heads, :, rows] = dproducts @ k[heads, :, columns]
            _add_product(dk[heads, :, columns], dproducts.mT, q[heads, :, rows])
            rounded = probabilities.to(q.dtype)
            _add_product(dv[heads, :, columns], rounded.mT, dout[heads, :, rows])
    return dq.mul_(scale), dk.mul_(scale), dv


@dataclass(frozen=True)
class ContentGradients:
    """A bias by content in the backward pass, the last query of a block first, and its gradients.

    u, du [heads, batch, queries, rank], u None for ones; w, dw [heads, batch, keys, rank]
    """

    u: Tensor | None
    w: Tensor
    du: Tensor | None
    dw: Tensor

    @classmethod
    def of(cls, u: Tensor | None, w: Tensor) -> "ContentGradients":
        """u [batch, heads, queries, rank] or None, w [batch, heads, keys, rank]."""
        w = w.transpose(0, 1)
        dw = torch.zeros_like(w)
        if u is None:
            return cls(None, w, None, dw)
        u = u.transpose(0, 1)
        return cls(u, w, torch.zeros_like(u, dtype=torch.float32), dw)

    def plus(self, added: Tensor, heads: slice, block: Block) -> Tensor:
        """added and the bias of a block: [heads, batch, rows, columns]."""
        return plus_content(added, *self._relative(heads, block, added.dtype))

    def add(self, heads: slice, block: Block, dscores: Tensor) -> None:
        """Add what the gradient of a block's scores means for u and w."""
        u, w = self._relative(heads, block, dscores.dtype)
        if u is None or self.du is None:
            self.dw[heads, :, block.keys] += dscores.sum(2)[..., None]
            return
        self.dw[heads, :, block.keys] += dscores.mT @ u
        self.du[heads, :, block.start : block.end] = (dscores @ w).flip(2)

    def _relative(
        self, heads: slice, block: Block, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor]:
        u = None if self.u is None else self.u[heads]
        part = ScoreBias(u, self.w[heads])
        u, w = part.relative(slice(block.start, block.end), block.keys, dtype)
        return None if u is None else u.flip(2), w

    def found(self) -> tuple[Tensor | None, Tensor]:
        """Gradients of u and w: [batch, heads, …]."""
        if self.u is None or self.du is None:
            return None, self.dw.transpose(0, 1)
        return self.du.to(self.u.dtype).transpose(0, 1), self.dw.transpose(0, 1)


def _groups_of_heads(q: Tensor, block: Block) -> Iterator[slice]:
    """Groups of the heads of q [heads, batch, ...] that fit a core's cache; on a GPU, one group."""
    heads, batch = q.shape[:2]
    step = heads
    if q.device.type == "cpu":
        scores_of_a_head = batch * block.rows * (block.end_key - block.first_key)
        step = max(1, TILE_SCORES // scores_of_a_head)
    for head in range(0, heads, step):
        yield slice(head, min(head + step, heads))


def _probabilities(
    products: Tensor, added: Tensor, factor: Tensor | None, masked: Tensor | None
) -> Tensor:
    """Softmax of a tile's scores: [heads, batch, rows, columns].

    Without a factor, products are overwritten.
    """
    scaled = products if factor is None else products * factor
    scores = scaled.add_(added)
    if masked is not None:
        scores = scores.masked_fill_(masked, -math.inf)
    return scores.softmax(dim=-1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in one pass where all have one dtype."""
    if total.dtype == left.dtype:
        total.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    else:
        total += left @ right
