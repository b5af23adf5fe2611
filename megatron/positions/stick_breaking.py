"""Stick-breaking attention: each key takes a part, nearer keys first (arXiv 2410.17980)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.positions.base import Memory, Position, Shape
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import register


@register("stick_breaking")
class StickBreaking(Position):
    """Each key takes its share of what nearer keys leave: key j gets z_ij Π (1 - z_it), j < t < i.

    z = sigmoid(q·k/√head_dim) for query i. Nearer keys come first, so the model knows the order
    without positions. What all keys leave goes to the value of the token itself, as in the released
    code with its remainder. Under a window the weights are normalised. reset_attention_mask is
    refused.

    attend_current: whether a query also attends to its own key, before all others
    """

    crosses_documents = "what a query keeps of all earlier keys"

    def __init__(self, shape: Shape, *, attend_current: bool = False) -> None:
        super().__init__(shape)
        self.attend_current = attend_current

    def on_scores(self, scores: Tensor, x: Tensor, memory: Memory) -> Tensor:
        """scores [batch, heads, queries, keys] -> logarithms of the weights, same shape."""
        scores = at_least_float32(scores)
        queries, keys = scores.shape[-2:]
        first_key = keys - queries  # of the first query
        visible = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(
            first_key if self.attend_current else first_key - 1
        )
        with without_autocast(scores):
            left = torch.where(visible, F.logsigmoid(-scores), 0.0)
            # Summed from the query on: where a sum is large, its rounding has no weight.
            rest = left.flip(-1).cumsum(-1).flip(-1)  # of the keys from j to i
            taken = F.logsigmoid(scores) + rest - left
            remainder = rest[..., :1]
            if self.attend_current:
                remainder = torch.logaddexp(taken, remainder)
            is_query = torch.eye(keys, dtype=torch.bool, device=scores.device)[first_key:]
            return torch.where(is_query, remainder, taken)
