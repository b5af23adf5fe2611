"""The definition of attention with distance tables: all scores at once, in float32 or float64."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BlockOfScores = Callable[[Sequence[Tensor], int, int], tuple[Tensor, Tensor, Tensor]]
BlockScores = tuple[BlockOfScores, Sequence[Tensor]]
"""See `Position.block_scores`."""


@dataclass(frozen=True)
class ScoreBias:
    """A bias by content of low rank: u·w for query and key, in the precision that far sums need.

    A sum over all tokens before a key, such as FoX's, reaches 10⁵ in a text of 16384 tokens, where
    float32 has two digits after the point. What counts is the difference between neighbours. So w
    may be float64, and every block of queries subtracts the w of its last token before it rounds.

    u [batch, heads, queries, rank] or None for ones, w [batch, heads, keys, rank]
    """

    u: Tensor | None
    w: Tensor

    @classmethod
    def of(cls, score_bias: tuple[Tensor | None, Tensor] | None) -> "ScoreBias | None":
        """From u and w as `attention` takes them: rank one has no last dimension."""
        if score_bias is None:
            return None
        u, w = score_bias
        if w.dim() == 3:
            w = w[..., None]
            u = None if u is None else u[..., None]
        return cls(u, w)

    @property
    def features(self) -> int:
        """How many factors `relative` gives."""
        rank = self.w.shape[3]
        return rank if self.u is None or rank == 1 else rank + 1

    def of_queries(self, rows: slice, keys: int) -> "ScoreBias":
        """That of some queries, and of the first `keys` keys, which end at the last query's own."""
        u = None if self.u is None else self.u[:, :, rows]
        return ScoreBias(u, self.w[:, :, :keys])

    def of_heads(self, heads: slice) -> "ScoreBias":
        """That of some heads."""
        u = None if self.u is None else self.u[:, heads]
        return ScoreBias(u, self.w[:, heads])

    def bias(self, query: Tensor) -> Tensor:
        """u·(w of the key less w of the query's own): [batch, heads, queries, keys].

        query [queries]: where each query's own key is among all keys. What is subtracted is the
        same for all keys of a query, so the softmax ignores it.
        """
        difference = self.w[:, :, None] - self.w[:, :, query, None]
        if self.u is not None:
            difference = self.u[:, :, :, None] * difference
        return difference.sum(-1)

    def relative(
        self, rows: slice, keys: slice, dtype: torch.dtype
    ) -> tuple[Tensor | None, Tensor]:
        """u of these queries, and w of these keys less that of the last: both in `dtype`.

        With a rank above one, also u less that of the last query, and one factor more: 1 for each
        query, and for each key its product with the last query. So products that cancel, such as
        those of positions, are never large.
        """
        w = self.w[:, :, keys]
        near = w - w[:, :, -1:].detach()
        if self.u is None:
            return None, near.to(dtype)
        u = self.u[:, :, rows]
        if self.features > u.shape[3]:
            last = u[:, :, -1:].detach()
            of_last = (last * near).sum(-1, keepdim=True)
            near = torch.cat([near, of_last], dim=-1)
            u = F.pad(u - last, (0, 1), value=1.0)
        return u.to(dtype), near.to(dtype)


def product(u: Tensor | None, w: Tensor) -> Tensor:
    """u·w over the rank: [batch, heads, queries or 1, keys]; u None for ones."""
    return w.sum(-1)[:, :, None] if u is None else u @ w.mT


def eager(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **more: Any) -> Tensor:
    """See megatron.attention.attention: memory grows with queries · keys."""
    attended = probabilities(q, k, bias, **more)
    return (attended @ v.to(attended.dtype)).to(q.dtype)


def probabilities(q: Tensor, k: Tensor, bias: Tensor | None, **more: Any) -> Tensor:
    """How much of each key a query takes: [batch, heads, queries, keys], at least float32."""
    return all_scores(q, k, bias, **more).softmax(dim=-1)


def all_scores(
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
    block_scores: BlockScores | None = None,
) -> Tensor:
    """Scores, -inf where masked: [batch, heads, queries, keys], at least float32."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    queries, keys = q.shape[2], k.shape[2]
    key = torch.arange(keys, device=q.device)
    query = key[keys - queries :]
    distance = (query[:, None] - key).clamp(min=0)  # [queries, keys]

    if block_scores is None:
        products = q.to(dtype) @ k.to(dtype).transpose(-1, -2)  # [batch, heads, queries, keys]
        scores = products / math.sqrt(q.shape[-1])
    else:
        function, tensors = block_scores
        far_q, far_k, own = function(tensors, 0, queries)
        scores = torch.cat([far_q @ far_k.mT, own], dim=-1)
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
    return scores.masked_fill(mask(query, key, window, chunk, segments), -math.inf)


def mask(
    query: Tensor, key: Tensor, window: int | None, chunk: int | None, segments: Tensor | None
) -> Tensor:
    """True where a query may not attend to a key, by indices [queries] and [keys].

    Returns [queries, keys] bool; with segments [batch, 1, queries, keys].
    """
    masked = (key > query[:, None]) | (key < first_visible(query, window, chunk)[:, None])
    if segments is not None:
        other_document = segments[:, query, None] != segments[:, None, key]
        masked = masked | other_document[:, None]
    return masked


def first_visible(query: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """The first key that a window and chunks leave to queries at these indices: same shape."""
    first = torch.zeros_like(query)
    if window is not None:
        first = first.maximum(query - window + 1)
    if chunk is not None:
        first = first.maximum((query // chunk - 1) * chunk)
    return first


def visible_keys(
    query: Tensor,
    window: int | None,
    chunk: int | None,
    *,
    sinks: int | None = None,
    begin: Tensor | None = None,
) -> Tensor:
    """How many keys queries at these indices attend to: [queries] or, with begin, [batch, queries].

    sinks: first keys of the text that stay visible beside a window
    begin [batch, queries]: index of the first token of each query's document
    """
    first = first_visible(query, window, chunk)
    if begin is not None:
        first = first.maximum(begin)
    return query + 1 - first + first.clamp(max=sinks or 0)
