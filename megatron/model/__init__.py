"""The language model, built from a configuration."""

from typing import TYPE_CHECKING, Any

import torch

from megatron.model.gpt import GPT, Cache
from megatron.model.settings import Architecture, AttentionSettings
from megatron.positions import Position, Shape, build, options_of

if TYPE_CHECKING:  # a model is built without the packages that read a configuration
    from megatron.config import Config

__all__ = [
    "GPT",
    "Architecture",
    "AttentionSettings",
    "Cache",
    "from_config",
    "options_from_config",
    "padded_vocab",
    "position_from_config",
]


def from_config(config: "Config", vocab: int, end_of_document: int | None = None) -> GPT:
    """The model that the configuration describes, with `vocab` rows in its embedding.

    end_of_document: the tokenizer's token for it, which reset_attention_mask needs

    Its seed gives the first values. The encoding draws its own separately: with one seed, models of
    every encoding start from the same weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        positions = [position_from_config(config)]
        if positions[0].per_layer or not config.position.pos_emb_shared:
            for _ in range(config.model.num_layers - 1):
                positions.append(position_from_config(config))
        torch.manual_seed(config.training.seed)
        model = GPT(
            Architecture.of(config.model),
            AttentionSettings.of(config.attention),
            positions=positions,
            vocab=vocab,
            end_of_document=end_of_document,
        )
    model.checkpoint_activations = config.training.checkpoint_activations
    return model


def position_from_config(config: "Config") -> Position:
    """The encoding that `pos_emb` and `pos_emb_args` describe."""
    return build(config.position.pos_emb, shape_of(config), **options_from_config(config))


def options_from_config(config: "Config") -> dict[str, Any]:
    """The options of the encoding, with those that other keys give."""
    options = dict(config.position.pos_emb_args)
    if "max_positions" in options_of(config.position.pos_emb):
        options.setdefault("max_positions", config.model.max_position_embeddings)
    return options


def shape_of(config: "Config") -> Shape:
    """The sizes that an encoding may depend on."""
    model = Architecture.of(config.model)
    heads, head_dim = model.num_attention_heads, model.features_of_head
    return Shape(heads, head_dim, model.hidden_size, model.seq_length)


def padded_vocab(vocab: int, divisible_by: int) -> int:
    """Rows of the embedding: the vocabulary rounded up (50257 -> 50304 with 128)."""
    return -(-vocab // divisible_by) * divisible_by
