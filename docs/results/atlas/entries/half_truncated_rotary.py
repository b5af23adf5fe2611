"""Rotary positions of which half the pairs never turn: modded-nanogpt's half-truncated RoPE.

The formula is from
https://github.com/KellerJordan/modded-nanogpt/blob/f411b3d3/train_gpt_medium.py
(class Yarn, MIT licence), whose comment names @YouJiacheng as its author.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.positions import Shape, register
from megatron.positions.base import Pair, Turning
from megatron.positions.rotary import even, rotate


@register("half_truncated_rotary")
class HalfTruncatedRotary(Turning):
    """Pair n turns by position · 1024^(-n/(m - 1)), n = 0 … m - 1, m = head_dim/4; m pairs don't.

    So frequencies go from 1 to 1/1024. There pairs turn the other way, which only swaps the names
    of their two features, and cosines are rounded to bfloat16. We left out what is separate from
    the formula: frequencies that shrink when windows grow, norms of queries and keys, another
    factor of the scores, shifted keys and paired heads.
    """

    only_rotates = True
    frequencies: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        frequencies = torch.zeros(even(shape.head_dim, "head_dim:") // 2)
        turning = len(frequencies) // 2
        frequencies[:turning] = 1024 ** -torch.linspace(0, 1, turning, dtype=torch.float64)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def on_queries_keys_at(
        self, q: Tensor, k: Tensor, query: Tensor, key: Tensor, **place: Any
    ) -> Pair:
        q_angle, k_angle = (position[..., None] * self.frequencies for position in (query, key))
        turned_q = rotate(q, q_angle.cos(), q_angle.sin())
        turned_k = rotate(k, k_angle.cos(), k_angle.sin())
        return turned_q, turned_k
