"""Attention with two versions of the score: one for near keys, another for far ones.

ReRoPE, Self-Extend, LM-Infinite and attention sinks rotate queries and keys twice, at the places
where they stand and at places that were trained. The distance decides which product counts. A block
of queries computes each product for the keys that may need it, so that both together cost little
more than one. Memory grows with length. It is for evaluation; autograd works and keeps all scores.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron.attention.eager import ScoreBias

BLOCK = 256  # queries
MOST_SCORES = 2**23
"""Scores that exist at once: 32 MiB in float32."""


@dataclass(frozen=True)
class Keys:
    """Queries and keys of one version, and the distances that its tables are asked for.

    q [batch, heads, queries, features], k [batch, heads, keys, features];
    query [queries] int64, key [keys] int64: a bias by distance is that of query - key
    """

    q: Tensor
    k: Tensor
    query: Tensor
    key: Tensor

    def scaled(self, dtype: torch.dtype) -> "Keys":
        """The same in a wider dtype, with q divided by √features."""
        q = self.q.to(dtype) / math.sqrt(self.q.shape[-1])
        return replace(self, q=q, k=self.k.to(dtype))


@dataclass(frozen=True)
class Tables:
    """What is added to q·k/√features, and what multiplies it, as in megatron.attention.attention.

    bias, weight [heads, distances] or None; score_bias: by content
    """

    bias: Tensor | None = None
    weight: Tensor | None = None
    score_bias: ScoreBias | None = None


def near_far(
    near: Keys,
    far: Keys,
    v: Tensor,
    *,
    distance: int,
    window: int | None = None,
    sinks: int | None = None,
    tables: Tables | None = None,
) -> Tensor:
    """Causal attention: `near` for keys less than `distance` tokens back, `far` for all others.

    v [batch, heads, keys, features]; the queries are those of the last keys;
    window: a query attends to the last `window` keys up to its own alone;
    sinks: of the far keys, only the first `sinks` of the text are visible; excludes a window.

    Returns [batch, heads, queries, features] in q's dtype; scores are float32 or wider.
    """
    assert window is None or sinks is None
    tables = tables or Tables()
    dtype = torch.promote_types(near.q.dtype, torch.float32)
    batch, heads, queries = near.q.shape[:3]
    keys = v.shape[2]
    rows = max(1, min(BLOCK, MOST_SCORES // (batch * heads * keys)))
    near, far, wide_v = near.scaled(dtype), far.scaled(dtype), v.to(dtype)
    outputs = []
    for start in range(0, queries, rows):
        block = slice(start, min(start + rows, queries))
        first, last = keys - queries + start, keys - queries + block.stop - 1
        columns_near = slice(max(0, first - min(distance, window or distance) + 1), last + 1)
        columns_far = _far_columns(first, last, distance, window, sinks)
        scores_near = _scores(near, tables, block, columns_near)
        scores_far = _scores(far, tables, block, columns_far)
        if tables.score_bias is not None:
            u, w = tables.score_bias.relative(block, slice(0, last + 1), dtype)
            scores_near = scores_near + _content(u, w, columns_near)
            scores_far = scores_far + _content(u, w, columns_far)

        back = _back(first, block, columns_near, v.device)
        masked = (back < 0) | (back >= min(distance, window or distance))
        scores_near = scores_near.masked_fill_(masked, -math.inf)
        _mask_far(scores_far, _back(first, block, columns_far, v.device), distance, window)

        probabilities = torch.cat([scores_far, scores_near], dim=-1).softmax(dim=-1)
        count = columns_far.stop - columns_far.start
        of_near = probabilities[..., count:] @ wide_v[:, :, columns_near]
        of_far = probabilities[..., :count] @ wide_v[:, :, columns_far]
        outputs.append(of_near + of_far)
    return torch.cat(outputs, dim=2).to(v.dtype)


def _far_columns(
    first: int, last: int, distance: int, window: int | None, sinks: int | None
) -> slice:
    """The keys that are far and visible for some query of a block."""
    end = max(0, last - distance + 1)
    if sinks is not None:
        return slice(0, min(sinks, end))
    begin = 0 if window is None else max(0, first - window + 1)
    return slice(begin, max(begin, end))


def _mask_far(scores: Tensor, back: Tensor, distance: int, window: int | None) -> None:
    """Mask what is near in place: the last columns, and with a window the first ones."""
    rows = back.shape[0]
    partly_near = slice(max(0, back.shape[1] - rows), None)
    masked = back[:, partly_near] < distance
    scores[..., partly_near].masked_fill_(masked, -math.inf)
    if window is not None:
        partly_hidden = slice(0, rows)
        masked = back[:, partly_hidden] >= window
        scores[..., partly_hidden].masked_fill_(masked, -math.inf)


def _scores(version: Keys, tables: Tables, block: slice, columns: slice) -> Tensor:
    """Scores of a block of queries and some keys: [batch, heads, rows, columns]."""
    scores = version.q[:, :, block] @ version.k[:, :, columns].mT
    if tables.bias is None and tables.weight is None:
        return scores
    back = version.query[block, None] - version.key[columns]
    back = back.clamp(min=0)  # of masked keys
    if tables.weight is not None:
        scores = scores * tables.weight[:, back]
    if tables.bias is not None:
        scores = scores + tables.bias[:, back]
    return scores


def _content(u: Tensor | None, w: Tensor, columns: slice) -> Tensor:
    """A bias by content of these keys: [batch, heads, rows or 1, columns]."""
    w = w[:, :, columns]
    return w.sum(-1)[:, :, None] if u is None else u @ w.mT


def _back(first: int, block: slice, columns: slice, device: torch.device) -> Tensor:
    """How many tokens each key stands before each query: [rows, columns] int64."""
    query = torch.arange(first, first + block.stop - block.start, device=device)
    key = torch.arange(columns.start, columns.stop, device=device)
    return query[:, None] - key
