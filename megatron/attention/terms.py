"""The terms of a softmax beside q, k and v: one record that every backend reads, and its masks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.errors import UserError

BlockOfScores = Callable[[Sequence[Tensor], int, int], tuple[Tensor, Tensor, Tensor]]
BlockScores = tuple[BlockOfScores, Sequence[Tensor]]
"""See `Position.block_scores`."""
IndexBias = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Content:
    """A bias by content of low rank, u·(w of the key - w of the query's own key).

    So it is 0 at a query's own key: a sum over all tokens before a key, such as FoX's, reaches 10⁵
    in a text of 16384 tokens, where float32 has two digits after the point. What counts is the
    difference between neighbours. So w may be float64, and a block of queries subtracts the w of
    its last token before it rounds (`relative`).

    u [batch, heads, queries, rank] or None for ones, w [batch, heads, keys, rank];
    own_w [batch, heads, queries, rank]: w of each query's own key
    """

    u: Tensor | None
    w: Tensor
    own_w: Tensor

    @classmethod
    def of(cls, score_bias: tuple[Tensor | None, Tensor] | None, queries: int) -> "Content | None":
        """From u and w as `attention` takes them: rank one has no last dimension."""
        if score_bias is None:
            return None
        u, w = score_bias
        if w.dim() == 3:
            w = w[..., None]
            u = None if u is None else u[..., None]
        return cls(u, w, w[:, :, w.shape[2] - queries :])

    @property
    def rank(self) -> int:
        return self.w.shape[3]

    @property
    def features(self) -> int:
        """How many factors `relative` gives."""
        return self.rank if self.u is None or self.rank == 1 else self.rank + 1

    def part(self, rows: slice, keys: slice, heads: slice = slice(None)) -> "Content":
        """Of some queries, keys and heads."""
        u = None if self.u is None else self.u[:, heads, rows]
        return Content(u, self.w[:, heads, keys], self.own_w[:, heads, rows])

    def bias(self) -> Tensor:
        """The whole bias: [batch, heads, queries, keys]."""
        difference = self.w[:, :, None] - self.own_w[:, :, :, None]
        if self.u is not None:
            difference = self.u[:, :, :, None] * difference
        return difference.sum(-1)

    def relative(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        """u, and w less that of the last key, the last query's own: both in `dtype`.

        With a rank above one, also u less that of the last query, and one factor more: 1 for each
        query, and for each key its product with the last query. So products that cancel, such as
        those of positions, are never large.
        """
        near = self.w - self.w[:, :, -1:].detach()
        u = self.u
        if u is None:
            return None, near.to(dtype)
        if self.features > self.rank:
            last = u[:, :, -1:].detach()
            last_product = (last * near).sum(-1, keepdim=True)
            near = torch.cat([near, last_product], dim=-1)
            u = F.pad(u - last, (0, 1), value=1.0)
        return u.to(dtype), near.to(dtype)


def for_each_query_head(x: Tensor, group: int) -> Tensor:
    """Repeat each head for its group: [batch, key heads, keys, head_dim] -> [batch, heads, …].

    One key head for all is repeated as a view, without a copy.
    """
    return x if group == 1 else x[:, :, None].expand(-1, -1, group, -1, -1).flatten(1, 2)


def product(u: Tensor | None, w: Tensor) -> Tensor:
    """u·w over the rank: [batch, heads, queries or 1, keys]; u None for ones."""
    return w.sum(-1)[:, :, None] if u is None else u @ w.mT


@dataclass(frozen=True)
class Terms:
    """What an attention adds to q·k/√head_dim, and which keys it hides: see `attention`.

    content: `score_bias` as `Content`; scores: `block_scores`;
    needs_lse: whether the logarithm of each query's sum of exponentials is read. A backend leaves
    no number per query out of it: a sink, or another set of keys, is compared with it.
    """

    bias: Tensor | None = None
    weight: Tensor | None = None
    window: int | None = None
    chunk: int | None = None
    segments: Tensor | None = None
    index_bias: IndexBias | None = None
    on_scores: Callable[[Tensor], Tensor] | None = None
    content: Content | None = None
    scores: BlockScores | None = None
    sink: Tensor | None = None
    needs_lse: bool = False

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """What may learn: bias, weight, and u, w and own_w of the content."""
        content = self.content
        parts = (None, None, None) if content is None else (content.u, content.w, content.own_w)
        return self.bias, self.weight, *parts

    def with_tensors(
        self,
        bias: Tensor | None = None,
        weight: Tensor | None = None,
        u: Tensor | None = None,
        w: Tensor | None = None,
        own_w: Tensor | None = None,
    ) -> "Terms":
        """The same terms with other tensors, or without any."""
        content = None if w is None or own_w is None else Content(u, w, own_w)
        return replace(self, bias=bias, weight=weight, content=content)

    def part(self, rows: slice, keys: slice) -> "Terms":
        """The terms of some queries and keys; the last key is the last query's own."""
        content, index_bias = self.content, self.index_bias
        if content is not None:
            content = content.part(rows, keys)
        if index_bias is not None and keys.start:
            index_bias = partial(_shifted, index_bias, keys.start)
        segments = None if self.segments is None else self.segments[:, keys]
        return replace(self, content=content, index_bias=index_bias, segments=segments)

    @property
    def is_causal_alone(self) -> bool:
        """Whether nothing is added under the causal mask, but for content and given scores."""
        masks_and_tables = (
            self.bias,
            self.weight,
            self.window,
            self.chunk,
            self.segments,
            self.index_bias,
        )
        return all(term is None for term in masks_and_tables)


def _shifted(index_bias: IndexBias, start: int, query: Tensor, key: Tensor) -> Tensor:
    """An index bias by indices that are counted from `start` on."""
    return index_bias(query + start, key + start)


def check_lengths(**lengths: int | None) -> None:
    """Raises UserError for a window or chunk below 1."""
    for key, length in lengths.items():
        if length is not None and length < 1:
            raise UserError(f"{key}: {length} must be at least 1, or left out")


def with_sink(out: Tensor, lse: Tensor, sink: Tensor | None) -> Tensor:
    """The output beside one key more, whose score is the sink [heads] and whose value is 0."""
    if sink is None:
        return out
    sink_lse = sink.to(lse.dtype)[:, None].expand_as(lse)
    return merge(out, lse, torch.zeros_like(out), sink_lse)[0]


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over two sets of keys, from the output and the lse of each.

    out, other [batch, heads, queries, features], lse, other_lse [batch, heads, queries] -> as these
    """
    share = (other_lse - lse).sigmoid()[..., None]
    merged = torch.lerp(out.to(share.dtype), other.to(share.dtype), share)
    return merged.to(out.dtype), torch.logaddexp(lse, other_lse)


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
