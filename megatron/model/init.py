"""First values of the weights, as in GPT-NeoX: `normal`, and `scaled_normal` for what writes to the residual stream."""

import math

import torch
from torch import nn

RESIDUAL_OUTPUTS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")


def initialize(module: nn.Module, *, std: float, layers: int, scaled: bool) -> None:
    """Matrices ~ N(0, std²), with `scaled` those that write to the residual stream ~ N(0, std² / (2 layers));
    biases 0; norms 1 and 0."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                residual = scaled and name.endswith(RESIDUAL_OUTPUTS)
                parameter.normal_(0.0, std / math.sqrt(2 * layers) if residual else std)
            else:
                parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
