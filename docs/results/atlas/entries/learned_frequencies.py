"""Rotary positions whose frequencies are learned: learned_freq=True of rotary-embedding-torch.

The formula is from
https://github.com/lucidrains/rotary-embedding-torch/blob/8bb4643d/rotary_embedding_torch/rotary_embedding_torch.py
(class RotaryEmbedding, MIT licence).
"""

from typing import Any

from torch import Tensor, nn

from megatron.positions import Shape, positive, register
from megatron.positions.base import Pair, Turning
from megatron.positions.frequencies import inverse_frequencies
from megatron.positions.rotary import even, rotate


@register("learned_frequencies")
class LearnedFrequencies(Turning):
    """Feature pair n turns by position · θ_n. θ_n is learned from base^(-2n/head_dim) on.

    All layers and heads share the frequencies, as in the README there. grape_m learns (16 times)
    their logarithms, for each layer. There features 2n and 2n + 1 are a pair, here n and
    n + head_dim/2. For a model trained from nothing that only renames features.

    base: slowest wavelength / 2π of the first frequencies
    """

    def __init__(self, shape: Shape, *, base: float = 10000.0) -> None:
        super().__init__(shape)
        head_dim = even(shape.head_dim, "head_dim:")
        frequencies = inverse_frequencies(head_dim, positive("base", base))
        self.frequencies = nn.Parameter(frequencies.float())  # [head_dim / 2]

    def on_queries_keys_at(
        self, q: Tensor, k: Tensor, query: Tensor, key: Tensor, **place: Any
    ) -> Pair:
        frequencies = self.bounded("frequencies")
        q_angle, k_angle = (position[:, None] * frequencies for position in (query, key))
        turned_q = rotate(q, q_angle.cos(), q_angle.sin())
        turned_k = rotate(k, k_angle.cos(), k_angle.sin())
        return turned_q, turned_k
