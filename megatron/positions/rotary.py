"""Rotary positions (RoFormer, arXiv 2104.09864, equation 34), in GPT-NeoX's layout of feature pairs."""

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.positions.base import Position, Shape, positive, register


@register("rotary")
class Rotary(Position):
    """Queries and keys turn by position · base^(-2j/dim), so that q·k depends on their distance alone.

    rotary_pct: share of head_dim that turns; base: slowest wavelength / 2π
    """

    reference_names = {"inv_freq": "inv_freq"}
    inv_freq: Tensor

    def __init__(self, shape: Shape, *, rotary_pct: float = 1.0, base: float = 10000.0) -> None:
        super().__init__(shape)
        if positive("rotary_pct", rotary_pct) > 1:
            raise UserError(f"rotary_pct: {rotary_pct} is more than 1; give the share of head_dim that turns")
        self.dim = int(shape.head_dim * rotary_pct)
        if self.dim < 2 or self.dim % 2:
            raise UserError(
                f"rotary_pct: {rotary_pct} of head_dim = {shape.head_dim} is {self.dim} features, not an even number;"
                " change rotary_pct, hidden_size or num_attention_heads"
            )
        exponent = torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        self.register_buffer("inv_freq", 1.0 / positive("base", base) ** exponent, persistent=False)

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """[batch, heads, length, head_dim] each -> same; angles and products in float32."""
        position = start + self.distances(q.shape[-2])
        angle = position[:, None] * self.inv_freq  # [length, dim / 2]
        cos, sin = angle.cos(), angle.sin()
        return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the feature pairs (j, j + dim/2) of x [..., length, head_dim] by angles [length, dim / 2]: -> same as x."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
