"""Stick-breaking attention: each key takes a part, nearer keys first (arXiv 2410.17980)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.positions.base import Memory, Position, Shape
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import register, switch


@register("stick_breaking")
class StickBreaking(Position):
    """Key j gets z_ij Π (1 - z_it) over the keys t between j and i; query i keeps the rest.

    z = sigmoid(q·k/√head_dim). Nearer keys come first, so the order is known without positions. The
    rest, Π (1 - z_it) over all keys, goes to the value of the token itself, as in the released code
    with its remainder. Then the weights sum to 1, and their logarithms are scores for the softmax.
    Under a window they are normalised; reset_attention_mask is refused. Attention needs all scores
    at once.

    attend_current: whether a query attends to its own key too, before all others
    """

    crosses_documents = "what a query keeps of all earlier keys"

    def __init__(self, shape: Shape, *, attend_current: bool = False) -> None:
        super().__init__(shape)
        self.attend_current = switch("attend_current", attend_current)

    def on_scores(self, scores: Tensor, x: Tensor, memory: Memory) -> Tensor:
        """scores [batch, heads, queries, keys] -> logarithms of the weights, same shape."""
        scores = at_least_float32(scores)
        queries, keys = scores.shape[-2:]
        own = keys - queries  # the key of the first query
        visible = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(
            own if self.attend_current else own - 1
        )
        with without_autocast(scores):
            left = torch.where(visible, F.logsigmoid(-scores), 0.0)
            # Summed from the query on: where a sum is large, its rounding has no weight.
            rest = left.flip(-1).cumsum(-1).flip(-1)  # of the keys from j to i
            taken = F.logsigmoid(scores) + rest - left
            kept = rest[..., :1]  # by the query itself
            if self.attend_current:
                kept = torch.logaddexp(taken, kept)
            is_own = torch.eye(keys, dtype=torch.bool, device=scores.device)[own:]
            return torch.where(is_own, kept, taken)
