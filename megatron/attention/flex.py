"""Attention through torch's FlexAttention, which reads the tables itself and skips masked blocks.

On CUDA it is compiled once for each shape. On the CPU it runs uncompiled, holds all scores, and
serves as a check. On CUDA atomic additions sum the gradients of tables: the last bits may differ
from run to run.
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
    before = keys - queries
    q, k, v = _padded(q), _padded(k), _padded(v)
    bias = _padded_table(bias, keys, k.shape[2])
    weight = _padded_table(weight, keys, k.shape[2])
    kind = (q.shape[2], k.shape[2], before, window, chunk, q.device)
    mask = _cached_mask(*kind) if segments is None else _block_mask(*kind, segments)
    attend = _attend
    if q.device.type == "cuda":
        absent = (bias is None, weight is None, segments is None)
        attend = _compiled(q.shape, k.shape, q.dtype, window, chunk, *absent)
    before_tensor = torch.full((), before, dtype=torch.int32, device=q.device)
    return attend(q, k, v, bias, weight, before_tensor, mask)[:, :, :queries]


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
    """Attention of lengths that are multiples of BLOCK: [batch, heads, queries, head_dim].

    before: how many keys precede the queries, [] int32
    """
    last = k.shape[2] - 1

    def score(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = (before + query - key).clamp(0, last)
        if weight is not None:
            score = score * weight[head, distance]
        if bias is not None:
            score = score + bias[head, distance]
        return score

    return flex_attention(q, k, v, score_mod=score, block_mask=mask)  # pyright: ignore[reportReturnType]


@lru_cache(MOST_SHAPES)
def _compiled(*kind: Any) -> Callable[..., Tensor]:
    """`_attend`, compiled for one kind of shapes, dtype and options.

    Each kind gets code of its own: dynamo counts recompilations by code and gives up after a few.
    """
    fresh = FunctionType(_attend.__code__.replace(), _attend.__globals__, _attend.__name__)
    return torch.compile(fresh, dynamic=False, fullgraph=True)


def _padded(x: Tensor) -> Tensor:
    """[batch, heads, length, head_dim] -> length up to a multiple of BLOCK: few shapes compile."""
    missing = -x.shape[2] % BLOCK
    return F.pad(x, (0, 0, 0, missing)) if missing else x


def _padded_table(table: Tensor | None, keys: int, padded_keys: int) -> Tensor | None:
    """[heads, >= keys] -> [heads, padded_keys], zero beyond `keys`."""
    if table is None:
        return None
    return F.pad(table[:, :keys], (0, padded_keys - keys))


def _block_mask(
    queries: int,
    keys: int,
    before: int,
    window: int | None,
    chunk: int | None,
    device: torch.device,
    segments: Tensor | None = None,
) -> BlockMask:
    """The mask by blocks, from the edges of the blocks: no matrix of queries · keys is made."""
    first_query = before + torch.arange(0, queries, BLOCK, device=device)[:, None]
    last_query = first_query + BLOCK - 1
    first_key = torch.arange(0, keys, BLOCK, device=device)
    last_key = first_key + BLOCK - 1

    partly = first_key <= last_query  # [query blocks, key blocks]: some pair is visible
    wholly = last_key <= first_query  # every pair is
    if window is not None:
        partly = partly & (first_query - last_key < window)
        wholly = wholly & (last_query - first_key < window)
    if chunk is not None:
        partly = partly & (first_query // chunk - last_key // chunk <= 1)
        wholly = wholly & (last_query // chunk - first_key // chunk <= 1)
    partly, wholly = partly[None, None], wholly[None, None]

    query_segments = key_segments = None
    if segments is not None:
        query_segments, key_segments = _padded_segments(segments, queries, keys, before)
        overlap, same = _segments_of_blocks(query_segments, key_segments)
        partly, wholly = partly & overlap, wholly & same
    offset = torch.full((), before, dtype=torch.int32, device=device)

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        index = offset + query
        result = index >= key
        if window is not None:
            result = result & (index - key < window)
        if chunk is not None:
            result = result & (index // chunk - key // chunk <= 1)
        if query_segments is not None and key_segments is not None:
            same_document = query_segments[batch, query] == key_segments[batch, key]
            result = result & same_document
        return result

    partial_blocks = _ordered(partly & ~wholly)
    whole_blocks = _ordered(wholly)
    return BlockMask.from_kv_blocks(
        *partial_blocks,
        *whole_blocks,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(queries, keys),
    )


def _padded_segments(
    segments: Tensor, queries: int, keys: int, before: int
) -> tuple[Tensor, Tensor]:
    """The segments of queries and keys, the last one repeated: [batch, queries], [batch, keys]."""
    missing = max(before + queries, keys) - segments.shape[1]
    last = segments[:, -1:].expand(-1, missing)
    longer = torch.cat([segments, last], dim=1)
    # Cloned, so that strides do not depend on `before`: dynamo compiles again for each.
    query_segments = longer[:, before : before + queries]
    key_segments = longer[:, :keys]
    return (
        query_segments.clone(memory_format=torch.contiguous_format),
        key_segments.clone(memory_format=torch.contiguous_format),
    )


def _segments_of_blocks(query_segments: Tensor, key_segments: Tensor) -> tuple[Tensor, Tensor]:
    """Whether two blocks' ranges of segments overlap, and whether both hold the same one segment.

    Returns [batch, 1, query blocks, key blocks] bool twice.
    """
    query_blocks = query_segments.unflatten(1, (-1, BLOCK))[:, :, None]
    key_blocks = key_segments.unflatten(1, (-1, BLOCK))[:, None]
    lowest_query, highest_query = query_blocks.aminmax(dim=-1)
    lowest_key, highest_key = key_blocks.aminmax(dim=-1)
    overlap = (lowest_query <= highest_key) & (lowest_key <= highest_query)
    same = (lowest_query == highest_key) & (lowest_key == highest_query)
    return overlap[:, None], same[:, None]


# A mask made in evaluation serves training too, which refuses tensors of inference mode.
_cached_mask = lru_cache(MOST_SHAPES)(torch.inference_mode(False)(_block_mask))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [batch, 1, query blocks, key blocks] -> int32: how many are set in each row, and the
    indices of all blocks of a row, those that are set first."""
    indices = blocks.byte().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32), indices.to(torch.int32)
