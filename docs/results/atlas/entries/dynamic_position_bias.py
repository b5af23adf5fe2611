"""A small network computes the bias from the distance: x-transformers' dynamic_pos_bias.

The formula is from
https://github.com/lucidrains/x-transformers/blob/9252ed78/x_transformers/x_transformers.py
(class DynamicPositionBias, MIT licence). Its README names CrossFormer (arXiv 2108.00154) and SwinV2
(arXiv 2111.09883) as the origin, and says that plain distances are better for text than logarithms.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from megatron.positions import DistanceBias, Shape, register
from megatron.positions.registry import whole


@register("dynamic_position_bias")
class DynamicPositionBias(DistanceBias):
    """W_n silu(… silu(W_1 x + b_1) …) + b_n, with n = depth + 1 and x = d, or x = log(d + 1).

    The defaults and first values are theirs: hidden layers are hidden_size / 4 wide, all layers of
    the model share one network, and distances beyond training go through it unchanged. For large d
    it is nearly linear, so the bias keeps its last slope. Their option for a norm is left out.

    depth: hidden layers
    log_distance: whether x is log(d + 1), as in SwinV2
    """

    def __init__(self, shape: Shape, *, depth: int = 2, log_distance: bool = False) -> None:
        super().__init__(shape)
        self.log_distance = log_distance
        hidden_layers = whole("depth", depth, most=16)
        widths = [1, *[max(1, shape.hidden // 4)] * hidden_layers, shape.heads]
        layers = [nn.Linear(inputs, outputs) for inputs, outputs in pairwise(widths)]
        self.layers = nn.ModuleList(layers)

    def log_kernel(self, distance: Tensor) -> Tensor:  # [length] float32 -> [heads, length] float32
        x = torch.log1p(distance) if self.log_distance else distance
        first, *others = self.layers
        values = first(x[:, None])
        for layer in others:
            values = layer(nn.functional.silu(values))
        return values.t()
