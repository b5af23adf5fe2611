"""First values of the weights: the methods of GPT-NeoX, by their names in the configuration."""

import math
from collections.abc import Callable

import torch
from torch import nn

from megatron.model.settings import Architecture

RESIDUAL_OUTPUTS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")


def _normal(model: Architecture) -> float:
    return model.init_method_std


def _scaled_normal(model: Architecture) -> float:
    return model.init_method_std / math.sqrt(2 * model.num_layers)


def _small_init(model: Architecture) -> float:
    """Transformers without Tears (arXiv 1910.05895)."""
    return math.sqrt(2 / (5 * model.hidden_size))


def _wang_init(model: Architecture) -> float:
    """As in GPT-NeoX-20B (arXiv 2204.06745), from Wang's Mesh Transformer JAX."""
    return 2 / (model.num_layers * math.sqrt(model.hidden_size))


METHODS: dict[str, Callable[[Architecture], float]] = {
    "normal": _normal,
    "scaled_normal": _scaled_normal,
    "small_init": _small_init,
    "wang_init": _wang_init,
}
"""The standard deviation that `init_method` and `output_layer_init_method` name."""


def initialize(module: nn.Module, model: Architecture) -> None:
    """Matrices ~ N(0, std²), biases 0, norms 1 and 0.

    init_method gives std, and output_layer_init_method that of the matrices that write to the
    residual stream.
    """
    std = METHODS[model.init_method](model)
    std_of_outputs = METHODS[model.output_layer_init_method](model)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0.0, std_of_outputs if name.endswith(RESIDUAL_OUTPUTS) else std)
            elif name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.fill_(0.0)
