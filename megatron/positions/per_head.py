"""Numbers that an encoding has one of per head: learned, or fixed by the user."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.positions.base import Position
from megatron.positions.registry import MOST, positive

Given = float | Sequence[float]
"""How a user writes such numbers: one for all heads, or a list of one per head."""


class PerHead(Position):
    """Numbers per head as parameters (learned) or buffers (fixed); both are read one way."""

    def set_learned(self, name: str, start: Tensor) -> None:
        """start [heads] float32; its bounds are those of the class."""
        self.register_parameter(name, nn.Parameter(start))

    def set_fixed(self, name: str, values: Sequence[float]) -> None:
        """Bounds do not apply: they are for learning."""
        self.register_buffer(name, torch.tensor(values), persistent=False)

    def set_option(self, name: str, value: Given | None, start: Tensor) -> None:
        """Learned from `start` on, unless the user gives its value."""
        if value is None:
            self.set_learned(name, start)
        else:
            _, most = self.bounds[name]
            self.set_fixed(name, numbers(name, value, self.shape.heads, min(most, MOST)))

    def per_head(self, name: str) -> Tensor:
        """The numbers as they act: [heads, 1]."""
        return self.rounded(self.bounded(name))[:, None]


def numbers(
    name: str, value: Any, heads: int, most: float = MOST, *, zero: bool = False
) -> list[float]:
    """Positive numbers, or 0 with zero, one per head; else a UserError that names the option."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        value = [value] * heads
    if len(value) != heads:
        raise UserError(
            f"{name}: {len(value)} numbers for {heads} heads;"
            " give one per head, or one for all heads"
        )
    return [0.0 if zero and number == 0 else positive(name, number, most=most) for number in value]
