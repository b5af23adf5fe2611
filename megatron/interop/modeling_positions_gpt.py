"""Our GPT behind the interface of transformers, as exported models have it.

An exported folder holds this file, and beside it the model, encodings and attention that it
imports. They need torch and transformers alone.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache as TheirCache
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel, initialization
from transformers.modeling_outputs import CausalLMOutputWithPast

from megatron.model.cache import Cache
from megatron.model.gpt import GPT
from megatron.model.settings import Architecture, AttentionSettings
from megatron.positions.base import Position
from megatron.positions.layers import shape_of
from megatron.positions.precision import in_float32_on_cpu
from megatron.positions.registry import build

NOT_OFFERED = ("position_ids", "inputs_embeds", "output_attentions", "output_hidden_states")


class PositionsGPTConfig(PreTrainedConfig):
    """A GPT with a positional encoding of any kind.

    architecture, attention_settings: values of `Architecture` and `AttentionSettings`
    encodings: each as {name: options}; encoding_of_layer: the number of each layer's
    vocab_size, hidden_size and so on repeat what other programs may ask for
    """

    model_type = "positions_gpt"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 512
    hidden_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    max_position_embeddings: int = 512
    architecture: dict[str, Any] | None = None
    attention_settings: dict[str, Any] | None = None
    encodings: list[dict[str, Any]] | None = None
    encoding_of_layer: list[int] | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False  # the model ties its matrices itself
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None


class TextCache(TheirCache):
    """Caches of our model: one for all texts of a batch with as many tokens of padding."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.length = 0
        self.by_padding: dict[int, Cache] = {}
        self.rows: dict[int, list[int]] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def reorder_cache(self, beam_idx: Tensor) -> None:
        chosen = beam_idx.tolist()
        for padding, cache in self.by_padding.items():
            rows = self.rows[padding]
            cache.select(beam_idx.new_tensor([rows.index(chosen[row]) for row in rows]))

    def crop(self, *arguments: Any) -> None:
        raise ValueError("past_key_values: tokens that were read cannot be taken back")

    batch_repeat_interleave = batch_select_indices = reset = crop  # pyright: ignore


def rows_by_padding(mask: Tensor | None, batch: int, keys: int) -> dict[int, list[int]]:
    """The texts of a batch by the tokens of padding before them.

    mask [batch, keys]: 1 for tokens, 0 for padding. What is behind a text changes nothing in it.
    """
    if mask is None or bool(mask.all()):
        return {0: list(range(batch))}
    real = mask.bool()
    if real.shape != (batch, keys):
        raise ValueError(f"attention_mask: {list(mask.shape)} must be [{batch}, {keys}]")
    before = (real.cumsum(1) == 0).sum(1)
    behind = (real.flip(1).cumsum(1) == 0).sum(1)
    if bool((before + real.sum(1) + behind != keys).any()):
        raise ValueError("attention_mask: every text needs tokens, and none of padding among them")
    rows: dict[int, list[int]] = {}
    for row, padding in enumerate(before.tolist()):
        rows.setdefault(padding, []).append(row)
    return rows


class Encodings(nn.ModuleList):
    """Encodings that transformers' Trainer gives no weight decay.

    It looks for what decays by `named_children`; torch itself uses the other methods.
    """

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        return iter(())

    def children(self) -> Iterator[nn.Module]:
        return iter(self)


class PositionsGPTForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model. Texts may be longer than those of the training."""

    config: PositionsGPTConfig
    config_class = PositionsGPTConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _keep_in_fp32_modules_strict = ["positions"]  # noqa: RUF012

    def __init__(self, config: PositionsGPTConfig, gpt: GPT | None = None) -> None:
        super().__init__(config)
        model = Architecture(**(config.architecture or {}))
        positions = []
        with in_float32_on_cpu():  # transformers builds models without memory
            for encoding in config.encodings or []:
                [(name, options)] = encoding.items()
                positions.append(build(name, shape_of(model), **options))
        self.gpt = gpt or GPT(
            model,
            AttentionSettings(**(config.attention_settings or {})),
            positions=positions,
            position_of_layer=config.encoding_of_layer,
            vocab=config.vocab_size,
        )
        self.gpt.positions = Encodings(self.gpt.positions)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: TheirCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """input_ids [batch, length] -> logits [batch, length, vocab]; with labels also the loss.

        attention_mask [batch, all tokens]: 1 for tokens, 0 for padding before or after a text.
        Texts with different padding are read one after another, each as if it were alone.
        """
        for name in NOT_OFFERED:
            value = kwargs.pop(name, None)
            if value is not None and value is not False:
                raise ValueError(f"{name}: is not offered by this model; leave it out")
        cache = past_key_values
        if use_cache is None:
            use_cache = self.config.use_cache and not torch.is_grad_enabled()
        if cache is None and use_cache:
            cache = TextCache()
        if cache is not None and not isinstance(cache, TextCache):
            raise ValueError(
                f"past_key_values: {type(cache).__name__} does not hold what this model keeps;"
                " leave it out, and the model makes its own"
            )

        batch, length = input_ids.shape
        start = 0 if cache is None else cache.length
        x = None
        for padding, rows in rows_by_padding(attention_mask, batch, start + length).items():
            tokens = input_ids[rows, max(padding - start, 0) :]
            if not tokens.shape[1]:  # they begin in a later part of the batch
                continue
            text_cache = None
            if cache is not None:
                cache.rows[padding] = rows
                text_cache = cache.by_padding.setdefault(padding, Cache())
            features = self.gpt.features(tokens, text_cache)
            if x is None:
                x = features.new_zeros(batch, length, features.shape[2])
            x[rows, -tokens.shape[1] :] = features
        assert x is not None
        if cache is not None:
            cache.length += length

        if isinstance(logits_to_keep, Tensor):
            x = x[:, logits_to_keep]
        elif logits_to_keep:
            x = x[:, -logits_to_keep:]
        logits = self.gpt.logits(x)
        loss = None
        if labels is not None:
            vocab = self.config.vocab_size
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=vocab, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def get_input_embeddings(self) -> nn.Module:
        return self.gpt.word_embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.gpt.word_embeddings = value
        self.gpt.vocab = value.num_embeddings

    def get_output_embeddings(self) -> nn.Module | None:
        return self.gpt.final_linear  # None where the embedding's matrix is the output's

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.gpt.final_linear = new_embeddings

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes a cache of ours

    def _set_gradient_checkpointing(self, enable: bool = True, **_: Any) -> None:
        self.gpt.checkpoint_activations = enable

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """First values; after loading, the fixed numbers of encodings, which no file holds."""
        for position in self.gpt.modules():
            if not isinstance(position, Position):
                continue
            for path, part in position.named_modules():
                if part is not module:
                    continue
                with in_float32_on_cpu():
                    again = type(position)(position.shape, **position.options)
                fresh = again.get_submodule(path)
                for name, value in fresh.named_parameters(recurse=False):
                    initialization.copy_(module.get_parameter(name), value)
                for name, value in fresh.named_buffers(recurse=False):
                    initialization.copy_(module.get_buffer(name), value)
                return
        super()._init_weights(module)
