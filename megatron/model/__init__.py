"""The language model, built from a configuration."""

from typing import TYPE_CHECKING, Any

import torch

from megatron.model.cache import Cache
from megatron.model.gpt import GPT
from megatron.model.settings import Architecture, AttentionSettings
from megatron.positions import Position, build, options_of
from megatron.positions.layers import (
    Entry,
    attention_count,
    entries_of,
    shape_of,
)

if TYPE_CHECKING:  # a model is built without the packages that read a configuration
    from megatron.config import Config

__all__ = [
    "GPT",
    "Architecture",
    "AttentionSettings",
    "Cache",
    "from_config",
    "options_of_entry",
    "padded_vocab",
    "positions_from_config",
]


def from_config(config: "Config", vocab: int, end_of_document: int | None = None) -> GPT:
    """The model that the configuration describes, with `vocab` rows in its embedding.

    end_of_document: the tokenizer's token for it, which reset_attention_mask needs

    Its seed gives the first values. The encoding draws its own separately: with one seed, models of
    every encoding start from the same weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        positions, position_of_layer = positions_from_config(config)
        torch.manual_seed(config.training.seed)
        model = GPT(
            Architecture.of(config.model),
            AttentionSettings.of(config.attention),
            positions=positions,
            position_of_layer=position_of_layer,
            named=bool(config.position.pos_emb_layers),
            vocab=vocab,
            end_of_document=end_of_document,
        )
    model.checkpoint_activations = config.training.checkpoint_activations
    return model


def positions_from_config(config: "Config") -> tuple[list[Position], list[int]]:
    """The model's encodings, and which of them each layer with attention has.

    Layers with equal entries share one, unless it is for one layer or pos_emb_shared is false.
    """
    entries = entries_of(config.position)
    positions: list[Position] = []
    position_of_layer: list[int] = []
    shared: dict[int, int] = {}  # the position of the first equal entry
    for layer in range(attention_count(config.model)):
        entry = entries[layer % len(entries)]
        first_equal = entries.index(entry)
        index = shared.get(first_equal, len(positions))
        if index == len(positions):
            positions.append(position_of_entry(config, entry))
            if config.position.pos_emb_shared and not positions[index].per_layer:
                shared[first_equal] = index
        position_of_layer.append(index)
    return positions, position_of_layer


def position_of_entry(config: "Config", entry: Entry) -> Position:
    """The encoding of an entry, with options that other keys give."""
    return build(entry.name, shape_of(config.model), **options_of_entry(config, entry))


def options_of_entry(config: "Config", entry: Entry) -> dict[str, Any]:
    """The options of an encoding, with those that other keys give."""
    options = dict(entry.options)
    if "max_positions" in options_of(entry.name):
        options.setdefault("max_positions", config.model.max_position_embeddings)
    return options


def padded_vocab(vocab: int, divisible_by: int) -> int:
    """Rows of the embedding: the vocabulary rounded up (50257 -> 50304 with 128)."""
    return -(-vocab // divisible_by) * divisible_by
