"""Sandwich: the inner products of sinusoidal positions (arXiv 2212.10356)."""

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.positions.base import DistanceBias, Shape
from megatron.positions.registry import positive, register, whole

MOST_DBAR = 4096  # frequencies are computed one at a time


@register("sandwich")
class Sandwich(DistanceBias):
    """A fixed bias from sinusoidal positions: (Σ_i cos(d / base^(2i/dbar)) - dbar/2) / (8h/H).

    The sum has dbar/2 frequencies, and h = 1 … H is the head.

    dbar: twice the number of frequencies, 128 in the paper; it may differ from head_dim
    base: base of the frequencies
    first_frequency: the first i, which is 1 in NVIDIA NeMo (SandwichRelativePositionEmbedding) and
        0 in attention-gym
    """

    claims = ("zero_at_0",)

    def __init__(
        self, shape: Shape, *, dbar: int = 128, base: float = 10000.0, first_frequency: int = 1
    ) -> None:
        super().__init__(shape)
        self.dbar = whole("dbar", dbar, least=2, most=MOST_DBAR)
        if self.dbar % 2:
            raise UserError(f"dbar: {dbar} is not even, and each frequency counts twice; add 1")
        if type(first_frequency) is not int or first_frequency not in (0, 1):
            raise UserError(f"first_frequency: {first_frequency!r} is not 0 or 1")
        self.base = positive("base", base)
        self.first_frequency = first_frequency

    def log_kernel(self, distance: Tensor) -> Tensor:
        # In float64: an angle of 131072 in float32 is off by 0.004.
        exact = distance.double()
        frequencies = self.dbar // 2
        total = torch.full_like(exact, -frequencies)  # [length]
        first = self.first_frequency
        for i in range(first, first + frequencies):  # one at a time, to save memory
            total += torch.cos(exact / self.base ** (2 * i / self.dbar))
        heads = self.shape.heads
        head = torch.arange(1, heads + 1, device=distance.device, dtype=torch.float64)
        compression = 8 * head / heads
        return (total / compression[:, None]).to(distance.dtype)
