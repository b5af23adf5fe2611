"""FoX: a gate at every token decides how much of the past is kept (arXiv 2503.02130)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.base import Memory, Position, Shape, running_sum
from megatron.positions.precision import without_autocast
from megatron.positions.registry import positive, register


@register("fox")
class Fox(Position):
    """A forget gate at every token: the bias is Σ log f_l over the tokens l between key and query.

    f_l = sigmoid(w·x_l + b), where w and b are learned for each head in every layer, and the sum
    runs over l = j+1 … i for key j and query i (the Forgetting Transformer, arXiv 2503.02130,
    equation 5). It needs no other positions; `sum` combines it with rotary. The paper's "Pro" block
    is not included.

    init_std: standard deviation of the first values of w; b starts at 0, so f starts near 1/2
    """

    per_layer = True
    in_parts = ("score_bias",)

    def __init__(self, shape: Shape, *, init_std: float = 0.02) -> None:
        super().__init__(shape)
        std = positive("init_std", init_std, most=10.0)
        self.weight = nn.Parameter(torch.empty(shape.heads, shape.hidden).normal_(0.0, std))
        self.bias = nn.Parameter(torch.zeros(shape.heads))

    def score_bias(self, x: Tensor, memory: Memory) -> tuple[None, Tensor]:
        """Minus the sum of log f up to each key: [batch, queries, hidden] -> [batch, heads, keys].

        The sum up to the query is the same for all keys. memory["total"] holds the sums.
        """
        with without_autocast(x):
            gate = self.mapped(x, "weight", "bias")
            log_f = F.logsigmoid(gate).transpose(1, 2)  # [batch, heads, queries]
            return None, -running_sum(log_f, memory)
