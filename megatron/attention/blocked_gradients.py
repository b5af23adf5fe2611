"""Gradients of attention in blocks, computed again from q, k and v, and summed in a fixed order.

A tile is a block of queries and some heads. Its scores are read and written by several passes, so
tiles are as large as a core's cache.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.eager import ScoreBias
from megatron.attention.first_keys import FirstKeys, groups_of_heads
from megatron.attention.scope import BACKWARD_BLOCK, Block, Inputs, of_heads

TILE_SCORES = 2**18
"""Scores of a tile: 1 MiB. Twice as many took 1.2 times as long at 512."""


def gradients(
    inputs: Inputs,
    out: Tensor,
    dout: Tensor,
    firsts: FirstKeys | None,
    wants: tuple[bool, bool],
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, bias, weight, u and w, as these; None for what is None or not wanted.

    out, dout: the output and its gradient, [batch, heads, queries, features];
    wants: whether a gradient of bias, and of weight, is wanted
    """
    scope = inputs.scope
    backward = _Backward.of(inputs, out, dout, wants)
    for block in scope.blocks(BACKWARD_BLOCK):
        for tile in backward.tiles(block, firsts):
            backward.add(tile)

    scale = backward.scale
    dq = backward.dq.mul_(scale).transpose(0, 1).flip(2).to(inputs.q.dtype)
    dk = backward.dk.mul_(scale).transpose(0, 1).to(inputs.k.dtype)
    dv = backward.dv.transpose(0, 1).to(inputs.v.dtype)
    dbias = scope.restored(backward.dbias, inputs.bias)
    dweight = scope.restored(backward.dweight, inputs.weight)
    du, dw = (None, None) if backward.content is None else backward.content.found()
    return dq, dk, dv, dbias, dweight, du, dw


class Tile(NamedTuple):
    """Some heads, and a block of queries with its keys."""

    heads: slice
    part: Block


@dataclass(frozen=True)
class _Backward:
    """Tensors of the backward pass, [heads, batch, length, features]; the last query first.

    wide_q: scaled by 1 / √head_dim; bias, weight, dbias, dweight: reversed tables;
    mean: dout·out, one number for each query
    """

    inputs: Inputs
    q: Tensor
    k: Tensor
    dout: Tensor
    wide_q: Tensor
    wide_k: Tensor
    wide_v: Tensor
    wide_dout: Tensor
    mean: Tensor
    bias: Tensor
    weight: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None
    dweight: Tensor | None
    content: "ContentGradients | None"

    @classmethod
    def of(cls, inputs: Inputs, out: Tensor, dout: Tensor, wants: tuple[bool, bool]) -> "_Backward":
        q, k, v = _heads_first(inputs.q.flip(2)), _heads_first(inputs.k), _heads_first(inputs.v)
        reversed_dout = _heads_first(dout.flip(2))
        bias, weight = inputs.scope.reversed_tables(inputs.bias, inputs.weight, k)
        wide = bias.dtype
        wide_v, wide_dout = v.to(wide), reversed_dout.to(wide)
        mean = _heads_first((dout * out).sum(-1, keepdim=True).flip(2))
        dv = torch.zeros_like(wide_v)
        wants_dbias, wants_dweight = wants
        wide_q, wide_k = q.to(wide) / math.sqrt(q.shape[-1]), k.to(wide)
        dq, dk = torch.empty_like(wide_q), torch.zeros_like(wide_k)
        content = None
        if inputs.score_bias is not None:
            content = ContentGradients.of(inputs.score_bias)
            if weight is None:
                wide_q, wide_k = content.with_features(wide_q, wide_k)
        return cls(
            inputs,
            q,
            k,
            reversed_dout,
            wide_q,
            wide_k,
            wide_v,
            wide_dout,
            mean,
            bias,
            weight,
            dq=dq,
            dk=dk,
            dv=dv,
            dbias=torch.zeros_like(bias) if wants_dbias else None,
            dweight=torch.zeros_like(weight) if weight is not None and wants_dweight else None,
            content=content,
        )

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[-1])

    def tiles(self, block: Block, firsts: FirstKeys | None) -> Iterator[Tile]:
        """The tiles of a block; on a GPU, one for all heads that have the same keys."""
        heads, batch = self.q.shape[:2]
        for group, part in groups_of_heads(block, heads, firsts):
            step = heads
            if self.inputs.on_cpu:
                step = max(1, TILE_SCORES // (batch * part.rows * part.columns))
            for head in range(group.start, group.stop, step):
                yield Tile(slice(head, min(head + step, group.stop)), part)

    def add(self, tile: Tile) -> None:
        """Add what one tile gives."""
        heads, part = tile
        queries = self.inputs.scope.queries
        rows = slice(queries - part.end, queries - part.start)
        of_rows, of_columns = (heads, slice(None), rows), (heads, slice(None), part.keys)
        q, k, dout = self.q[of_rows], self.k[of_columns], self.dout[of_rows]

        # q·k / √head_dim, with a bias by content unless that would be multiplied by a weight.
        wide_k = self.wide_k[of_columns]
        if self.content is not None and self.weight is None:
            self.content.write_features(wide_k, tile)
        products = self.wide_q[of_rows] @ wide_k.mT  # [heads, batch, rows, columns]
        probabilities = self._probabilities(products, tile)

        dprobabilities = self.wide_dout[of_rows] @ self.wide_v[of_columns].mT
        padded = probabilities.new_empty(*probabilities.shape[:-1], part.columns + part.rows)
        dscores = padded[..., : part.columns]
        if q.dtype == probabilities.dtype:
            torch.mul(probabilities, dprobabilities.sub_(self.mean[of_rows]), out=dscores)
        else:
            # Not by a rounded output: gradients of tables are sums of small differences.
            dscores.copy_(
                torch.ops.aten._softmax_backward_data(
                    dprobabilities, probabilities, -1, probabilities.dtype
                )
            )
        if self.dbias is not None:
            part.add_diagonals(self.dbias[heads], padded)
        if self.content is not None:
            self.content.add(tile, dscores)
        if self.dweight is not None:
            weighted = torch.empty_like(padded)
            torch.mul(dscores, products, out=weighted[..., : part.columns])
            part.add_diagonals(self.dweight[heads], weighted)

        # Tables need dscores in float32. What is rounded to q's dtype in the end does not.
        if self.weight is not None:
            dscores.mul_(part.view(self.weight[heads])[:, None])
        dproducts = dscores.to(q.dtype)
        self.dq[of_rows] = dproducts @ k
        _add_product(self.dk[of_columns], dproducts.mT, q)
        rounded = probabilities.to(q.dtype)
        _add_product(self.dv[of_columns], rounded.mT, dout)

    def _probabilities(self, products: Tensor, tile: Tile) -> Tensor:
        """Softmax of a tile's scores: [heads, batch, rows, columns].

        Without a weight, products are overwritten.
        """
        heads, part = tile
        scores = products
        if self.weight is not None:
            scores = products * part.view(self.weight[heads])[:, None]
            if self.content is not None:
                scores.add_(self.content.bias(tile, scores.dtype))
        scores.add_(part.view(of_heads(self.bias, heads))[:, None])
        if self.inputs.segments is not None:
            masked = part.mask(self.inputs.scope, self.inputs.segments)
            scores.masked_fill_(masked.transpose(0, 1), -math.inf)
        return scores.softmax(dim=-1)


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
    def of(cls, score_bias: ScoreBias) -> "ContentGradients":
        w = score_bias.w.transpose(0, 1)
        dw = torch.zeros_like(w)
        if score_bias.u is None:
            return cls(None, w, None, dw)
        u = score_bias.u.transpose(0, 1)
        return cls(u, w, torch.zeros_like(u, dtype=torch.float32), dw)

    def bias(self, tile: Tile, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of a tile: [heads, batch, rows, columns]."""
        u, w = self._relative(tile, dtype)
        return w.sum(-1)[:, :, None] if u is None else u @ w.mT

    def with_features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q, the last query first, with u as features, and k with room for those of w."""
        u = torch.ones_like(q[..., :1]).expand(*q.shape[:-1], self.w.shape[-1])
        if self.u is not None:
            u = self.u.to(q.dtype).flip(2)
        return torch.cat([q, u], dim=-1), F.pad(k, (0, self.w.shape[-1]))

    def write_features(self, k: Tensor, tile: Tile) -> None:
        """Write w, less that of the block's last token, into keys with room for it."""
        _, w = self._relative(tile, k.dtype)
        k[..., -w.shape[-1] :] = w

    def add(self, tile: Tile, dscores: Tensor) -> None:
        """Add what the gradient of a tile's scores means for u and w."""
        heads, part = tile
        u, w = self._relative(tile, dscores.dtype)
        if u is None or self.du is None:
            ones = dscores.new_ones(1, part.rows)  # as a product, the sum is faster
            self.dw[heads, :, part.keys] += (ones @ dscores).mT
            return
        self.dw[heads, :, part.keys] += (u.mT @ dscores).mT
        # A row's dscores sum to 0 but for rounding, which a large w would multiply. So what counts
        # is w less that of the query's own key.
        of_own_key = w[:, :, -part.rows :].flip(2)
        rounding = dscores @ torch.ones_like(w[..., :1])
        of_queries = dscores @ w - rounding * of_own_key
        self.du[heads, :, part.queries] = of_queries.flip(2)

    def _relative(self, tile: Tile, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        heads, part = tile
        u = None if self.u is None else self.u[heads]
        of_these = ScoreBias(u, self.w[heads])
        u, w = of_these.relative(part.queries, part.keys, dtype)
        return None if u is None else u.flip(2), w

    def found(self) -> tuple[Tensor | None, Tensor]:
        """Gradients of u and w: [batch, heads, …]."""
        if self.u is None or self.du is None:
            return None, self.dw.transpose(0, 1)
        return self.du.to(self.u.dtype).transpose(0, 1), self.dw.transpose(0, 1)


def _heads_first(x: Tensor) -> Tensor:
    """[batch, heads, length, features] -> [heads, batch, length, features], contiguous."""
    return x.transpose(0, 1).contiguous()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in one pass where all have one dtype."""
    if total.dtype == left.dtype:
        total.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    else:
        total += left @ right
