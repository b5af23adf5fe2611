"""Cable: a penalty that sums over the tokens between query and key (arXiv 2503.08067)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.base import Memory, Pair, Position, Shape, running_sum
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import positive, register


@register("cable")
class Cable(Position):
    """A penalty that adds up over the tokens in between: -g_i (S_i - S_j) for query i and key j.

    S = cumsum(ReLU(x w_c)) and g = softplus(x w_s), where w_c and w_s have a column for each head,
    and each layer has its own. The paper prints the opposite sign, which would favour far tokens
    and contradicts its text, figures and code.

    init_std: standard deviation of the first values of w_c and w_s
    """

    per_layer = True
    in_parts = ("score_bias",)

    def __init__(self, shape: Shape, *, init_std: float = 0.02) -> None:
        super().__init__(shape)
        std = positive("init_std", init_std, most=10.0)
        size = (shape.hidden, shape.heads)
        self.step = nn.Parameter(torch.empty(size).normal_(0.0, std))  # the paper's w_c
        self.gain = nn.Parameter(torch.empty(size).normal_(0.0, std))  # the paper's w_s

    def score_bias(self, x: Tensor, memory: Memory) -> Pair:
        """x [batch, queries, hidden] -> g [batch, heads, queries] and S [batch, heads, keys].

        g_i S_i is the same for all keys. memory["total"] holds S of all keys, in float64.
        """
        with without_autocast(x):
            x = at_least_float32(x)
            step = torch.relu(x @ self.bounded("step")).transpose(1, 2)  # [batch, heads, queries]
            gain = F.softplus(x @ self.bounded("gain")).transpose(1, 2)
            return gain, running_sum(step, memory)
