"""The definition of attention with distance tables: all scores at once, in float32 or float64."""

import math

import torch
from torch import Tensor

from megatron.attention.terms import Terms, mask


def eager(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor | None]:
    """See megatron.attention.attention: memory grows with queries · keys."""
    out, lse = attended(all_scores(q, k, terms), v, terms.needs_lse)
    return out.to(q.dtype), lse


def attended(scores: Tensor, v: Tensor, needs_lse: bool) -> tuple[Tensor, Tensor | None]:
    """softmax(scores) v in the dtype of the scores, and their lse."""
    v = v.to(scores.dtype)
    if not needs_lse:
        return scores.softmax(dim=-1) @ v, None
    lse = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - lse).exp() @ v, lse[..., 0]


def all_scores(
    q: Tensor,
    k: Tensor,
    terms: Terms,
    *,
    query: Tensor | None = None,
    distance: Tensor | None = None,
) -> Tensor:
    """Scores, -inf where masked: [batch, heads, queries, keys], at least float32.

    query [queries]: their indices among the keys, if they are not those of the last keys;
    distance [queries, keys]: the columns of the tables, if they are not those of the indices
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys = q.shape[2], k.shape[2]
    key = torch.arange(keys, device=q.device)
    if query is None:
        query = key[keys - queries :]
    if distance is None:
        distance = (query[:, None] - key).clamp(min=0)

    if terms.scores is None:
        products = q.to(dtype) @ k.to(dtype).transpose(-1, -2)  # [batch, heads, queries, keys]
        scores = products / math.sqrt(q.shape[-1])
    else:
        function, tensors = terms.scores
        far_q, far_k, near = function(tensors, 0, queries)
        scores = torch.cat([far_q @ far_k.mT, near], dim=-1)
    if terms.weight is not None:
        scores = scores * terms.weight[:, distance]
    if terms.bias is not None:
        scores = scores + terms.bias[:, distance]
    if terms.index_bias is not None:
        scores = scores + terms.index_bias(query, key)
    if terms.content is not None:
        scores = scores + terms.content.bias().to(dtype)
    if terms.on_scores is not None:
        scores = terms.on_scores(scores)
    masked = mask(query, key, terms.window, terms.chunk, terms.segments)
    return scores.masked_fill(masked, -math.inf)
