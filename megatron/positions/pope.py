"""PoPE: features have a length from the content and an angle from the position (2509.10534)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.base import Pair, Shape, Turning
from megatron.positions.frequencies import LEAST_BASE, inverse_frequencies
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import chosen, positive, register


@register("pope")
class PoPE(Turning):
    """Feature lengths from content, angles from position: Σ_c |q_c| |k_c| cos((j - i)θ_c + δ_c).

    |x| is softplus(x), and the sum is divided by √head_dim. θ_c = base^(-c / head_dim) for every
    feature c, query i and key j (arXiv 2509.10534, equations 3 to 6). δ is learned for each head
    and feature within [-2π, 0], in every layer. Queries and keys become twice as wide as values, so
    a cache is 1.5 times as large, and only the backends `sdpa` and `eager` compute it.

    base: slowest wavelength / 2π
    start: first values of δ, zero or uniform
    """

    per_layer = True
    score_width = 2
    bounds = {"delta": (-2 * math.pi, 0.0)}
    frequencies: Tensor

    def __init__(self, shape: Shape, *, base: float = 10000.0, start: str = "zero") -> None:
        super().__init__(shape)
        base = positive("base", base, least=LEAST_BASE)
        frequencies = inverse_frequencies(2 * shape.head_dim, base)  # [head_dim]
        self.register_buffer("frequencies", frequencies.float(), persistent=False)
        delta = torch.zeros(shape.heads, shape.head_dim)
        if chosen("start", start, ("zero", "uniform")) == "uniform":
            delta.uniform_(-2 * math.pi, 0.0)
        self.delta = nn.Parameter(delta)

    def on_queries_keys_at(
        self, q: Tensor, k: Tensor, query: Tensor, key: Tensor, **place: Any
    ) -> Pair:
        """[batch, heads, length, head_dim] each -> [batch, heads, length, 2 · head_dim] each."""
        with without_autocast(q):
            angle = key[:, None] * self.frequencies  # [keys, head_dim]
            turned = query[:, None] * self.frequencies - self.bounded("delta")[:, None]
            # Attention divides by √(2 · head_dim), the paper by √head_dim.
            long_q = math.sqrt(2) * F.softplus(at_least_float32(q))
            long_k = F.softplus(at_least_float32(k))
            return _polar(long_q, turned).to(q.dtype), _polar(long_k, angle).to(k.dtype)


def _polar(length: Tensor, angle: Tensor) -> Tensor:
    """Vectors of this length and angle: [..., features] -> [..., 2 · features], all x before y."""
    return torch.cat([length * angle.cos(), length * angle.sin()], dim=-1)
