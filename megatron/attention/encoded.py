"""Attention with any encoding: what it does to queries, keys and scores, all in one call.

Whoever has an encoding and queries, keys and values calls `encoded`. Our own layers hand a record
of inputs, which is made once per pass for all layers with one encoding, to `attend_with_encoding`.
"""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.attention.backends import attend
from megatron.attention.documents import Documents, by_document
from megatron.attention.flex import check_applied
from megatron.attention.terms import (
    Content,
    Terms,
    check_lengths,
    for_each_query_head,
    visible_keys,
)
from megatron.errors import UserError

BY_CONTENT = ("on_queries_keys_by_content", "score_bias", "block_scores", "on_scores")
"""Hooks that are given the layer's input."""
BEFORE_LAYERS = ("prepare", "on_embeddings", "on_embeddings_by_ids")


@dataclass
class LayerCache:
    """Earlier tokens of one layer, for `encoded` and for our model. Each layer needs its own.

    memory: what its encoding keeps, or a layer without keys, by name; the first dimension is the
    batch
    keys, values: [batch, key heads, tokens so far, features], once there are some. The encoding has
    changed the keys.

    A trainer with a store of its own gives an object with `length`, `memory` and `append` instead.
    """

    memory: dict[str, Tensor] = field(default_factory=dict)
    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return 0 if self.keys is None else self.keys.shape[2]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Take new ones; those of all tokens so far: [batch, key heads, keys, features] each."""
        if self.keys is not None and self.values is not None:
            k = torch.cat([self.keys, k], dim=2)
            v = torch.cat([self.values, v], dim=2)
        self.keys, self.values = k, v
        return k, v

    def select(self, texts: Tensor) -> None:
        """Keep some texts of the batch, by their indices [texts] int64."""
        if self.keys is not None and self.values is not None:
            self.keys = self.keys.index_select(0, texts)
            self.values = self.values.index_select(0, texts)
        for name, state in self.memory.items():
            self.memory[name] = state.index_select(0, texts)


@dataclass(frozen=True)
class Text:
    """Queries, keys and values of a layer, before its encoding has acted on queries and keys.

    q [batch, heads, queries, head_dim] of the last keys; k, v [batch, key heads, keys, head_dim];
    query_scale [heads or 1, queries]: multiplies the queries
    """

    position: Any
    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms
    query_scale: Tensor | None = None

    @property
    def start(self) -> int:
        """The index of the first query."""
        return self.k.shape[2] - self.q.shape[2]

    def turned(
        self, rows: slice, query: Tensor, key: Tensor, stretch: float = 1.0, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Some queries, and the keys from `first` on, where they stand for a method.

        query [rows], key [keys]: int64 or float -> [batch, heads, rows, features] and
        [batch, heads, keys, features], without groups and in the dtype of q
        """
        q = self.q[:, :, rows]
        k = self.k[:, :, first : first + len(key)].to(q.dtype)
        position = self.position
        if position.has("on_queries_keys_at"):
            query = query.to(position.origin)
            key = key.to(position.origin)
            start = self.start + rows.start
            q, k = position.on_queries_keys_at(q, k, query, key, start=start, stretch=stretch)
        if self.query_scale is not None:
            scale = self.query_scale[..., rows, None]
            q = (q * scale).to(q.dtype)
        return q, for_each_query_head(k, q.shape[1] // k.shape[1])


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What every layer reads beside x.

    start: index of the first token of x; length: tokens of the text so far, the cached ones too
    documents: where they lie, if the layer keeps them apart
    cache: what it keeps of earlier tokens; None to keep nothing
    context: `Context` (megatron/parallel/context.py), which knows the parts of the text that other
        processes have; None if x has all of it
    """

    start: int = 0
    length: int = 0
    documents: Documents | None = None
    cache: LayerCache | None = None
    context: Any = None

    @property
    def memory(self) -> dict[str, Tensor]:
        """That of the cache."""
        return {} if self.cache is None else self.cache.memory


@dataclass(frozen=True)
class AttentionInputs(LayerInputs):
    """Inputs of a layer with attention beside x, the same for every token of a step.

    position: the encoding (megatron/positions/base.py); terms: tables, window and chunk
    method: `Method` (megatron/evaluation/methods.py), which changes where tokens stand; None:
        nothing does. With one, the cache holds keys as they were before on_queries_keys, and the
        text is one document
    query_scale [heads or 1, queries], or with a batch before it: multiplies the queries;
    backend, self_check: of megatron.attention.attention;
    first_query: tokens before it are only read, and have no place in the output
    """

    position: Any
    terms: Terms
    backend: str = "auto"
    self_check: bool = True
    method: Any = None
    query_scale: Tensor | None = None
    first_query: int = 0


def encoded(
    encoding: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None = None,
    *,
    window: int | None = None,
    chunk: int | None = None,
    segments: Tensor | None = None,
    restart: bool = False,
    sink: Tensor | None = None,
    cache: LayerCache | None = None,
    applied: Collection[str] = (),
    backend: str = "auto",
) -> Tensor:
    """Causal attention of a layer with an encoding of `megatron.positions.build`.

    q [batch, heads, new, head_dim], k [batch, key heads, new, head_dim] and v [batch, key heads,
    new, features] of the new tokens, as the layer projects them. Fewer heads of q, where
    neighbouring heads have one query (`heads_per_query`).
    x [batch, new, hidden]: the layer's input, for encodings that read content
    window, chunk, sink, backend: see `attention`
    segments [batch, tokens so far] int: a query attends only to keys of its own segment; restart:
    positions begin again at each
    cache: earlier tokens of this layer; it takes the new ones too
    applied: hooks that the model calls before its first layer. Those on embeddings are refused
    unless they are named. `prepare` is called here unless it is named, and it must be by an
    encoding in training that draws positions, since all layers of a pass need the same.

    Returns [batch, heads, new, features] in v's dtype, computed outside autocast. UserError if
    something does not fit, or an x is missing.
    """
    fault, shape = f"encoded: {type(encoding).__name__}:", encoding.shape
    batch, _, new, _ = q.shape
    start = 0 if cache is None else cache.length
    length = start + new
    if x is None and any(encoding.has(hook) for hook in BY_CONTENT):
        raise UserError(f"{fault} reads content; give x, the input of the layer's attention")
    heads = shape.heads // encoding.heads_per_query
    sizes = {
        "q": (q, [batch, heads, new, shape.head_dim]),
        "k": (k, [batch, k.shape[1], new, shape.head_dim]),
        "v": (v, [batch, k.shape[1], new, v.shape[-1]]),
    }
    if segments is not None:
        sizes["segments"] = segments, [batch, length]
    for name, (tensor, expected) in sizes.items():
        if list(tensor.shape) != expected:
            raise UserError(f"{fault} {name} is {list(tensor.shape)}, and must be {expected}")
    encoding.check_heads(k.shape[1], encoding.heads_per_query)
    draws = encoding.training and "prepare" not in encoding.in_parts
    check_applied(fault, encoding, BEFORE_LAYERS if draws else BEFORE_LAYERS[1:], applied)
    check_lengths(window=window, chunk=chunk)
    if "prepare" not in applied:
        prepare([encoding], length, start)
    documents = None
    if segments is not None:
        encoding.check_documents(restart=restart)
        ends = segments.diff(dim=1, append=segments[:, -1:]) != 0
        documents = Documents(ends, segments, slice(start, length), restart)
    # Autocast would round scores and biases.
    with torch.autocast(q.device.type, enabled=False):
        tables = encoding.distance_bias(length), encoding.distance_weight(length)
        terms, options = Terms(*tables, window, chunk), {"backend": backend, "cache": cache}
        inputs = inputs_of(encoding, terms, slice(start, length), length, documents, **options)
        q = for_each_query_head(q.to(v.dtype), encoding.heads_per_query)
        return attend_with_encoding(q, k.to(v.dtype), v, x, inputs, sink)


def prepare(encodings: Collection[Any], length: int, earlier: int = 0) -> None:
    """Prepare encodings for a pass over a text of `length`, of which `earlier` tokens are cached.

    Raises UserError if the cached keys do not serve this text.
    """
    for encoding in dict.fromkeys(encodings):
        for part in (encoding, *encoding.inside):
            part.made.clear()  # every pass makes its own cosines
        encoding.prepare(length)
        if earlier:
            encoding.check_cached(earlier, length)


def inputs_of(
    encoding: Any,
    terms: Terms,
    new: slice,
    length: int,
    documents: Documents | None,
    *,
    log_n: bool = False,
    method: Any = None,
    **options: Any,
) -> AttentionInputs:
    """What layers with these tables, window and chunk read beside x, for the tokens at `new`.

    log_n: whether queries are multiplied by log-n scaling; options: further fields
    """
    scale = None
    if log_n or encoding.has("score_scale"):
        window, sinks = (terms.window, None) if method is None else method.visible(terms.window)
        query = torch.arange(new.start, new.stop, device=encoding.origin.device)
        begin = None if documents is None else query - documents.places
        count = visible_keys(query, window, terms.chunk, sinks=sinks, begin=begin)
        scale = encoding.score_scale(count)
        if log_n:
            by_log_n = encoding.log_n_scale(count)[..., None, :]
            scale = by_log_n if scale is None else scale * by_log_n
    return AttentionInputs(
        encoding,
        terms,
        method=method,
        query_scale=scale,
        start=new.start,
        length=length,
        documents=documents,
        **options,
    )


def attend_with_encoding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    inputs: AttentionInputs,
    sink: Tensor | None = None,
) -> Tensor:
    """The output of a layer's attention, in which its encoding acts on what the layer projects.

    q [batch, heads, length, head_dim], k, v [batch, key heads, length, head_dim] of the new tokens,
    x [batch, length, hidden] the attention's input; sink: see `attention`
    -> [batch, heads, length - first_query, features of v]
    """
    q, k = encoded_queries_keys(q, k, x, inputs)
    q = scaled(q, inputs)
    scores, position = None, inputs.position
    if position.has("block_scores"):
        scores = position.block_scores(q, k, x, inputs.memory)
    if inputs.cache is not None:
        k, v = inputs.cache.append(k, v)
    return attend_encoded(q, k, v, x, inputs, sink, scores)


def encoded_queries_keys(
    q: Tensor, k: Tensor, x: Tensor | None, inputs: AttentionInputs
) -> tuple[Tensor, Tensor]:
    """Queries and keys as the encoding changes them by positions and by content."""
    position, documents = inputs.position, inputs.documents
    if documents is not None and documents.restart and not position.by_distance:
        q, k = by_document(position.on_queries_keys, (q, k), documents)
    elif inputs.method is None:
        q, k = position.on_queries_keys(q, k, inputs.start)
    return position.on_queries_keys_by_content(q, k, x, inputs.memory)


def scaled(q: Tensor, inputs: AttentionInputs) -> Tensor:
    """Queries by their scale; a method multiplies them itself."""
    if inputs.query_scale is None or inputs.method is not None:
        return q
    return (q * inputs.query_scale[..., None]).to(q.dtype)


def attend_encoded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor | None,
    inputs: AttentionInputs,
    sink: Tensor | None = None,
    scores: Any = None,
) -> Tensor:
    """`attend_with_encoding` after its first half: k and v are those of all tokens.

    scores: as of `Position.block_scores`
    """
    position, documents, method = inputs.position, inputs.documents, inputs.method
    on_scores = content = None
    if position.has("on_scores"):
        on_scores = partial(position.on_scores, x=x, memory=inputs.memory)
    if position.has("score_bias"):
        content = Content.of(position.score_bias(x, inputs.memory), q.shape[2])
    terms = replace(
        inputs.terms,
        segments=None if documents is None else documents.numbers,
        index_bias=position.index_bias if position.has("index_bias") else None,
        on_scores=on_scores,
        content=content,
        scores=scores,
        sink=sink,
    )
    query_scale, unread = inputs.query_scale, inputs.first_query
    if unread and scores is None and on_scores is None:
        later, all_keys = slice(unread, None), slice(None)
        q, terms, unread = q[:, :, later], terms.part(later, all_keys), 0
        query_scale = None if query_scale is None else query_scale[..., later]
    if method is None:
        run = attend
        if inputs.context is not None:
            run = inputs.context.attend
            group = q.shape[1] // k.shape[1]
            k, v = for_each_query_head(k, group), for_each_query_head(v, group)
        out = run(q, k, v, terms, inputs.backend, self_check=inputs.self_check)
    else:
        assert inputs.context is None  # evaluation refuses it
        out = method.attend(Text(position, q, k, v, terms, query_scale))
    return out[:, :, unread:]
