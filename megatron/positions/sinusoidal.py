"""Sinusoidal absolute positions (Attention Is All You Need, arXiv 1706.03762, section 3.5)."""

import torch
from torch import Tensor

from megatron.positions.base import Position, Shape
from megatron.positions.registry import positive, register


@register("sinusoidal")
class Sinusoidal(Position):
    """x_t + concat(sin(t·w), cos(t·w)), w_i = base^(-2i/hidden): two halves, as in GPT-NeoX.

    base: slowest wavelength / 2π
    """

    published = True
    reference_names = {"inv_freq": "inv_freq"}
    inv_freq: Tensor

    def __init__(self, shape: Shape, *, base: float = 10000.0) -> None:
        super().__init__(shape)
        exponent = torch.arange(0, shape.hidden, 2, dtype=torch.float32) / shape.hidden
        self.register_buffer("inv_freq", 1.0 / positive("base", base) ** exponent, persistent=False)

    def on_embeddings(self, x: Tensor, start: int = 0) -> Tensor:
        """[batch, length, hidden] -> same; the angles are float32 at every length."""
        position = self.indices(start, x.shape[1])
        # The forks' engine rounds the frequencies, and they make positions of the same dtype.
        position, frequencies = self.rounded(position), self.rounded(self.inv_freq)
        angle = position[:, None] * frequencies  # [length, hidden / 2]
        table = torch.cat([angle.sin(), angle.cos()], dim=-1)[:, : self.shape.hidden]
        return x + table.to(x.dtype)
