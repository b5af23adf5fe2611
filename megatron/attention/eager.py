"""The definition of attention with distance tables: the whole score matrix, in float32 or float64."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **more: Any) -> Tensor:
    """See megatron.attention.attention: memory grows with queries · keys."""
    seen = probabilities(q, k, bias, **more)
    return (seen @ v.to(seen.dtype)).to(q.dtype)


def probabilities(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    *,
    weight: Tensor | None,
    window: int | None,
    chunk: int | None,
    segments: Tensor | None,
    index_bias: Callable[[Tensor, Tensor], Tensor] | None,
    on_scores: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """How much of each key a query takes: [batch, heads, queries, keys], at least float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys = q.shape[2], k.shape[2]
    index = torch.arange(keys, device=q.device)
    distance = index[keys - queries :, None] - index  # [queries, keys]
    back = distance.clamp(min=0)
    scores = (
        q.to(dtype) @ k.to(dtype).transpose(-1, -2) / math.sqrt(q.shape[-1])
    )  # [batch, heads, queries, keys]
    if weight is not None:
        scores = scores * weight[:, back]
    if bias is not None:
        scores = scores + bias[:, back]
    if index_bias is not None:
        scores = scores + index_bias(index[keys - queries :], index)
    if on_scores is not None:
        scores = on_scores(scores)
    scores = scores.masked_fill(
        hidden(index[keys - queries :], index, window, chunk, segments), -math.inf
    )
    return scores.softmax(dim=-1)


def hidden(
    query: Tensor, key: Tensor, window: int | None, chunk: int | None, segments: Tensor | None
) -> Tensor:
    """What a query does not see, by indices [queries] and [keys]: [queries, keys] or [batch, 1, queries, keys] bool."""
    distance = query[:, None] - key
    unseen = distance < 0
    if window is not None:
        unseen = unseen | (distance >= window)
    if chunk is not None:
        unseen = unseen | (query[:, None] // chunk - key // chunk > 1)
    if segments is not None:
        unseen = unseen | (segments[:, query, None] != segments[:, None, key])[:, None]
    return unseen
