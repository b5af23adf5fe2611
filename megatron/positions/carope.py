"""CARoPE: rotary whose frequencies are powers of a number from each token (arXiv 2507.23083)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.base import Memory, Pair, Position, Shape, running_angle
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import positive, register
from megatron.positions.rotary import even, rotate_both


@register("carope")
class CARoPE(Position):
    """Rotary with frequencies from the content: pair c of token i turns by Σ f(x_t)^c, t ≤ i.

    f(x) = 1 / (softplus(x·w) + 1) for each head, with w learned in each layer (arXiv 2507.23083,
    section 2). No code was released. We use c = 0 … pairs - 1, which is rotary where f = base^(-2 /
    head_dim), and the input of each layer's attention as x. f starts near 0.59, not at rotary's
    value as the paper says, because w has no bias.

    from_one: whether c = 1 … pairs, the other way to read the paper
    init_std: standard deviation of the first values of w
    """

    per_layer = True
    grouped_queries = False
    powers: Tensor

    def __init__(self, shape: Shape, *, from_one: bool = False, init_std: float = 0.02) -> None:
        super().__init__(shape)
        pairs = even(shape.head_dim, "head_dim:") // 2
        first = int(from_one)
        self.register_buffer("powers", torch.arange(first, first + pairs), persistent=False)
        weight = torch.empty(shape.hidden, shape.heads)
        self.weight = nn.Parameter(weight.normal_(0.0, positive("init_std", init_std)))

    def on_queries_keys_by_content(self, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> Pair:
        """q, k [batch, heads, length, head_dim] -> same. memory["sum"]: the last angles.

        Summed in float64: over 16384 tokens float32 loses the difference between neighbours.
        """
        with without_autocast(x):
            f = 1 / (F.softplus(at_least_float32(x) @ self.bounded("weight")) + 1)
            f = f.transpose(1, 2)[..., None].double()  # [batch, heads, length, 1]
            angle = running_angle(f**self.powers, memory).fmod(2 * math.pi)
            return rotate_both(q, k, angle.to(self.origin.dtype))
