"""T5's bias: a learned number per head and bucket of distances (arXiv 1910.10683, section 2.1)."""

import math

import torch
from torch import Tensor, nn

from megatron.positions.base import EXACT, DistanceBias, Fork, Shape
from megatron.positions.registry import register, whole


@register("t5", aliases=("rpe",))
class T5(DistanceBias):
    """A learned bias for each bucket of distances: √head_dim · weight[bucket(d), head].

    The weights start Xavier-normal, as in GPT-NeoX (`rpe`).

    num_buckets: half of the buckets hold one distance each, the others grow logarithmically
    max_distance: from this distance on, all are in the last bucket
    """

    fork = Fork({"weight": "weight"})

    def __init__(self, shape: Shape, *, num_buckets: int = 32, max_distance: int = 128) -> None:
        super().__init__(shape)
        self.num_buckets = whole("num_buckets", num_buckets, least=2, most=EXACT)
        exact = self.num_buckets // 2  # buckets of one distance each
        self.max_distance = whole("max_distance", max_distance, least=exact + 1, most=EXACT)
        weight = torch.empty(self.num_buckets, shape.heads)
        self.weight = nn.Parameter(nn.init.xavier_normal_(weight))

    def log_kernel(self, distance: Tensor) -> Tensor:
        rows = self.rounded(self.bounded("weight"))[self.bucket(distance)]  # [length, heads]
        return math.sqrt(self.shape.head_dim) * rows.t()

    def paper_kernel(self, distance: Tensor) -> Tensor:
        return self.log_kernel(distance)  # the forks' buckets come from whole numbers

    def bucket(self, distance: Tensor) -> Tensor:
        """[length] float32 -> [length] int64 in 0 … num_buckets - 1."""
        exact = self.num_buckets // 2
        # log(0) must never become an integer: smaller distances take the exact branch anyway.
        ratio = distance.clamp(min=exact) / exact
        part = torch.log(ratio) / math.log(
            self.max_distance / exact
        )  # 0 at exact, 1 at the maximum
        far = exact + (part * (self.num_buckets - exact)).long()
        return torch.where(distance < exact, distance.long(), far.clamp(max=self.num_buckets - 1))
