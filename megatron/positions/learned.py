"""Learned absolute positions, as in GPT-2: one vector per position, and none beyond the last."""

import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.positions.base import EXACT, Position, Shape
from megatron.positions.registry import register, whole


@register("learned")
class Learned(Position):
    """x_t + weight[t], weight ~ N(0, 0.02²).

    max_positions: rows of the table, by default the training length; in YAML also
        max_position_embeddings
    """

    rows_are_positions = ("weight",)
    published = True
    reference_names = {"weight": "weight"}

    def __init__(self, shape: Shape, *, max_positions: int | None = None) -> None:
        super().__init__(shape)
        if max_positions is None:
            rows = shape.train_length
        else:
            rows = whole("max_positions", max_positions, most=EXACT)
        if rows < shape.train_length:
            raise UserError(
                f"max_positions: {rows} is less than the training length {shape.train_length}"
            )
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
