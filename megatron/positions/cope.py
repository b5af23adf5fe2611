"""CoPE: a position is a count of keys, weighted by gates of their content (2405.18719)."""

import math

import torch
from torch import Tensor, nn

from megatron.positions.base import Memory, Pair, Position, Shape, with_earlier
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import register, whole


@register("cope")
class CoPE(Position):
    """A position that counts the keys which the query selects: q·k/√head_dim + q·e[p].

    p = Σ sigmoid(q·k/√head_dim) over the keys from this one to the query. e has a learned vector
    for each of `positions` positions, in every layer, shared by its heads. Between whole positions
    it is interpolated, and p stops at the last one (arXiv 2405.18719, equations 3 to 6).

    positions: number of vectors; 64 in the code of the paper and of DAPE
    scaled: whether q·e is also divided by √head_dim, as in the released code but not in the paper
    separate_keys: whether the gates have their own keys, a linear map of the layer's input (the
        released code's cope_sep_key)
    """

    per_layer = True

    def __init__(
        self,
        shape: Shape,
        *,
        positions: int = 64,
        scaled: bool = False,
        separate_keys: bool = False,
    ) -> None:
        super().__init__(shape)
        count = whole("positions", positions, most=2**20)
        self.vectors = nn.Parameter(torch.zeros(shape.head_dim, count))
        self.scale = 1 / math.sqrt(shape.head_dim) if scaled else 1.0
        self.separate_keys = separate_keys
        if separate_keys:
            self.take_over(nn.Linear(shape.hidden, shape.heads * shape.head_dim), "key_{}")
        self._q: Tensor | None = None

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> Pair:
        """Keep q for `on_scores`, which attention calls next."""
        self._q = q
        return q, k

    def on_scores(self, scores: Tensor, x: Tensor, memory: Memory) -> Tensor:
        """scores [batch, heads, queries, keys] -> same; x [batch, queries, hidden].

        memory["gate_keys"] holds the gates' own keys.
        """
        assert self._q is not None
        q = at_least_float32(self._q)
        self._q = None
        queries, keys = scores.shape[-2:]
        last = self.vectors.shape[1] - 1
        with without_autocast(q):
            gate_scores = scores
            if self.separate_keys:
                new = self.mapped(x, "key_weight", "key_bias")
                by_head = new.unflatten(-1, (self.shape.heads, -1)).transpose(1, 2)
                gate_keys = with_earlier(by_head, memory, "gate_keys")
                gate_scores = q @ gate_keys.mT / math.sqrt(self.shape.head_dim)
            # Gates of keys after the query are 0: its last key is its own.
            gates = gate_scores.sigmoid().tril(keys - queries)
            position = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=last)
            by_vector = self.scale * (q @ self.bounded("vectors"))  # [..., queries, positions]
            below, above = position.floor(), position.ceil()
            part = position - below
            at_below, at_above = (by_vector.gather(-1, place.long()) for place in (below, above))
            return scores + at_below * (1 - part) + at_above * part
