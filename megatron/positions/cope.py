"""CoPE: a position counts the keys that a gate of their content lets through (2405.18719)."""

import math

import torch
from torch import Tensor, nn

from megatron.positions.base import Position, Shape
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import register, switch, whole


@register("cope")
class CoPE(Position):
    """q·k/√head_dim + q·e[p] with p = Σ sigmoid(q·k/√head_dim) over the keys from this one on.

    e has a vector for each of `positions` positions, learned in every layer and shared by its
    heads; between whole positions it is interpolated, and p stays at the last one (arXiv
    2405.18719, equations 3 to 6). p depends on query and key together, so that attention needs all
    scores at once.

    positions: how many vectors; the paper's code and DAPE's have 64
    scaled: whether q·e is divided by √head_dim too, as in the released code but not in the paper's
    """

    per_layer = True

    def __init__(self, shape: Shape, *, positions: int = 64, scaled: bool = False) -> None:
        super().__init__(shape)
        count = whole("positions", positions, most=2**20)
        self.vectors = nn.Parameter(torch.zeros(shape.head_dim, count))
        self.scale = 1 / math.sqrt(shape.head_dim) if switch("scaled", scaled) else 1.0
        self._q: Tensor | None = None

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """Keep q for `on_scores`, which attention calls next."""
        self._q = q
        return q, k

    def on_scores(self, scores: Tensor, x: Tensor, memory: dict[str, Tensor]) -> Tensor:
        """scores [batch, heads, queries, keys] -> same."""
        assert self._q is not None
        q, self._q = at_least_float32(self._q), None
        with without_autocast(q):
            queries, keys = scores.shape[-2:]
            # Gates of keys after the query are 0: its last key is its own.
            gates = scores.sigmoid().tril(keys - queries)
            position = gates.flip(-1).cumsum(-1).flip(-1)
            position = position.clamp(max=self.vectors.shape[1] - 1)
            of_positions = self.scale * (q @ self.bounded("vectors"))  # [..., queries, positions]
            below, above = position.floor(), position.ceil()
            part = position - below
            at_below = of_positions.gather(-1, below.long())
            at_above = of_positions.gather(-1, above.long())
            return scores + at_below * (1 - part) + at_above * part
