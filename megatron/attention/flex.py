"""Attention through torch's FlexAttention: scores change by tables that it reads itself, hidden blocks are skipped.

On CUDA it is compiled once for each shape; on the CPU it runs uncompiled, holds all scores, and serves as a check.
Gradients of tables are summed by atomic additions on CUDA: the last bits may differ from run to run.
"""

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128
MOST_SHAPES = 64  # compiled at one time


def flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    *,
    weight: Tensor | None,
    window: int | None,
    chunk: int | None,
    segments: Tensor | None,
    index_bias: None = None,
) -> Tensor:
    """See megatron.attention.attention."""
    queries, keys = q.shape[2], k.shape[2]
    q, k, v = _padded(q), _padded(k), _padded(v)
    bias, weight = (
        None if table is None else F.pad(table[:, :keys], (0, k.shape[2] - keys))
        for table in (bias, weight)
    )
    before = torch.full((), keys - queries, dtype=torch.int32, device=q.device)
    if segments is None:
        mask = _cached_mask(q.shape[2], k.shape[2], keys - queries, window, chunk, q.device)
    else:
        mask = _block_mask(
            q.shape[2], k.shape[2], keys - queries, window, chunk, q.device, segments
        )
    run = _attend
    if q.device.type == "cuda":
        run = _compiled(
            q.shape, k.shape, q.dtype, bias is None, weight is None, window, chunk, segments is None
        )
    return run(q, k, v, bias, weight, before, mask)[:, :, :queries]


def refusal(q: Tensor, *, index_bias: bool, gradient: bool) -> str | None:
    """Why these inputs are not for FlexAttention, in one sentence, or None."""
    if index_bias:
        return "it reads biases from a table by distance, not by indices"
    if q.device.type != "cuda":
        return f"it has no gradients on {q.device.type}" if gradient else None
    if q.shape[3] < 16:
        return f"head_dim {q.shape[3]} is less than 16"
    return "it does not know float64 on CUDA" if q.dtype == torch.float64 else None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    weight: Tensor | None,
    before: Tensor,
    mask: BlockMask,
) -> Tensor:
    """Lengths that are multiples of BLOCK: [batch, heads, queries, head_dim]; `before` keys precede the queries."""
    last = k.shape[2] - 1

    def score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        back = (before + query - key).clamp(0, last)
        if weight is not None:
            score = score * weight[head, back]
        if bias is not None:
            score = score + bias[head, back]
        return score

    return flex_attention(q, k, v, score_mod=score, block_mask=mask)  # pyright: ignore[reportReturnType]


@lru_cache(MOST_SHAPES)
def _compiled(*shape: Any) -> Callable[..., Tensor]:
    """`_attend` for one shape. Code of its own for each, because dynamo counts recompilations by code and gives up
    after a few; the guards of a shape then see one shape only."""
    fresh = FunctionType(_attend.__code__.replace(), _attend.__globals__, _attend.__name__)
    return torch.compile(fresh, dynamic=False, fullgraph=True)


def _padded(x: Tensor) -> Tensor:
    """[batch, heads, length, head_dim] -> length up to a multiple of BLOCK, so that few shapes are compiled."""
    more = -x.shape[2] % BLOCK
    return F.pad(x, (0, 0, 0, more)) if more else x


def _block_mask(
    queries: int,
    keys: int,
    before: int,
    window: int | None,
    chunk: int | None,
    device: torch.device,
    segments: Tensor | None = None,
) -> BlockMask:
    """What is seen, from the edges of the blocks: no matrix of queries · keys is made."""
    first_query = before + torch.arange(0, queries, BLOCK, device=device)[:, None]
    first_key = torch.arange(0, keys, BLOCK, device=device)
    last_query, last_key = first_query + BLOCK - 1, first_key + BLOCK - 1
    some, whole = first_key <= last_query, last_key <= first_query  # [query blocks, key blocks]
    if window is not None:
        some = some & (first_query - last_key < window)
        whole = whole & (last_query - first_key < window)
    if chunk is not None:
        some = some & (first_query // chunk - last_key // chunk <= 1)
        whole = whole & (last_query // chunk - first_key // chunk <= 1)
    some, whole = some[None, None], whole[None, None]
    of_query = of_key = None
    if segments is not None:
        rest = max(before + queries, keys) - segments.shape[1]
        longer = torch.cat([segments, segments[:, -1:].expand(-1, rest)], dim=1)
        # Cloned, so that strides say nothing about `before`: dynamo compiles again for each.
        exactly = {"memory_format": torch.contiguous_format}
        of_query, of_key = (
            longer[:, before : before + queries].clone(**exactly),
            longer[:, :keys].clone(**exactly),
        )
        low_query, high_query = of_query.unflatten(1, (-1, BLOCK)).aminmax(dim=2)  # [batch, blocks]
        low_key, high_key = of_key.unflatten(1, (-1, BLOCK)).aminmax(dim=2)
        some = (
            some
            & (
                (low_query[:, :, None] <= high_key[:, None])
                & (low_key[:, None] <= high_query[:, :, None])
            )[:, None]
        )
        same = (low_query[:, :, None] == high_key[:, None]) & (
            low_key[:, None] == high_query[:, :, None]
        )
        whole = whole & same[:, None]
    offset = torch.full((), before, dtype=torch.int32, device=device)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        index = offset + query
        found = index >= key
        if window is not None:
            found = found & (index - key < window)
        if chunk is not None:
            found = found & (index // chunk - key // chunk <= 1)
        if of_query is not None and of_key is not None:
            found = found & (of_query[batch, query] == of_key[batch, key])
        return found

    partly, wholly = _ordered(some & ~whole), _ordered(whole)
    return BlockMask.from_kv_blocks(
        *partly, *wholly, BLOCK_SIZE=BLOCK, mask_mod=seen, seq_lengths=(queries, keys)
    )


# Made in evaluation it is used in training too, which refuses tensors of inference mode.
_cached_mask = lru_cache(MOST_SHAPES)(torch.inference_mode(False)(_block_mask))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [batch, 1, query blocks, key blocks] -> how many are set in each row, and their indices first: int32."""
    indices = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32), indices.to(torch.int32)
