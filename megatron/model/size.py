"""How many numbers a configured model has, counted without building it."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron.model import Architecture, flops, layers_have_their_own, position_of_entry
from megatron.positions.layers import entries_of
from megatron.positions.outline import Outline

if TYPE_CHECKING:  # as in megatron.model
    from megatron.config import Config


class Parameters(NamedTuple):
    """Learned numbers of a model. positions: those of its encodings, which `whole` includes."""

    whole: int
    positions: int


def parameters(config: "Config", vocab: int) -> Parameters:
    """The numbers of `from_config(config, vocab)`, in a few milliseconds and without its memory.

    UserError for options that the encoding refuses.
    """
    model = Architecture.of(config.model)
    with torch.random.fork_rng(devices=[]), Outline():
        of_positions = _of_positions(config)
    looked_up = vocab * model.hidden_size if model.no_weight_tying else 0
    whole = flops.palm_weights(model, vocab) + looked_up + of_positions
    return Parameters(whole, of_positions)


def _of_positions(config: "Config") -> int:
    """Numbers in the encodings of all layers, of which there may be too many to build."""
    entries = entries_of(config.position)
    layers = config.model.num_layers
    count = 0
    for index, entry in enumerate(entries[:layers]):
        position = position_of_entry(config, entry)
        of_one = sum(parameter.numel() for parameter in position.parameters())
        if layers_have_their_own(config, position):
            count += of_one * len(range(index, layers, len(entries)))
        elif entries.index(entry) == index:
            count += of_one
    return count
