"""No positions, or positions that are added to the embeddings: none, learned, sinusoidal."""

import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.positions.base import EXACT, Fork, Position, Shape
from megatron.positions.registry import positive, register, whole


@register("none", aliases=("nope",))
class NoPosition(Position):
    """No positions at all: the causal mask alone tells the order (NoPE, arXiv 2305.19466)."""

    fork = Fork()


@register("learned")
class Learned(Position):
    """A learned vector for each position: x_t + weight[t], weight ~ N(0, 0.02²), as in GPT-2.

    It has no positions beyond the last row, so it cannot be measured on longer texts.

    max_positions: rows of the table, by default the training length; max_position_embeddings in
        YAML means the same
    """

    fork = Fork({"weight": "weight"})

    def __init__(self, shape: Shape, *, max_positions: int | None = None) -> None:
        super().__init__(shape)
        rows = shape.train_length
        if max_positions is not None:
            rows = whole("max_positions", max_positions, least=rows, most=EXACT)
        self.weight = nn.Parameter(torch.empty(rows, shape.hidden).normal_(0.0, 0.02))

    def on_embeddings(self, x: Tensor, start: int = 0) -> Tensor:
        """[batch, length, hidden] -> same; UserError beyond the last learned position."""
        length = x.shape[1]
        end, rows = start + length, len(self.weight)
        if end > rows:
            raise UserError(
                f"pos_emb: learned positions end at {rows}, so length {end} cannot be computed;"
                " choose a relative encoding or a shorter length"
            )
        indices = self.indices(start, length).long()
        return x + self.weight[indices].to(x.dtype)


@register("sinusoidal")
class Sinusoidal(Position):
    """Fixed sines and cosines of the position: x_t + concat(sin(t·w), cos(t·w)).

    w_i = base^(-2i/hidden). All sines come first, then all cosines, as in GPT-NeoX (arXiv
    1706.03762, section 3.5, alternates them).

    base: slowest wavelength / 2π
    """

    fork = Fork({"inv_freq": "inv_freq"})
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
