"""The parts of a transformer layer, with GPT-NeoX's parameter names and layout."""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.attention import attend
from megatron.attention.terms import Content, Terms
from megatron.model.documents import by_document
from megatron.model.gated_delta import (
    GatedDelta,
    KimiDelta,
    LayerInputs,
    Ranks,
    for_each_query_head,
)
from megatron.model.settings import Architecture, ResidualOutput
from megatron.positions import Position
from megatron.positions.layers import ATTENTION, LATENT

LATENT_EPSILON = 1e-6  # of the norms of latents, in DeepSeek's code and in Kimi's


class Context(Ranks, Protocol):
    """How the parts of a text attend to each other, where others compute the other parts."""

    def part(self, length: int) -> slice:
        """The places of the own tokens in a text of `length`."""
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: Terms,
        backend: str,
        *,
        self_check: bool,
    ) -> Tensor:
        """megatron.attention.attend for the own queries, with keys and values of all parts."""
        ...


@dataclass(frozen=True)
class Text:
    """Queries, keys and values of a layer, before its encoding has acted on queries and keys.

    q [batch, heads, queries, head_dim] of the last keys; k, v [batch, key heads, keys, head_dim];
    query_scale [heads or 1, queries]: multiplies the queries
    unencoded: how many features of each, the first ones, the encoding leaves as they are
    """

    position: Position
    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms
    query_scale: Tensor | None = None
    unencoded: int = 0

    @property
    def start(self) -> int:
        """The index of the first query."""
        return self.k.shape[2] - self.q.shape[2]

    def turned(
        self, rows: slice, query: Tensor, key: Tensor, stretch: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Some queries, and the first keys, where they stand for a method.

        query [rows], key [keys]: int64 or float -> [batch, heads, rows, features] and
        [batch, heads, keys, features], without groups
        """
        q = self.q[:, :, rows]
        k = self.k[:, :, : len(key)]
        position, first = self.position, self.unencoded
        if position.has("on_queries_keys_at"):
            query = query.to(position.origin)
            key = key.to(position.origin)
            pair = position.on_queries_keys_at(
                q[..., first:],
                k[..., first:],
                query,
                key,
                start=self.start + rows.start,
                stretch=stretch,
            )
            q, k = (
                torch.cat([x[..., :first], encoded], dim=3) if first else encoded
                for x, encoded in zip((q, k), pair, strict=True)
            )
        if self.query_scale is not None:
            scale = self.query_scale[..., rows, None]
            q = (q * scale).to(q.dtype)
        return q, for_each_query_head(k, q.shape[1] // k.shape[1])


class Method(Protocol):
    """A way to read longer texts, which changes where tokens stand."""

    @property
    def backend(self) -> str | None:
        """What computes attention in place of the model's backend, or None."""
        ...

    def table_length(self, keys: int) -> int:
        """The number of distances that a table must have for so many keys."""
        ...

    def visible(self, window: int | None) -> tuple[int | None, int | None]:
        """The window of a layer's queries, and the first keys that they see beside it."""
        ...

    def attend(self, text: Text) -> Tensor:
        """The output of attention over a text: [batch, heads, queries, head_dim]."""
        ...


@dataclass(frozen=True)
class AttentionInputs(LayerInputs):
    """Inputs of a layer with attention beside x, the same for every token of a step.

    terms: tables, window and chunk; start: index of the first query;
    method: changes where tokens stand; None: nothing does. With one, the cache holds keys as they
    were before on_queries_keys, and the text is one document;
    query_scale [heads or 1, queries], or with a batch before it: multiplies the queries;
    backend, self_check: of megatron.attention.attention;
    first_query: tokens before it are only read, and have no place in the output
    """

    position: Position
    terms: Terms
    backend: str = "auto"
    self_check: bool = True
    method: Method | None = None
    start: int = 0
    query_scale: Tensor | None = None
    first_query: int = 0
    context: Context | None = field(default=None, kw_only=True)


def normalisation(features: int, model: Architecture) -> nn.Module:
    """The model's kind of norm over the last `features`: [..., features] -> same.

    rmsnorm divides by the root mean square (arXiv 1910.07467).
    """
    epsilon, learned = model.layernorm_epsilon, model.use_weight_in_norms
    if model.norm == "rmsnorm":
        return nn.RMSNorm(features, epsilon, elementwise_affine=learned)
    return nn.LayerNorm(features, epsilon, learned, bias=model.use_bias_in_norms)


class Unencoded(NamedTuple):
    """What queries and keys have beside the part that the encoding acts on, of an mla layer.

    q [batch, heads, length, features]: of the queries
    keys_values: from that part of the key and the latent, [batch, 1, keys, features] each, k and v
    stretch: multiplies the queries, where keys have another width than the scores are divided by
    """

    q: Tensor
    keys_values: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    stretch: float = 1.0


def attend_with_encoding(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    x: Tensor,
    inputs: AttentionInputs,
    sink: Tensor | None = None,
    unencoded: Unencoded | None = None,
) -> Tensor:
    """The output of a layer's attention, in which its encoding acts on what the layer projects.

    q [batch, heads, length, head_dim], k, v [batch, key heads, length, head_dim] of the new tokens,
    x [batch, length, hidden] the attention's input; sink: see `attention`
    unencoded: then k is the key that heads share, and v the latent
    -> [batch, heads, length - first_query, features of v]
    """
    position, documents, method = inputs.position, inputs.documents, inputs.method
    if documents is not None and documents.restart and not position.by_distance:
        q, k = by_document(position.on_queries_keys, (q, k), documents)
    elif method is None:
        q, k = position.on_queries_keys(q, k, inputs.start)
    memory = inputs.memory
    q, k = position.on_queries_keys_by_content(q, k, x, memory)
    if unencoded is not None:
        q = torch.cat([unencoded.q, q], dim=3)
        if unencoded.stretch != 1:
            q = q * unencoded.stretch
    if inputs.query_scale is not None and method is None:
        q = (q * inputs.query_scale[..., None]).to(q.dtype)
    scores = on_scores = content = None
    if position.has("block_scores"):
        scores = position.block_scores(q, k, x, memory)
    if inputs.cache is not None:
        k, v = inputs.cache.append(k, v)
    if unencoded is not None:
        k, v = unencoded.keys_values(k, v)
    if position.has("on_scores"):
        on_scores = partial(position.on_scores, x=x, memory=memory)
    if position.has("score_bias"):
        content = Content.of(position.score_bias(x, memory), x.shape[1])
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
        group = q.shape[1] // k.shape[1]
        k = for_each_query_head(k, group)
        v = for_each_query_head(v, group)
        run = attend if inputs.context is None else inputs.context.attend
        out = run(q, k, v, terms, inputs.backend, self_check=inputs.self_check)
    else:
        assert inputs.context is None  # evaluation refuses it
        first = 0 if unencoded is None else unencoded.q.shape[3]
        out = method.attend(Text(position, q, k, v, terms, query_scale, first))
    return out[:, :, unread:]


class Attention(nn.Module):
    """Parts that layers with an encoding share.

    features, value_features: of a head's queries and keys, and of its values
    softmax_type: as in Megatron-LM; softmax_offset [heads] is the learned score of the sink.
    """

    def __init__(self, model: Architecture, features: int, value_features: int) -> None:
        super().__init__()
        self.heads = model.num_attention_heads
        self.features, self.value_features = features, value_features
        # Of queries: scores are divided by the root of all features later.
        self.stretch = math.sqrt(features / (model.query_pre_attn_scalar or features))
        self.off_by_one = model.softmax_type == "off-by-one"
        self.softmax_offset = None
        if model.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(self.heads))

    def sink(self, x: Tensor) -> Tensor | None:
        """The score of the sink on the device of x: [heads], or None."""
        return x.new_zeros(self.heads) if self.off_by_one else self.softmax_offset


class SelfAttention(Attention):
    """Causal self-attention, with keys and values that groups of query heads share.

    The fused projection is ordered [key heads, (q of each head of the group, k, v), head_dim]; with
    one query head for each key head that is GPT-NeoX's [heads, (q, k, v), head_dim].
    attention_gate (arXiv 2505.06708): what a head reads is multiplied by sigmoid(x W), one number
    or one for each feature; the rows of W stand between q and k, as in the authors' code.
    heads_per_query: so many neighbouring heads have one q, which the encoding changes for each.
    qk_norm: full normalises all heads of a token together, before they are parted (OLMo 2).
    """

    def __init__(self, model: Architecture) -> None:
        super().__init__(model, model.features_of_head, model.features_of_head)
        hidden, width = model.hidden_size, model.attention_width
        self.key_heads = model.key_heads
        self.widths = model.widths_of_key_head
        self.gated = model.attention_gate is not None
        self.heads_per_query = model.heads_per_query
        self.query_key_value = nn.Linear(
            hidden, model.projected_width, bias=model.use_bias_in_attn_linear
        )
        self.query_norm = self.key_norm = None
        self.normed_together = model.qk_norm == "full"
        if model.qk_norm:
            query_heads = model.query_heads if self.normed_together else 1
            key_heads = model.key_heads if self.normed_together else 1
            self.query_norm = normalisation(query_heads * self.features, model)
            self.key_norm = normalisation(key_heads * self.features, model)
        self.clip = model.clip_qkv
        self.dense = ResidualOutput(width, hidden, bias=model.bias_in_attn_output)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x [batch, length, hidden] -> [batch, length - first_query, hidden]."""
        batch, length, _ = x.shape
        fused = self.query_key_value(x).view(batch, length, self.key_heads, -1)
        q, gate, k, v = fused.split(self.widths, dim=3)
        if self.clip is not None:
            q, k, v = (part.clamp(-self.clip, self.clip) for part in (q, k, v))
        q, k, v = (part.unflatten(3, (-1, self.features)) for part in (q, k, v))
        if self.query_norm is not None and self.key_norm is not None:
            first = 2 if self.normed_together else 4  # the features of all heads, or of each
            q = self.query_norm(q.flatten(first)).view_as(q)
            k = self.key_norm(k.flatten(first)).view_as(k)
        if self.stretch != 1:
            q = q * self.stretch
        # [batch, heads or key heads, length, head_dim]
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        q = for_each_query_head(q, self.heads_per_query)

        out = attend_with_encoding(q, k, v, x, inputs, self.sink(x))
        out = out.transpose(1, 2)  # [batch, queries, heads, head_dim]
        if self.gated:
            gate = gate[:, inputs.first_query :].reshape(batch, *out.shape[1:3], -1)
            out = out * gate.sigmoid()
        return self.dense(out.flatten(2))


class LatentAttention(Attention):
    """Causal self-attention that keeps of each token a latent and one key for all heads (MLA).

    DeepSeek-V2 (arXiv 2405.04434): keys and values of all heads come from the latent. Beside
    qk_nope_head_dim features of its own, a head's query has qk_rope_head_dim that the encoding acts
    on, and the key of these is shared. Rows are ordered as in transformers' DeepSeek-V3.
    """

    def __init__(self, model: Architecture) -> None:
        rank, encoded, plain, value_features = model.latent_sizes
        super().__init__(model, plain + encoded, value_features)
        hidden, query_rank = model.hidden_size, model.q_lora_rank
        bias, width = model.use_bias_in_attn_linear, self.heads * self.features
        self.widths_of_latent, self.widths_of_query = [rank, encoded], [plain, encoded]
        if query_rank is None:
            self.query = nn.Linear(hidden, width, bias=False)
        else:
            through_a_latent = {
                "down": nn.Linear(hidden, query_rank, bias=bias),
                "norm": nn.RMSNorm(query_rank, LATENT_EPSILON),
                "up": nn.Linear(query_rank, width, bias=False),
            }
            self.query = nn.Sequential(OrderedDict(through_a_latent))
        self.latent_key = nn.Linear(hidden, rank + encoded, bias=bias)
        self.latent_norm = nn.RMSNorm(rank, LATENT_EPSILON)
        self.key_value = nn.Linear(rank, self.heads * (plain + value_features), bias=False)
        self.dense = ResidualOutput(
            self.heads * value_features, hidden, bias=model.bias_in_attn_output
        )

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x [batch, length, hidden] -> [batch, length - first_query, hidden]."""
        q = self.query(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        if self.stretch != 1:
            q = q * self.stretch
        plain_q, q = q.split(self.widths_of_query, dim=3)  # [batch, heads, length, features]
        latent, key = self.latent_key(x)[:, None].split(self.widths_of_latent, dim=3)
        latent = self.latent_norm(latent)  # [batch, 1, length, kv_lora_rank]

        # After a cached text, few queries read latents with fewer operations than keys and values.
        rank, plain, values = latent.shape[3], plain_q.shape[3], self.value_features
        operations = x.shape[1] * (2 * rank - plain - values) - rank * (plain + values)
        absorbs = inputs.start > 0 and inputs.cache is not None and inputs.method is None
        absorbs = absorbs and operations < 0
        unencoded = Unencoded(plain_q, self.keys_values)
        matrices = self.key_value.weight.unflatten(0, (self.heads, -1))
        # [heads, features, rank] each
        key_matrices, value_matrices = matrices.split([plain, values], dim=1)
        if absorbs:
            stretch = math.sqrt((rank + q.shape[3]) / self.features)
            unencoded = Unencoded(plain_q @ key_matrices, self.latents, stretch)
        out = attend_with_encoding(q, key, latent, x, inputs, self.sink(x), unencoded)
        if absorbs:
            out = out[..., :rank] @ value_matrices.mT
        return self.dense(out.transpose(1, 2).flatten(2))

    def latents(self, key: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Latents and the shared key themselves as keys, and as values, of every head.

        [batch, 1, keys, features] each -> [batch, heads, keys, features of both] twice
        """
        both = torch.cat([latent, key], dim=3).expand(-1, self.heads, -1, -1)
        return both, both

    def keys_values(self, key: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Those of every head from the shared key and the latent.

        [batch, 1, keys, features] each -> [batch, heads, keys, features] each
        """
        by_head = self.key_value(latent).unflatten(3, (self.heads, -1))[:, 0].transpose(1, 2)
        plain_k, v = by_head.split([self.widths_of_query[0], self.value_features], dim=3)
        return torch.cat([plain_k, key.expand(-1, self.heads, -1, -1)], dim=3), v


def gated(x: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """activation(gate) * up (arXiv 2002.05202), the gate first: [..., 2 width] -> [..., width]."""
    gate, up = x.chunk(2, dim=-1)
    return activation(gate) * up


gelu_new = partial(F.gelu, approximate="tanh")  # as GPT-2 computes it
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": gelu_new,
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": partial(gated, activation=F.silu),
    "geglu": partial(gated, activation=F.gelu),
    "geglu_new": partial(gated, activation=gelu_new),
}
"""Activations by the names that `activation` may have."""


class MLP(nn.Module):
    """hidden -> width -> activation -> hidden; twice the width before an activation with a gate."""

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        hidden, bias = model.hidden_size, model.use_bias_in_mlp
        self.activation = ACTIVATIONS[model.activation]
        self.dense_h_to_4h = nn.Linear(hidden, model.widened, bias=bias)
        self.dense_4h_to_h = ResidualOutput(model.mlp_width, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, length, hidden] -> same."""
        return self.dense_4h_to_h(self.activation(self.dense_h_to_4h(x)))


LAYERS = {
    ATTENTION: SelfAttention,
    LATENT: LatentAttention,
    "gated_delta": GatedDelta,
    "kda": KimiDelta,
}
"""Kinds of layers, by the names that entries of `layers` may have."""


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); dropout acts on what is added.

    With parallel_residual both read the same x: x + attention(norm(x)) + mlp(norm(x)), and with
    shared_norm the same norm(x). norm_placement: post has the norms of what is added in their
    place, x + norm(attention(x)), and both has these beside them.
    kind: one of LAYERS, which stands in the place of attention
    """

    def __init__(self, model: Architecture, kind: str = ATTENTION) -> None:
        super().__init__()
        self.dropout = model.hidden_dropout
        self.parallel_residual = model.parallel_residual
        self.shared_norm = model.shared_norm
        before, after = model.norm_placement != "post", model.norm_placement != "pre"

        def norm(exists: bool) -> nn.Module:
            return normalisation(model.hidden_size, model) if exists else nn.Identity()

        self.input_layernorm = norm(before)
        self.attention = LAYERS[kind](model)
        self.attention_output_norm = norm(after)
        self.post_attention_layernorm = norm(before and not model.shared_norm)
        self.mlp = MLP(model)
        self.mlp_output_norm = norm(after)

    def forward(self, x: Tensor, inputs: LayerInputs) -> Tensor:
        """x [batch, length, hidden] -> same, or the tokens that attention leaves.

        inputs: what its kind reads beside x
        """
        normed = self.input_layernorm(x)
        added = self.attention_output_norm(self.attention(normed, inputs))
        first = x.shape[1] - added.shape[1]
        x, normed = x[:, first:], normed[:, first:]
        attended = read = x + F.dropout(added, self.dropout, self.training)
        if self.parallel_residual:
            read = normed if self.shared_norm else x
        added = self.mlp_output_norm(self.mlp(self.post_attention_layernorm(read)))
        return attended + F.dropout(added, self.dropout, self.training)
