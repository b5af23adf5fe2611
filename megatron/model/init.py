"""First values of the weights, as in GPT-NeoX: `normal` and `scaled_normal`."""

import math

import torch
from torch import nn

RESIDUAL_OUTPUTS = ("attention.dense.weight", "mlp.dense_4h_to_h.weight")


def initialize(module: nn.Module, *, std: float, layers: int, scaled: bool) -> None:
    """Matrices ~ N(0, std²), biases 0, norms 1 and 0.

    With `scaled`, matrices that write to the residual stream ~ N(0, std² / (2 layers)).
    """
    scaled_std = std / math.sqrt(2 * layers)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                residual = scaled and name.endswith(RESIDUAL_OUTPUTS)
                parameter.normal_(0.0, scaled_std if residual else std)
            elif name.endswith("norm.weight"):
                parameter.fill_(1.0)
            else:
                parameter.fill_(0.0)
