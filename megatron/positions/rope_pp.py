"""RoPE++: rotary whose queries serve a real and an imaginary head (arXiv 2512.07525)."""

from typing import Any

import torch
from torch import Tensor

from megatron.positions.base import Pair
from megatron.positions.registry import register
from megatron.positions.rotary import Rotary, rotate


@register("rope_pp")
class RopePP(Rotary):
    """Rotary with pairs of heads that share a query: the second head has it turned back by π/2.

    The first head of a pair is rotary's. The score of the second, the imaginary head, is minus the
    imaginary part of the product whose real part is rotary's score: at distance d and pair (x, y),
    (q_x k_x + q_y k_y) sin(dθ) - (q_x k_y - q_y k_x) cos(dθ). Both use the same key and value.

    Set `heads_per_query: 2`. Then queries, keys, values and the cache are half of rotary's: the
    paper's RoPE++ with equal heads. For an equal cache, use twice as many heads of the same size.
    Features that do not turn are the same in both heads.
    """

    heads_per_query = 2
    only_rotates = False
    fork = None

    def on_queries_keys_at(
        self, q: Tensor, k: Tensor, query: Tensor, key: Tensor, **place: Any
    ) -> Pair:
        q, k = super().on_queries_keys_at(q, k, query, key, **place)
        real, imaginary = q.unflatten(1, (-1, 2)).unbind(2)
        cos = torch.zeros_like(self.inv_freq)
        sin = cos - 1  # of -π/2
        imaginary = rotate(imaginary, cos, sin, interleaved=self.interleaved)
        return torch.stack([real, imaginary], dim=2).flatten(1, 2), k
