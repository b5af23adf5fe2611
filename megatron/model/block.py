"""The parts of a transformer layer, with GPT-NeoX's parameter names and layout."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.attention.encoded import AttentionInputs, LayerInputs, attend_with_encoding
from megatron.attention.terms import for_each_query_head
from megatron.layer_kinds import ATTENTION, Layer, layer_called, register_layer
from megatron.model.settings import Architecture, ResidualOutput
from megatron.positions import Position
from megatron.positions.layers import features_of_head

PER_PAIR = 4  # operations of a query, a key and a feature: the score and the weighted sum, 2 each


def normalisation(features: int, model: Architecture) -> nn.Module:
    """The model's kind of norm over the last `features`: [..., features] -> same.

    rmsnorm divides by the root mean square (arXiv 1910.07467).
    """
    epsilon, learned = model.layernorm_epsilon, model.use_weight_in_norms
    if model.norm == "rmsnorm":
        return nn.RMSNorm(features, epsilon, elementwise_affine=learned)
    return nn.LayerNorm(features, epsilon, learned, bias=model.use_bias_in_norms)


class Attention(Layer):
    """Parts that layers with an encoding share.

    features, value_features: of a head's queries and keys, and of its values
    softmax_type: as in Megatron-LM; softmax_offset [heads] is the learned score of the sink.
    """

    has_encoding = True

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

    @classmethod
    def encoded_features(cls, model: Any) -> int:
        """Features of a head that the encoding acts on."""
        return features_of_head(model)

    @classmethod
    def check_position(cls, position: Position) -> None:
        """Raises UserError if the layer cannot have this encoding."""

    def sink(self, x: Tensor) -> Tensor | None:
        """The score of the sink on the device of x: [heads], or None."""
        return x.new_zeros(self.heads) if self.off_by_one else self.softmax_offset

    def operations(self, keys: float) -> float:
        """Those of scores and weighted sums."""
        return PER_PAIR * keys * self.heads * (self.features + self.value_features) / 2


@register_layer(ATTENTION)
class SelfAttention(Attention):
    """Causal self-attention, with keys and values that groups of query heads share.

    The fused projection is ordered [key heads, (q of each head of the group, k, v), head_dim]; with
    one query head for each key head that is GPT-NeoX's [heads, (q, k, v), head_dim].
    heads_per_query: so many neighbouring heads have one q, which the encoding changes for each.
    qk_norm: full normalises all heads of a token together, before they are parted (OLMo 2).
    """

    def __init__(self, model: Architecture) -> None:
        super().__init__(model, model.features_of_head, model.features_of_head)
        hidden = model.hidden_size
        self.key_heads = model.key_heads
        self.widths = self.widths_of_key_head(model)
        self.heads_per_query = model.heads_per_query
        width, bias = model.key_heads * sum(self.widths), model.use_bias_in_attn_linear
        self.query_key_value = nn.Linear(hidden, width, bias=bias)
        self.query_norm = self.key_norm = None
        self.normed_together = model.qk_norm == "full"
        if model.qk_norm:
            query_heads = model.query_heads if self.normed_together else 1
            key_heads = model.key_heads if self.normed_together else 1
            self.query_norm = normalisation(query_heads * self.features, model)
            self.key_norm = normalisation(key_heads * self.features, model)
        self.clip = model.clip_qkv
        width, bias = self.heads * self.features, model.bias_in_attn_output
        self.dense = ResidualOutput(width, hidden, bias=bias)

    def widths_of_key_head(self, model: Architecture) -> list[int]:
        """Features of the queries that share one key head, of its key and its value."""
        queries = model.num_attention_heads // model.key_heads // model.heads_per_query
        return [queries * self.features, self.features, self.features]

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x [batch, length, hidden] -> [batch, length - first_query, hidden]."""
        batch, length, _ = x.shape
        fused = self.query_key_value(x).view(batch, length, self.key_heads, -1)
        q, *others, k, v = fused.split(self.widths, dim=3)
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
        return self.output(out.transpose(1, 2), *others)

    def output(self, out: Tensor, *others: Tensor) -> Tensor:
        """What all heads read, [batch, queries, heads, head_dim] -> [batch, queries, hidden].

        others: what a subclass projects beside q, k and v, of all tokens
        """
        return self.dense(out.flatten(2))


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


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); dropout acts on what is added.

    With parallel_residual both read the same x: x + attention(norm(x)) + mlp(norm(x)), and with
    shared_norm the same norm(x). norm_placement: post has the norms of what is added in their
    place, x + norm(attention(x)), and both has these beside them.
    kind: of the layer that stands in the place of attention
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
        self.attention = layer_called(kind)(model)
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
