"""Multi-head latent attention (MLA)."""

import math
from collections import OrderedDict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megatron.attention.encoded import (
    AttentionInputs,
    attend_encoded,
    encoded_queries_keys,
    scaled,
)
from megatron.errors import UserError
from megatron.hybrids.options import chosen_options
from megatron.layer_kinds import register_layer
from megatron.model.block import Attention
from megatron.model.settings import Architecture, ResidualOutput
from megatron.positions import Position
from megatron.positions.layers import features_of_head

EPSILON = 1e-6  # epsilon of the latents' norms, as in DeepSeek's and Kimi's code


@register_layer("mla")
class LatentAttention(Attention):
    """Causal self-attention that stores only a latent and one shared key per token.

    DeepSeek-V2 (arXiv 2405.04434): keys and values of all heads are computed from a latent of
    kv_lora_rank features. A head's query has qk_nope_head_dim features without positions, and
    qk_rope_head_dim features for the encoding, whose key all heads share. With q_lora_rank, queries
    come from a latent too. Rows are ordered as in transformers' DeepSeek-V3.
    """

    options: ClassVar = dict.fromkeys(
        ["q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], int
    )

    @classmethod
    def sizes(cls, model: Any) -> dict[str, Any]:
        options = chosen_options(model, cls.options)
        heads = model.num_attention_heads
        unread = {
            "num_key_value_heads": (model.num_key_value_heads or heads) < heads,
            "qk_norm": model.qk_norm,
            "clip_qkv": model.clip_qkv,
        }
        for key, is_set in unread.items():
            if is_set and {*model.layers}.isdisjoint({"attention", "gated_attention"}):
                raise UserError(
                    f"{key}: has no effect on mla layers; remove it, or use attention in layers"
                )
        encoded = cls.encoded_features(model)
        plain = options["qk_nope_head_dim"] or features_of_head(model)
        return options | {
            "kv_lora_rank": options["kv_lora_rank"] or 4 * features_of_head(model),
            "qk_rope_head_dim": encoded,
            "qk_nope_head_dim": plain,
            "v_head_dim": options["v_head_dim"] or features_of_head(model),
            "head_dim": plain + encoded,
        }

    @classmethod
    def encoded_features(cls, model: Any) -> int:
        return chosen_options(model, cls.options)["qk_rope_head_dim"] or max(
            1, features_of_head(model) // 2
        )

    @classmethod
    def check_position(cls, position: Position) -> None:
        changes_keys = position.has("on_queries_keys") or position.has("on_queries_keys_by_content")
        reasons = {
            "block_scores needs the keys of each head": position.has("block_scores"),
            "it changes the keys of each head in a different way, but all heads share one"
            " key": changes_keys and not position.grouped_queries,
            "it makes queries and keys wider": position.score_width != 1,
            "neighbouring heads share a query": position.heads_per_query != 1,
        }
        for reason, applies in reasons.items():
            if applies:
                raise UserError(
                    f"layers: mla does not work with {type(position).__name__}, because {reason};"
                    " use attention, or another encoding"
                )

    def __init__(self, model: Architecture) -> None:
        sizes = self.sizes(model)
        rank, query_rank = sizes["kv_lora_rank"], sizes["q_lora_rank"]
        encoded, plain = sizes["qk_rope_head_dim"], sizes["qk_nope_head_dim"]
        value_features = sizes["v_head_dim"]
        super().__init__(model, plain + encoded, value_features)
        hidden, bias = model.hidden_size, model.use_bias_in_attn_linear
        width = self.heads * self.features
        self.widths_of_latent, self.widths_of_query = [rank, encoded], [plain, encoded]
        if query_rank is None:
            self.query = nn.Linear(hidden, width, bias=False)
        else:
            through_a_latent = {
                "down": nn.Linear(hidden, query_rank, bias=bias),
                "norm": nn.RMSNorm(query_rank, EPSILON),
                "up": nn.Linear(query_rank, width, bias=False),
            }
            self.query = nn.Sequential(OrderedDict(through_a_latent))
        self.latent_key = nn.Linear(hidden, rank + encoded, bias=bias)
        self.latent_norm = nn.RMSNorm(rank, EPSILON)
        self.key_value = nn.Linear(rank, self.heads * (plain + value_features), bias=False)
        self.dense = ResidualOutput(
            self.heads * value_features, hidden, bias=model.bias_in_attn_output
        )

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x [batch, length, hidden] -> [batch, length - first_query, hidden]."""
        if inputs.method is not None:
            raise UserError(
                "method: does not work with mla layers; remove it, or use attention in layers"
            )
        q = self.query(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        if self.stretch != 1:
            q = q * self.stretch
        plain_q, q = q.split(self.widths_of_query, dim=3)  # [batch, heads, length, features]
        latent, key = self.latent_key(x)[:, None].split(self.widths_of_latent, dim=3)
        latent = self.latent_norm(latent)  # [batch, 1, length, kv_lora_rank]
        rank = latent.shape[3]

        plain, values = plain_q.shape[3], self.value_features
        q, key = encoded_queries_keys(q, key, x, inputs)
        q = torch.cat([plain_q, q], dim=3)
        if absorbs := self.absorbs(x, inputs):
            matrices = self.key_value.weight.unflatten(0, (self.heads, -1))
            # [heads, features, rank] each
            key_matrices, value_matrices = matrices.split([plain, values], dim=1)
            stretch = math.sqrt((rank + key.shape[3]) / self.features)
            q = torch.cat([plain_q @ key_matrices, q[..., plain:]], dim=3) * stretch
        q = scaled(q, inputs)
        if inputs.cache is not None:
            key, latent = inputs.cache.append(key, latent)
        k, v = self.latents(key, latent) if absorbs else self.keys_values(key, latent)
        out = attend_encoded(q, k, v, x, inputs, self.sink(x))
        if absorbs:
            out = out[..., :rank] @ value_matrices.mT
        return self.dense(out.transpose(1, 2).flatten(2))

    def absorbs(self, x: Tensor, inputs: AttentionInputs) -> bool:
        """Whether queries read the latents directly, with fewer operations than for keys and
        values.

        This is so for few queries after a cached text.
        """
        rank, plain = self.widths_of_latent[0], self.widths_of_query[0]
        both = plain + self.value_features
        operations = x.shape[1] * (2 * rank - both) - rank * both
        return inputs.start > 0 and inputs.cache is not None and operations < 0

    def latents(self, key: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """The latents and the shared key, used directly as keys and values of every head.

        [batch, 1, keys, features] each -> [batch, heads, keys, features of both] twice
        """
        both = torch.cat([latent, key], dim=3).expand(-1, self.heads, -1, -1)
        return both, both

    def keys_values(self, key: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of every head, from the shared key and the latent.

        [batch, 1, keys, features] each -> [batch, heads, keys, features] each
        """
        by_head = self.key_value(latent).unflatten(3, (self.heads, -1))[:, 0].transpose(1, 2)
        plain_k, v = by_head.split([self.widths_of_query[0], self.value_features], dim=3)
        return torch.cat([plain_k, key.expand(-1, self.heads, -1, -1)], dim=3), v
