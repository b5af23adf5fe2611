"""The attention of a layer whose queries and keys stand at other positions, by a method."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.attention import attention
from megatron.attention.content import ScoreBias
from megatron.attention.near_far import Keys, Tables, near_far
from megatron.model.methods import DynamicNTK, Method, NearFar
from megatron.positions import Position


@dataclass(frozen=True)
class Text:
    """What a layer attends with, before its encoding has acted on queries and keys.

    q [batch, heads, queries, head_dim] of the last keys; k, v [batch, key heads, keys, head_dim];
    index [keys] int64: where keys stand in the text, some of which may be forgotten;
    bias [heads, distances] or None; query_scale [queries] or [heads, queries]: multiplies the
    queries; options: of megatron.attention.attention
    """

    position: Position
    q: Tensor
    k: Tensor
    v: Tensor
    index: Tensor
    bias: Tensor | None
    query_scale: Tensor | None
    options: dict[str, Any]

    @property
    def start(self) -> int:
        """The index of the first query."""
        return self.end - self.q.shape[2]

    @property
    def end(self) -> int:
        """The index behind the last query."""
        return int(self.index[-1]) + 1

    def turned(
        self, rows: slice, query: Tensor, key: Tensor, stretch: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Some queries, and the first keys, where they stand for a method.

        query [rows], key [keys]: int64 or float -> [batch, heads, rows, features] and
        [batch, heads, keys, features], without groups
        """
        q, k = self.q[:, :, rows], self.k[:, :, : len(key)]
        if self.position.has("on_queries_keys_at"):
            first = self.start + rows.start
            dtype = self.position.origin.dtype
            q, k = self.position.on_queries_keys_at(
                q, k, query.to(dtype), key.to(dtype), start=first, stretch=stretch
            )
        if self.query_scale is not None:
            q = (q * self.query_scale[..., rows, None]).to(q.dtype)
        return q, for_each_query_head(k, q.shape[1] // k.shape[1])

    def values(self, keys: int) -> Tensor:
        """Those of the first keys, without groups: [batch, heads, keys, head_dim]."""
        v = self.v[:, :, :keys]
        return for_each_query_head(v, self.q.shape[1] // v.shape[1])


def attention_by_method(method: Method, text: Text) -> Tensor:
    """What queries get from the keys of a text: [batch, heads, queries, head_dim]."""
    if isinstance(method, DynamicNTK):
        return _by_base(method, text)
    assert isinstance(method, NearFar)
    key = text.index
    query = key[-text.q.shape[2] :]
    rows = slice(0, len(query))
    far_query, far_key = method.far_query(query), method.far_key(key)
    near = Keys(*text.turned(rows, query, key), query, key)
    far = Keys(*text.turned(rows, far_query, far_key), far_query.long(), far_key.long())
    sinks = method.first_keys
    tables = Tables(text.bias, text.options["weight"], ScoreBias.of(text.options["score_bias"]))
    return near_far(
        near,
        far,
        text.values(len(key)),
        distance=method.window,
        window=text.options["window"] if sinks is None else None,
        sinks=sinks,
        tables=tables,
    )


def _by_base(method: DynamicNTK, text: Text) -> Tensor:
    """One part of the queries after the other, each with the base of its length."""
    start, end = text.start, text.end
    forgotten = end - len(text.index)
    score_bias = text.options["score_bias"]
    outputs = []
    for first, stop, stretch in method.parts(start, end, text.position.shape.train_length):
        rows = slice(first - start, stop - start)
        keys = stop - forgotten
        query, key = text.index[first - forgotten : keys], text.index[:keys]
        q, k = text.turned(rows, query, key, stretch)
        options = dict(text.options)
        if score_bias is not None:
            u, w = score_bias
            options["score_bias"] = (None if u is None else u[:, :, rows], w[:, :, :keys])
        outputs.append(attention(q, k, text.values(keys), text.bias, **options))
    return torch.cat(outputs, dim=2)


def for_each_query_head(x: Tensor, group: int) -> Tensor:
    """Repeat each head for its group: [batch, key heads, keys, head_dim] -> [batch, heads, …]."""
    return x if group == 1 else x.repeat_interleave(group, dim=1)
