"""How many numbers a configured model has, counted without building it."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from megatron.model import Architecture, flops, position_from_config
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
        position = position_from_config(config)
    of_one = sum(parameter.numel() for parameter in position.parameters())
    own_for_layers = position.per_layer or not config.position.pos_emb_shared
    of_positions = of_one * model.num_layers if own_for_layers else of_one
    looked_up = vocab * model.hidden_size if model.no_weight_tying else 0
    whole = flops.palm_weights(model, vocab) + looked_up + of_positions
    return Parameters(whole, of_positions)
