"""Attention in blocks of queries over a view of the distance table, and its gradients, recomputed block by block.

With a block's queries reversed, bias[h, i - j] is a view of the reversed table whose rows each start one element later
(a Hankel matrix, strides (·, 1, 1)): biases are read in place, and keys that no query of the block sees are skipped.
Nothing of size queries · keys ever exists, and gradients are summed in float32 or wider, in a fixed order.
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

from megatron.attention.eager import hidden

BLOCK, BACKWARD_BLOCK = 256, 128  # queries
TILE = (
    2**18
)  # scores of some heads that a CPU's core has at one time in the backward pass: 1 MiB, its cache
NUMBERS = (
    2**23
)  # scores that exist at one time in the forward pass where a view of the table does not do: 32 MiB
# cuDNN's kernel has given NaN gradients under a mask (pytorch#196678).
MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True)
class Scope:
    """Which keys a query sees: see megatron.attention.attention."""

    queries: int
    keys: int
    window: int | None
    chunk: int | None

    def blocks(self, size: int) -> Iterator["Block"]:
        """At most `size` queries each, all of one chunk."""
        before, end = self.keys - self.queries, 0
        while end < self.queries:
            start, end, first = end, min(end + size, self.queries), 0
            if self.chunk is not None:
                own = (before + start) // self.chunk
                end, first = (
                    min(end, (own + 1) * self.chunk - before),
                    max(0, (own - 1) * self.chunk),
                )
            if self.window is not None:
                first = max(first, before + start - self.window + 1)
            yield Block(start, end, first, before + end, self.queries - end + first)

    def reversed(self, table: Tensor, beyond: float, dtype: torch.dtype) -> Tensor:
        """[heads, >= keys] -> [heads, keys + BLOCK - 1]: the farthest distance first, `beyond` for what is unseen."""
        reach = self.keys if self.window is None else min(self.window, self.keys)
        return F.pad(
            table[:, :reach].to(dtype).flip(1), (self.keys - reach, BLOCK - 1), value=beyond
        )

    def restored(self, reversed: Tensor | None, table: Tensor | None) -> Tensor | None:
        """The adjoint of `reversed`: values of the same shape and dtype as `table`."""
        if reversed is None or table is None:
            return None
        return F.pad(reversed[:, : self.keys].flip(1), (0, table.shape[1] - self.keys)).to(
            table.dtype
        )


@dataclass(frozen=True)
class Block:
    """Queries start … end - 1, all keys that some of them see, first … last - 1; offset: of the view in the table."""

    start: int
    end: int
    first: int
    last: int
    offset: int

    def view(self, table: Tensor) -> Tensor:
        """Of a reversed table, without a copy: [heads, end - start, last - first], the last query first."""
        shape = (table.shape[0], self.end - self.start, self.last - self.first)
        return table.as_strided(
            shape, (table.stride(0), 1, 1), table.storage_offset() + self.offset
        )

    def add_diagonals(self, table: Tensor, scores: Tensor) -> None:
        """The adjoint of `view`: add scores [heads, batch, end - start, last - first] to a reversed table."""
        heads, batch, rows, columns = scores.shape
        distances = rows + columns - 1
        padded = scores.new_empty(heads, rows, columns + rows)
        padded[:, :, :columns], padded[:, :, columns:] = scores[:, 0], 0
        for row in range(1, batch):
            padded[:, :, :columns].add_(scores[:, row])
        # Read with rows one shorter than written, each row moves by one: diagonals become columns.
        moved = padded.flatten(1)[:, : rows * distances].view(heads, rows, distances)
        table[:, self.offset : self.offset + distances].add_(moved.sum(1))

    def indices(self, scope: Scope, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of the queries, the last one first, and of the keys."""
        before = scope.keys - scope.queries
        query = torch.arange(before + self.end - 1, before + self.start - 1, -1, device=device)
        return query, torch.arange(self.first, self.last, device=device)

    def unseen(self, scope: Scope, segments: Tensor) -> Tensor:
        """What segments and causality hide, as `view` is ordered: [batch, 1, end - start, last - first] bool."""
        return hidden(*self.indices(scope, segments.device), None, None, segments)


def in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    segments: Tensor | None,
    scope: Scope,
    index_bias: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """See megatron.attention.attention; differentiable by autograd, which then keeps every block's scores."""
    table, weights = _tables(bias, weight, k, scope)
    whole = weight is not None or segments is not None or index_bias is not None
    rows = min(BLOCK, max(1, NUMBERS // (q.shape[0] * q.shape[1] * scope.keys))) if whole else BLOCK
    if (
        scope.queries > rows
    ):  # read again by every block: a copy pays where they are views of a fused projection
        k, v = k.contiguous(), v.contiguous()
    outputs = []
    for block in scope.blocks(rows):
        mask = block.view(table)[None]  # [1, heads, rows, columns]
        if index_bias is not None:
            mask = mask + index_bias(*block.indices(scope, q.device))
        if segments is not None:
            mask = mask.masked_fill(block.unseen(scope, segments), -math.inf)
        scale = None if weights is None else block.view(weights)
        seen = slice(block.first, block.last)
        out = _attend(
            q[:, :, block.start : block.end].flip(2), k[:, :, seen], v[:, :, seen], mask, scale
        )
        outputs.append(out.flip(2))
    return torch.cat(outputs, dim=2)


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: Tensor | None) -> Tensor:
    """One block: [batch, heads, queries, head_dim]."""
    if scale is not None:  # not additive, so no fused kernel knows it
        scores = (
            q.to(mask.dtype) @ k.to(mask.dtype).transpose(-1, -2) / math.sqrt(q.shape[-1]) * scale
            + mask
        )
        return (scores.softmax(dim=-1) @ v.to(mask.dtype)).to(q.dtype)
    if q.device.type == "cpu":
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    # CUDA kernels want rows that are aligned and of q's dtype; copied first, so that gradients add up in float32.
    with sdpa_kernel(MASKED):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.contiguous().to(q.dtype))


def _tables(
    bias: Tensor | None, weight: Tensor | None, k: Tensor, scope: Scope
) -> tuple[Tensor, Tensor | None]:
    """Bias, or zeros, and weight as `Block.view` reads them, in float32 or wider."""
    wide = torch.promote_types(k.dtype, torch.float32)
    if bias is None:
        bias = torch.zeros(k.shape[1], scope.keys, device=k.device)
    return scope.reversed(bias, -math.inf, wide), None if weight is None else scope.reversed(
        weight, 0.0, wide
    )


class Blocked(torch.autograd.Function):
    """`in_blocks`, without index_bias, whose gradients take memory in proportion to length."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, ctx.scope = inputs
        ctx.save_for_backward(*tensors)
        return in_blocks(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, weight, segments = ctx.saved_tensors
        table, weights = _tables(bias, weight, k, ctx.scope)
        sums = [torch.zeros_like(table) if wanted else None for wanted in ctx.needs_input_grad[3:5]]
        q, k, v, grad = (x.transpose(0, 1).contiguous() for x in (q.flip(2), k, v, grad.flip(2)))
        d_q, d_k, d_v = _gradients(q, k, v, grad, table, weights, segments, ctx.scope, sums)
        of_qkv = [x.transpose(0, 1).to(q.dtype) for x in (d_q.flip(2), d_k, d_v)]
        return *of_qkv, *map(ctx.scope.restored, sums, (bias, weight)), None, None


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    table: Tensor,
    weights: Tensor | None,
    segments: Tensor | None,
    scope: Scope,
    sums: list[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor]:
    """Of q, k, v [heads, batch, length, head_dim], the last query first; to sums, those of bias and weight."""
    wide, scale = table.dtype, 1 / math.sqrt(q.shape[-1])
    wide_q, wide_k, wide_v, wide_grad = q.to(wide) * scale, k.to(wide), v.to(wide), grad.to(wide)
    d_q, d_k, d_v = torch.empty_like(wide_q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    d_table, d_weights = sums
    for block in scope.blocks(BACKWARD_BLOCK):
        unseen = None if segments is None else block.unseen(scope, segments).transpose(0, 1)
        rows, seen = (
            slice(scope.queries - block.end, scope.queries - block.start),
            slice(block.first, block.last),
        )
        for some in _groups_of_heads(q, block):
            products = (
                wide_q[some, :, rows] @ wide_k[some, :, seen].mT
            )  # [heads, batch, rows, columns]
            factor = None if weights is None else block.view(weights[some])[:, None]
            shares = _shares(products, block.view(table[some])[:, None], factor, unseen)
            d_shares = wide_grad[some, :, rows] @ wide_v[some, :, seen].mT
            d_scores = torch.ops.aten._softmax_backward_data(d_shares, shares, -1, wide)
            if d_table is not None:
                block.add_diagonals(d_table[some], d_scores)
            if d_weights is not None:
                block.add_diagonals(d_weights[some], d_scores * products)
            # Half precision is fast and enough for what is rounded to it in the end; the tables' gradients are not.
            d_products = (d_scores if factor is None else d_scores.mul_(factor)).to(q.dtype)
            d_q[some, :, rows] = d_products @ k[some, :, seen]
            _add_product(d_k[some, :, seen], d_products.mT, q[some, :, rows])
            _add_product(d_v[some, :, seen], shares.to(q.dtype).mT, grad[some, :, rows])
    return d_q.mul_(scale), d_k.mul_(scale), d_v


def _groups_of_heads(q: Tensor, block: Block) -> Iterator[slice]:
    """As many heads of q [heads, batch, ...] at a time as a core's cache holds; elsewhere than on CPU, all."""
    heads, batch = q.shape[:2]
    scores = batch * (block.end - block.start) * (block.last - block.first)
    step = max(1, TILE // scores) if q.device.type == "cpu" else heads
    return (slice(head, min(head + step, heads)) for head in range(0, heads, step))


def _shares(products: Tensor, mask: Tensor, factor: Tensor | None, unseen: Tensor | None) -> Tensor:
    """Softmax of a tile's scores, in place of products where these are not needed any more."""
    scores = products.add_(mask) if factor is None else (products * factor).add_(mask)
    return (scores if unseen is None else scores.masked_fill_(unseen, -math.inf)).softmax(dim=-1)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in one pass where total is no wider than they are."""
    if total.dtype == left.dtype:
        total.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    else:
        total += left @ right
