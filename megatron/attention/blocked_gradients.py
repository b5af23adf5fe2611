"""Gradients of attention in blocks, computed again from q, k and v, and summed in a fixed order.

A tile is a block of queries and some heads. Its scores are read and written by several passes, so
tiles are as large as a core's cache.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention.eager import ScoreBias, product
from megatron.attention.first_keys import FirstKeys, groups_of_heads
from megatron.attention.scope import BACKWARD_BLOCK, Inputs, of_heads

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
    # Everything is [heads, batch, length, features], the last query first; tables are reversed.
    scope = inputs.scope
    batch, heads, queries, head_dim = inputs.q.shape
    q, k, v = _heads_first(inputs.q.flip(2)), _heads_first(inputs.k), _heads_first(inputs.v)
    bias, weight = scope.reversed_tables(inputs.bias, inputs.weight, k)
    wide = bias.dtype
    wide_q, wide_k, wide_v = q.to(wide) / math.sqrt(head_dim), k.to(wide), v.to(wide)
    mean = _heads_first((dout * out).sum(-1, keepdim=True).flip(2))
    dout = _heads_first(dout.flip(2))
    wide_dout = dout.to(wide)
    dq, dk, dv = torch.empty_like(wide_q), torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    dbias = torch.zeros_like(bias) if wants[0] else None
    dweight = torch.zeros_like(weight) if weight is not None and wants[1] else None

    # A bias by content, the last query of a block first: u None for ones, its gradient in float32.
    all_u = all_w = du = dw = None
    if inputs.score_bias is not None:
        all_w = inputs.score_bias.w.transpose(0, 1)
        dw = torch.zeros_like(all_w)
        if inputs.score_bias.u is not None:
            all_u = inputs.score_bias.u.transpose(0, 1)
            du = torch.zeros_like(all_u, dtype=torch.float32)
        if weight is None:  # more features of q and k, with room for u and w
            room = (0, inputs.score_bias.features)
            wide_q, wide_k = F.pad(wide_q, room, value=1.0), F.pad(wide_k, room)

    most = TILE_SCORES // batch if inputs.on_cpu else None
    for block in scope.blocks(BACKWARD_BLOCK):
        rows = slice(queries - block.end, queries - block.start)
        for group, part in groups_of_heads(block, heads, firsts, most):
            of_rows, of_columns = (group, slice(None), rows), (group, slice(None), part.keys)
            u = w = None
            if all_w is not None:
                of_group = ScoreBias(None if all_u is None else all_u[group], all_w[group])
                u, w = of_group.relative(part.queries, part.keys, wide)
                u = None if u is None else u.flip(2)

            # q·k / √head_dim, with a bias by content unless that would be multiplied by a weight.
            tile_q, tile_k = wide_q[of_rows], wide_k[of_columns]
            if w is not None and weight is None:
                tile_k[..., -w.shape[-1] :] = w
                if u is not None:
                    tile_q[..., -u.shape[-1] :] = u
            products = tile_q @ tile_k.mT  # [heads, batch, rows, columns]
            scores = products
            if weight is not None:
                scores = products * part.view(weight[group])[:, None]
                if w is not None:
                    scores.add_(product(u, w))
            scores.add_(part.view(of_heads(bias, group))[:, None])
            if inputs.segments is not None:
                masked = part.mask(scope, inputs.segments)
                scores.masked_fill_(masked.transpose(0, 1), -math.inf)
            probabilities = scores.softmax(dim=-1)

            dprobabilities = wide_dout[of_rows] @ wide_v[of_columns].mT
            padded = probabilities.new_empty(*probabilities.shape[:-1], part.columns + part.rows)
            dscores = padded[..., : part.columns]
            if q.dtype == wide:
                torch.mul(probabilities, dprobabilities.sub_(mean[of_rows]), out=dscores)
            else:
                # Not by a rounded output: gradients of tables are sums of small differences.
                dscores.copy_(
                    torch.ops.aten._softmax_backward_data(dprobabilities, probabilities, -1, wide)
                )
            if dbias is not None:
                part.add_diagonals(dbias[group], padded)
            if w is not None and dw is not None:
                # For ones too as a product: the sum is faster.
                left = dscores.new_ones(1, part.rows) if u is None else u.mT
                of_keys = (left @ dscores).mT.to(dw.dtype)
                rank = dw.shape[-1]
                if all_u is not None and of_keys.shape[-1] > rank:  # products of the last query
                    of_last = of_keys[..., rank:] * all_u[group, :, part.end - 1, None]
                    of_keys = of_keys[..., :rank] + of_last
                dw[group, :, part.keys] += of_keys
            if u is not None and w is not None and du is not None:
                # A row's dscores sum to 0 but for rounding, which a large w would multiply. So
                # what counts is w less that of the query's own key.
                of_own_key = w[:, :, -part.rows :].flip(2)
                rounding = dscores @ torch.ones_like(w[..., :1])
                of_queries = dscores @ w - rounding * of_own_key
                du[group, :, part.queries] = of_queries[..., : du.shape[-1]].flip(2)
            if dweight is not None:
                weighted = torch.empty_like(padded)
                torch.mul(dscores, products, out=weighted[..., : part.columns])
                part.add_diagonals(dweight[group], weighted)

            # Tables need dscores in float32. What is rounded to q's dtype in the end does not.
            if weight is not None:
                dscores.mul_(part.view(weight[group])[:, None])
            dproducts = dscores.to(q.dtype)
            dq[of_rows] = dproducts @ k[of_columns]
            _add_product(dk[of_columns], dproducts.mT, q[of_rows])
            _add_product(dv[of_columns], probabilities.to(q.dtype).mT, dout[of_rows])

    scale = 1 / math.sqrt(head_dim)
    dq = dq.mul_(scale).transpose(0, 1).flip(2).to(inputs.q.dtype)
    dk = dk.mul_(scale).transpose(0, 1).to(inputs.k.dtype)
    dv = dv.transpose(0, 1).to(inputs.v.dtype)
    if du is not None and all_u is not None:
        du = du.to(all_u.dtype).transpose(0, 1)
    dw = None if dw is None else dw.transpose(0, 1)
    of_tables = scope.restored(dbias, inputs.bias), scope.restored(dweight, inputs.weight)
    return dq, dk, dv, *of_tables, du, dw


def _heads_first(x: Tensor) -> Tensor:
    """[batch, heads, length, features] -> [heads, batch, length, features], contiguous."""
    return x.transpose(0, 1).contiguous()


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, in one pass where all have one dtype."""
    if total.dtype == left.dtype:
        total.flatten(0, 1).baddbmm_(left.flatten(0, 1), right.flatten(0, 1))
    else:
        total += left @ right
