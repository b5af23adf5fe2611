"""The definition of attention with distance tables: the whole score matrix, in float32 or float64."""

import math

import torch
from torch import Tensor


def eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    window: int | None = None,
    segments: Tensor | None = None,
) -> Tensor:
    """See megatron.attention.attention: memory grows with queries · keys."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys = q.shape[2], k.shape[2]
    position = torch.arange(keys, device=q.device)
    distance = position[keys - queries :, None] - position  # [queries, keys]
    back = distance.clamp(min=0)
    scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) / math.sqrt(q.shape[-1])  # [batch, heads, queries, keys]
    if weight is not None:
        scores = scores * weight[:, back]
    if bias is not None:
        scores = scores + bias[:, back]
    visible = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if segments is not None:
        same = segments[:, keys - queries :, None] == segments[:, None, :]  # [batch, queries, keys]
        visible = visible & same[:, None]
    scores = scores.masked_fill(~visible, -math.inf)
    return (scores.softmax(dim=-1) @ v.to(dtype)).to(q.dtype)
