"""FIRE: a learned function of distance relative to the query's index (arXiv 2310.04418, eq. 9)."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.base import Position, Shape
from megatron.positions.precision import without_autocast
from megatron.positions.registry import chosen, listed, positive, register, whole

# Values of one MLP layer that exist at a time, where no gradient is needed: 8 MB of float32.
NUMBERS = 2**21
ACTIVATIONS = {
    "relu": torch.relu_,
    "leaky_relu": partial(F.leaky_relu_, negative_slope=0.01),
}  # in place
MOST_LAYERS, MOST_WIDTH = 16, 4096


@register("fire")
class Fire(Position):
    """A learned function of distance relative to the query's index: MLP(psi(d) / psi(max(L, i))).

    i is the query's index, d the distance, and psi(x) = log(c·x + 1). Up to index L the bias
    depends only on the distance, beyond it also on the query's index. The paper's FIRE has an MLP
    in each layer: set `pos_emb_shared: false`. One for all layers, our default, is the paper's
    FIRE-S.

    threshold: L = length_multiplier · threshold; by default half of seq_length, as in DAPE's code
    mlp_layers: widths of the hidden layers; the paper's listing and DAPE's code use [32]
    c, length_multiplier: first value; it is learned and stays positive
    activation: relu, or leaky_relu as for FIRE inside DAPE's code
    last_bias: whether the last layer has a bias too; it only matters inside DAPE
    """

    # Below these bounds psi(d) / psi(L) is d / L to float32's precision anyway, or L is 0.
    bounds = {"c": (1e-4, math.inf), "length_multiplier": (0.01, math.inf)}

    def __init__(
        self,
        shape: Shape,
        *,
        mlp_layers: Sequence[int] = (32,),
        threshold: float | None = None,
        c: float = 0.1,
        length_multiplier: float = 1.0,
        activation: str = "relu",
        last_bias: bool = False,
    ) -> None:
        super().__init__(shape)
        if threshold is None:
            self.threshold: float = max(1, shape.train_length // 2)
        else:
            self.threshold = positive("threshold", threshold)
        # [1], because DeepSpeed cannot broadcast a number without dimensions in half precision.
        self.c = nn.Parameter(torch.tensor([positive("c", c, least=self.bounds["c"][0])]))
        floor, _ = self.bounds["length_multiplier"]
        multiplier = positive("length_multiplier", length_multiplier, least=floor)
        self.length_multiplier = nn.Parameter(torch.tensor([multiplier]))
        self.activation = ACTIVATIONS[chosen("activation", activation, ACTIVATIONS)]
        self.last_bias = last_bias
        hidden = listed("mlp_layers", mlp_layers, example="[32] or [32, 32]", most=MOST_LAYERS)
        hidden = [whole("mlp_layers", width, most=MOST_WIDTH) for width in hidden]
        widths = [1, *hidden, shape.heads]
        self.depth = len(widths) - 1
        for number, (inputs, outputs) in enumerate(pairwise(widths)):
            self.take_over(nn.Linear(inputs, outputs), f"{{}}_{number}")
        if not last_bias:  # the softmax ignores a constant for all scores of a head
            delattr(self, f"bias_{self.depth - 1}")

    def index_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[queries], [keys] int64 -> [heads, queries, keys] float32, a few queries at a time."""
        widths = [self.get_parameter(f"weight_{number}").shape[0] for number in range(self.depth)]
        rows = max(1, NUMBERS // (max(widths) * len(keys)))
        last = self.depth - 1
        blocks = []
        with without_autocast(self.origin):
            for block in queries.split(rows):
                ratio = self.ratio(block, keys)
                values = ratio.reshape(1, -1)  # features first, so that nothing is transposed
                for number in range(last):
                    weight = self.bounded(f"weight_{number}")
                    bias = self.bounded(f"bias_{number}")
                    values = self.activation((weight @ values).add_(bias[:, None]))
                values = self.bounded(f"weight_{last}") @ values
                if self.last_bias:
                    values = values + self.bounded(f"bias_{last}")[:, None]
                blocks.append(values.view(-1, *ratio.shape))
            return torch.cat(blocks, dim=1)

    def ratio(self, queries: Tensor, keys: Tensor) -> Tensor:
        """psi(distance) / psi(max(L, position of the query)): [queries, keys] float32 in [0, 1]."""
        c = self.bounded("c")
        query = queries.to(self.origin.dtype)[:, None]
        key = keys.to(self.origin.dtype)
        distance = (query - key).clamp(min=0)
        end = torch.maximum(query, self.bounded("length_multiplier") * self.threshold)
        normalizer = torch.log1p(c * end) + 1e-6  # 1e-6: as in the paper's appendix
        return torch.log1p(c * distance) / normalizer
