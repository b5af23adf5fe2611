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

from megatron.attention.eager import ScoreBias, product

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
    """The bias of q·k/√features and its weight, as in megatron.attention.attention.

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
    nearest = min(distance, window or distance)  # keys that are near and visible
    near, far, wide_v = near.scaled(dtype), far.scaled(dtype), v.to(dtype)
    index = torch.arange(keys, device=v.device)
    outputs = []
    for start in range(0, queries, rows):
        block = slice(start, min(start + rows, queries))
        first, end = keys - queries + start, keys - queries + block.stop
        columns_near = slice(max(0, first - nearest + 1), end)
        far_begin = 0 if window is None else max(0, first - window + 1)
        far_end = max(far_begin, end - distance)
        columns_far = slice(far_begin, far_end if sinks is None else min(sinks, far_end))
        versions = ((far, columns_far), (near, columns_near))
        scores_far, scores_near = (_scores(*one, tables, block, end) for one in versions)

        back = index[first:end, None] - index[columns_near]
        scores_near = scores_near.masked_fill_((back < 0) | (back >= nearest), -math.inf)
        # Only the last far columns may be near for some query, and with a window the first too far.
        back = index[first:end, None] - index[columns_far]
        count = back.shape[1]
        partly = slice(max(0, count - len(back)), None)
        scores_far[..., partly].masked_fill_(back[:, partly] < distance, -math.inf)
        if window is not None:
            partly = slice(0, len(back))
            scores_far[..., partly].masked_fill_(back[:, partly] >= window, -math.inf)

        probabilities = torch.cat([scores_far, scores_near], dim=-1).softmax(dim=-1)
        of_near = probabilities[..., count:] @ wide_v[:, :, columns_near]
        of_far = probabilities[..., :count] @ wide_v[:, :, columns_far]
        outputs.append(of_near + of_far)
    return torch.cat(outputs, dim=2).to(v.dtype)


def _scores(version: Keys, columns: slice, tables: Tables, block: slice, end: int) -> Tensor:
    """Scores of a block of queries and some keys: [batch, heads, rows, columns].

    end: of the keys up to the block's last query
    """
    scores = version.q[:, :, block] @ version.k[:, :, columns].mT
    if tables.bias is not None or tables.weight is not None:
        back = version.query[block, None] - version.key[columns]
        back = back.clamp(min=0)  # of masked keys
        if tables.weight is not None:
            scores = scores * tables.weight[:, back]
        if tables.bias is not None:
            scores = scores + tables.bias[:, back]
    if tables.score_bias is not None:
        u, w = tables.score_bias.relative(block, slice(0, end), scores.dtype)
        scores = scores + product(u, w[:, :, columns])
    return scores
