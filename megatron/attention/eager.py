"""The definition of attention with distance tables: all scores at once, in float32 or float64."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron.attention.content import ScoreBias


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **more: Any) -> Tensor:
    """See megatron.attention.attention: memory grows with queries · keys."""
    attended = probabilities(q, k, bias, **more)
    return (attended @ v.to(attended.dtype)).to(q.dtype)


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
    score_bias: ScoreBias | None = None,
) -> Tensor:
    """How much of each key a query takes: [batch, heads, queries, keys], at least float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys = q.shape[2], k.shape[2]
    key = torch.arange(keys, device=q.device)
    query = key[keys - queries :]
    distance = (query[:, None] - key).clamp(min=0)  # [queries, keys]

    products = q.to(dtype) @ k.to(dtype).transpose(-1, -2)  # [batch, heads, queries, keys]
    scores = products / math.sqrt(q.shape[-1])
    if weight is not None:
        scores = scores * weight[:, distance]
    if bias is not None:
        scores = scores + bias[:, distance]
    if index_bias is not None:
        scores = scores + index_bias(query, key)
    if score_bias is not None:
        scores = scores + score_bias.bias(query).to(dtype)
    if on_scores is not None:
        scores = on_scores(scores)
    scores = scores.masked_fill(mask(query, key, window, chunk, segments), -math.inf)
    return scores.softmax(dim=-1)


def mask(
    query: Tensor, key: Tensor, window: int | None, chunk: int | None, segments: Tensor | None
) -> Tensor:
    """True where a query may not attend to a key, by indices [queries] and [keys].

    Returns [queries, keys] bool; with segments [batch, 1, queries, keys].
    """
    distance = query[:, None] - key
    masked = distance < 0
    if window is not None:
        masked = masked | (distance >= window)
    if chunk is not None:
        chunks_between = query[:, None] // chunk - key // chunk
        masked = masked | (chunks_between > 1)
    if segments is not None:
        other_document = segments[:, query, None] != segments[:, None, key]
        masked = masked | other_document[:, None]
    return masked
