"""A GPT with a positional encoding of any kind, for transformers.

The files beside this one define the encodings and attention. They need torch alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from megatron.attention.sdpa import sdpa
from megatron.interop.exported.configuration_positions_gpt import PositionsGPTConfig
from megatron.model.activations import ACTIVATIONS
from megatron.positions.base import Position, Shape
from megatron.positions.registry import build

DEPENDS_ON_INDEX = "attention depends on the token's number in the text"


def encodings_of(config: PositionsGPTConfig) -> list[dict[str, Any]]:
    """The encodings of a model as {name: options}: one for all layers, or several."""
    if config.encodings is not None:
        return config.encodings
    count = 1 if config.pos_emb_shared else config.num_hidden_layers
    return [{str(config.pos_emb): config.pos_emb_args or {}}] * count


def build_position(config: PositionsGPTConfig, index: int) -> Position:
    """One of the encodings, with first values, in float32 on the CPU.

    transformers builds models without memory and in the model's dtype. An encoding computes its
    fixed numbers when it is built, and needs both.
    """
    [(name, options)] = encodings_of(config)[index].items()
    heads, head_dim = config.num_attention_heads, config.head_dim
    shape = Shape(heads, head_dim, config.hidden_size, config.train_length)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            position = build(name, shape, **options)
    finally:
        torch.set_default_dtype(dtype)
    position.use_paper_precision(config.paper_precision)
    return position


@dataclass(frozen=True)
class Padding:
    """Tokens of a batch that are none.

    real [batch, keys] bool; before: how many of each text come before its first token
    """

    real: Tensor
    before: list[int]

    @classmethod
    def of(cls, attention_mask: Tensor | None, batch: int, keys: int) -> "Padding | None":
        """None where every token is real; ValueError for a mask that is not understood."""
        if attention_mask is None:
            return None
        if attention_mask.shape != (batch, keys):
            raise ValueError(
                f"attention_mask: {list(attention_mask.shape)} must be [{batch}, {keys}], with 1"
                " for tokens and 0 for padding"
            )
        real = attention_mask.bool()
        if bool(real.all()):
            return None
        before = (real.cumsum(1) == 0).sum(1)
        last = keys - (real.flip(1).cumsum(1) == 0).sum(1)
        if bool((real.sum(1) != (last - before).clamp(min=0)).any()):
            raise ValueError("attention_mask: padding between tokens of a text is not offered")
        return cls(real, before.tolist())


@dataclass(frozen=True)
class Inputs:
    """What attention needs beside x; see `sdpa` for bias, weight, window, chunk.

    start: index of the first token; keys: tokens so far
    """

    start: int
    keys: int
    bias: Tensor | None
    weight: Tensor | None
    window: int | None
    chunk: int | None
    query_scale: Tensor | None
    padding: Padding | None


def text_by_text(
    act: Callable[..., tuple[Tensor, ...]], tensors: tuple[Tensor, ...], start: int, inputs: Inputs
) -> tuple[Tensor, ...]:
    """`act(*tensors, start)`, with tokens counted from the first of each text.

    tensors [batch, ..., length, features] each -> same; padding stays as it is
    """
    if inputs.padding is None:
        return act(*tensors, start)
    length = tensors[0].shape[-2]
    texts = []
    for row, before in enumerate(inputs.padding.before):
        first = min(max(before - start, 0), length)
        parts = tuple(tensor[row : row + 1] for tensor in tensors)
        if first < length:
            tokens = tuple(part[..., first:, :] for part in parts)
            changed = act(*tokens, start + first - before)
            parts = tuple(
                torch.cat([part[..., :first, :], new], dim=-2)
                for part, new in zip(parts, changed, strict=True)
            )
        texts.append(parts)
    return tuple(torch.cat(column) for column in zip(*texts, strict=True))


def normalisation(features: int, config: PositionsGPTConfig) -> nn.Module:
    """The model's kind of norm over the last `features`."""
    if config.norm == "rmsnorm":
        return nn.RMSNorm(features, eps=config.layernorm_epsilon)
    return nn.LayerNorm(features, eps=config.layernorm_epsilon, bias=config.use_bias_in_norms)


class SelfAttention(nn.Module):
    """Causal attention; keys and values may be shared by groups of query heads."""

    def __init__(self, config: PositionsGPTConfig, layer: int) -> None:
        super().__init__()
        heads, head_dim = config.num_attention_heads, config.head_dim
        self.layer = layer
        self.key_heads = config.num_key_value_heads
        self.group = heads // self.key_heads
        projected = (heads + 2 * self.key_heads) * head_dim
        self.query_key_value = nn.Linear(
            config.hidden_size, projected, bias=config.use_bias_in_attn_linear
        )
        self.query_norm = normalisation(head_dim, config) if config.qk_norm else None
        self.key_norm = normalisation(head_dim, config) if config.qk_norm else None
        self.dense = nn.Linear(
            heads * head_dim, config.hidden_size, bias=config.use_bias_in_attn_output
        )

    def forward(self, x: Tensor, position: Position, inputs: Inputs, cache: Cache | None) -> Tensor:
        """x [batch, length, hidden] -> same."""
        batch, length, _ = x.shape
        fused = self.query_key_value(x).view(batch, length, self.key_heads, self.group + 2, -1)
        q, k, v = fused.split([self.group, 1, 1], dim=3)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        # [batch, heads or key heads, length, head_dim]
        q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in (q, k, v))
        q, k = text_by_text(position.on_queries_keys, (q, k), inputs.start, inputs)
        if inputs.query_scale is not None:
            q = (q * inputs.query_scale[:, None]).to(q.dtype)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        if k.shape[2] != inputs.keys:
            raise ValueError(
                f"past_key_values: {type(cache).__name__} gives {k.shape[2]} keys for"
                f" {inputs.keys} tokens; use a DynamicCache, which keeps all and adds none"
            )
        out = sdpa(
            q,
            k.repeat_interleave(self.group, dim=1),
            v.repeat_interleave(self.group, dim=1),
            inputs.bias,
            weight=inputs.weight,
            window=inputs.window,
            chunk=inputs.chunk,
            segments=None if inputs.padding is None else inputs.padding.real.long(),
            index_bias=position.index_bias if position.has("index_bias") else None,
        )
        return self.dense(out.transpose(1, 2).reshape(batch, length, -1))


def _within(inputs: Inputs, window: int | None, position: Position) -> Inputs:
    """The inputs of a layer whose queries see at most `window` tokens."""
    scale = inputs.query_scale
    if scale is not None and window is not None:
        scale = scale.minimum(position.log_n_scale(window - 1, 1))
    return replace(inputs, window=window, query_scale=scale)


class MLP(nn.Module):
    """hidden -> width -> activation -> hidden."""

    def __init__(self, config: PositionsGPTConfig) -> None:
        super().__init__()
        hidden, width, bias = config.hidden_size, config.intermediate_size, config.use_bias_in_mlp
        self.activation = ACTIVATIONS[config.activation]
        widened = 2 * width if self.activation.gated else width
        self.dense_h_to_4h = nn.Linear(hidden, widened, bias=bias)
        self.dense_4h_to_h = nn.Linear(width, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, length, hidden] -> same."""
        return self.dense_4h_to_h(self.activation.function(self.dense_h_to_4h(x)))


class Block(GradientCheckpointingLayer):
    """x + attention(norm(x)), then x + mlp(norm(x)); with parallel_residual both read one x."""

    def __init__(self, config: PositionsGPTConfig, layer: int) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.parallel_residual = config.parallel_residual
        self.input_layernorm = normalisation(config.hidden_size, config)
        self.attention = SelfAttention(config, layer)
        self.post_attention_layernorm = normalisation(config.hidden_size, config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, position: Position, inputs: Inputs, past_key_values: Cache | None = None
    ) -> Tensor:
        """x [batch, length, hidden] -> same."""
        added = self.attention(self.input_layernorm(x), position, inputs, past_key_values)
        attended = x + F.dropout(added, self.dropout, self.training)
        read_by_mlp = x if self.parallel_residual else attended
        added = self.mlp(self.post_attention_layernorm(read_by_mlp))
        return attended + F.dropout(added, self.dropout, self.training)


class PositionsGPTForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model. Texts may be longer than those of the training."""

    config: PositionsGPTConfig
    config_class = PositionsGPTConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _tied_weights_keys = {"final_linear.weight": "word_embeddings.weight"}  # noqa: RUF012
    _keep_in_fp32_modules_strict = ["positions"]  # noqa: RUF012

    def __init__(self, config: PositionsGPTConfig) -> None:
        super().__init__(config)
        layers = range(config.num_hidden_layers)
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config, layer) for layer in layers])
        self.norm = normalisation(config.hidden_size, config)
        self.final_linear = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        positions = range(len(encodings_of(config)))
        self.positions = nn.ModuleList([build_position(config, index) for index in positions])
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple:
        """input_ids [batch, length] -> logits [batch, length, vocab]; with labels also the loss.

        attention_mask [batch, all tokens]: 1 for tokens, 0 for padding before or after a text
        ValueError for position_ids: tokens are counted from the first of each text.
        """
        if kwargs.pop("position_ids", None) is not None:
            raise ValueError("position_ids: positions are counted here; leave them out")
        if output_attentions:
            raise ValueError("output_attentions: attention is computed in blocks and never whole")
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        x = self.word_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        remembers = self.config.use_cache if use_cache is None else use_cache
        if remembers and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        hidden_states = self._hidden_states(x, attention_mask, past_key_values)
        kept = hidden_states[-1]
        if isinstance(logits_to_keep, Tensor):
            kept = kept[:, logits_to_keep]
        elif logits_to_keep:
            kept = kept[:, -logits_to_keep:]
        logits = self.final_linear(kept)
        loss = None
        if labels is not None:
            vocab = self.config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab, **kwargs)
        out = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=past_key_values if remembers else None,
            hidden_states=tuple(hidden_states) if output_hidden_states else None,
        )
        return out.to_tuple() if return_dict is False else out

    def _hidden_states(
        self, x: Tensor, attention_mask: Tensor | None, cache: Cache | None
    ) -> list[Tensor]:
        """The embeddings, each layer's output but the last, and that after the final norm."""
        batch, length, _ = x.shape
        start = 0 if cache is None else cache.get_seq_length()
        keys = start + length
        padding = Padding.of(attention_mask, batch, keys)
        positions = [cast(Position, position) for position in self.positions]
        for position in positions:
            position.prepare(keys)
        of_positions = [self._inputs(position, start, length, padding) for position in positions]

        def embed(x: Tensor, start: int) -> tuple[Tensor]:
            return (positions[0].on_embeddings(x, start),)

        (x,) = text_by_text(embed, (x,), start, of_positions[0])
        x = F.dropout(x, self.config.hidden_dropout, self.training)
        hidden_states = []
        of_layers, windows = self.config.encoding_of_layer, self.config.window_layers
        for number, block in enumerate(self.layers):
            own = number % len(positions) if of_layers is None else of_layers[number]
            window = self.config.window if windows is None else windows[number]
            inputs = _within(of_positions[own], window, positions[own])
            hidden_states.append(x)
            x = block(x, positions[own], inputs, past_key_values=cache)
        return [*hidden_states, self.norm(x)]

    def _inputs(
        self, position: Position, start: int, length: int, padding: Padding | None
    ) -> Inputs:
        config, keys = self.config, start + length
        by_index = config.blockwise or config.logn_scale or position.has("index_bias")
        if padding is not None and by_index:
            raise ValueError(
                f"attention_mask: {DEPENDS_ON_INDEX} here, so a batch with padding is not offered;"
                " give texts of one length, or one text at a time"
            )
        return Inputs(
            start=start,
            keys=keys,
            bias=position.distance_bias(keys),
            weight=position.distance_weight(keys),
            window=None,
            chunk=max(1, config.train_length // 2) if config.blockwise else None,
            query_scale=position.log_n_scale(start, length) if config.logn_scale else None,
            padding=padding,
        )

    def get_input_embeddings(self) -> nn.Module:
        return self.word_embeddings

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.word_embeddings = value

    def get_output_embeddings(self) -> nn.Module:
        return self.final_linear

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.final_linear = new_embeddings

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """First values; after loading, the fixed numbers of encodings, which no file holds."""
        for index, position in enumerate(self.positions):
            for path, part in position.named_modules():
                if part is module:
                    fresh = build_position(self.config, index).get_submodule(path)
                    self._copy_numbers(fresh, module)
                    return
        super()._init_weights(module)

    @staticmethod
    def _copy_numbers(fresh: nn.Module, module: nn.Module) -> None:
        """Parameters and buffers of the module itself, but those that were loaded."""
        for name, value in fresh.named_parameters(recurse=False):
            initialization.copy_(module.get_parameter(name), value)
        for name, value in fresh.named_buffers(recurse=False):
            initialization.copy_(module.get_buffer(name), value)
