"""FIRE: a learned function of the distance relative to the query's own position (arXiv 2310.04418, equation 9).

The paper has an encoding for each layer (pos_emb_shared: false) and calls the shared one FIRE-S.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.positions.base import Position, Shape
from megatron.positions.registry import positive, register

NUMBERS = (
    2**21
)  # hidden values of one layer of the MLP that exist at one time, where no gradient is wanted: 8 MB


@register("fire")
class Fire(Position):
    """MLP(psi(d) / psi(max(L, i))) for a query at position i and a key d tokens back, psi(x) = log(c·x + 1).

    threshold: L = length_multiplier · threshold; half of seq_length where it is not given, as in DAPE's code
    mlp_layers: widths of the hidden layers, ReLU between them; the paper has [32], the code of DAPE too
    c, length_multiplier: first values of these learned numbers; both stay positive
    """

    # Below these, psi(d) / psi(L) is d / L to float32's precision anyway, or L is 0.
    bounds = {"c": (1e-4, float("inf")), "length_multiplier": (0.01, float("inf"))}

    def __init__(
        self,
        shape: Shape,
        *,
        mlp_layers: Sequence[int] = (32,),
        threshold: float | None = None,
        c: float = 0.1,
        length_multiplier: float = 1.0,
    ) -> None:
        super().__init__(shape)
        self.threshold = (
            max(1, shape.train_length // 2)
            if threshold is None
            else positive("threshold", threshold)
        )
        # [1], because DeepSpeed cannot broadcast a number without dimensions in half precision.
        self.c = nn.Parameter(torch.tensor([positive("c", c)]))
        self.length_multiplier = nn.Parameter(
            torch.tensor([positive("length_multiplier", length_multiplier)])
        )
        widths = [1, *_widths(mlp_layers), shape.heads]
        self.depth = len(widths) - 1
        for number, (inputs, outputs) in enumerate(pairwise(widths)):
            layer = nn.Linear(inputs, outputs)  # for its first values
            self.register_parameter(f"weight_{number}", nn.Parameter(layer.weight.detach()))
            if (
                number < self.depth - 1
            ):  # the softmax does not notice what is added to every score of a head
                self.register_parameter(f"bias_{number}", nn.Parameter(layer.bias.detach()))

    def index_bias(self, queries: Tensor, keys: Tensor) -> Tensor:
        """[queries], [keys] int64 -> [heads, queries, keys] float32; a few queries at a time through the MLP."""
        widest = max(
            self.get_parameter(f"weight_{number}").shape[0] for number in range(self.depth)
        )
        rows = max(1, NUMBERS // (widest * len(keys)))
        with torch.autocast(self.origin.device.type, enabled=False):
            return torch.cat(
                [self._mlp(self.ratio(some, keys)) for some in queries.split(rows)], dim=1
            )

    def ratio(self, queries: Tensor, keys: Tensor) -> Tensor:
        """psi(distance) / psi(max(L, position of the query)): [queries, keys] float32 in [0, 1]."""
        c = self.bounded("c")
        query = queries.to(self.origin.dtype)[:, None]
        distance = (query - keys.to(self.origin.dtype)).clamp(min=0)
        end = torch.maximum(query, self.bounded("length_multiplier") * self.threshold)
        return torch.log1p(c * distance) / (
            torch.log1p(c * end) + 1e-6
        )  # 1e-6: as in the paper's appendix

    def _mlp(self, x: Tensor) -> Tensor:
        """[queries, keys] -> [heads, queries, keys]"""
        values = x.reshape(1, -1)  # features first, so that nothing is transposed
        for number in range(self.depth - 1):
            weight, bias = self.bounded(f"weight_{number}"), self.bounded(f"bias_{number}")
            values = (weight @ values).add_(bias[:, None]).relu_()
        return (self.bounded(f"weight_{self.depth - 1}") @ values).view(-1, *x.shape)


def _widths(mlp_layers: Sequence[int]) -> list[int]:
    whole = (
        isinstance(mlp_layers, Sequence) and not isinstance(mlp_layers, str) and len(mlp_layers) > 0
    )
    if not whole or any(type(width) is not int or width < 1 for width in mlp_layers):
        raise UserError(
            f"mlp_layers: {mlp_layers!r} is not a list of widths; write mlp_layers: [32] or [32, 32]"
        )
    return list(mlp_layers)
