"""A linear penalty on a normalised or clipped distance, or on a small network of it.

Eight experiments of MEP's released code (its class ParallelKerplePower) and KERPLE's
`kerple_power_original`; no paper describes them. docs/positions/published_names.md has their names.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.positions.alibi import alibi_slopes
from megatron.positions.base import EXACT, DistanceBias, Fork, Shape
from megatron.positions.kerple import FLOOR, POSITIVE, Kerple
from megatron.positions.per_head import Given
from megatron.positions.registry import chosen, positive, register, whole

NETWORKS = ("none", "fixed", "learned")
SEED = 1234  # of fixed weights
WIDTH = 32  # of the network's hidden layer
EPSILON = 1e-6  # the authors'
# Ours and the authors' names of the network's numbers.
REFERENCE = {
    "weight_0": "fc1.weight",
    "bias_0": "fc1.bias",
    "weight_1": "fc2.weight",
    "bias_1": "fc2.bias",
}


@register("scaled_distance")
class ScaledDistance(Kerple, DistanceBias):
    """A penalty on the normalised distance: -a · f((d - m) / r).

    m and r are the mean and the root mean square of the distances 0 … 511. No paper describes these
    experiments of MEP's released code.

    a: learned from U(0, 1) on and at least 0.01, unless you give one number or one per head
    slope_factor: fixes a at ALiBi's slopes times this, at least 0.01
    normalized: false leaves m and r away: f(d)
    over: m and r are those of the distances 0 … over - 1. The authors use min(512, window length),
        which is 512 in all their published files
    clip: beyond this distance, clip tokens count as one: d becomes clip - 1 + (d - clip + 1) / clip
    network: what f is. none: the identity; fixed: a network of 32 GELU units with one output per
        head and random weights that are the same in every run, as the authors use it; learned: the
        same network, trained
    """

    fork = Fork()
    draws = {"a": (1.0, POSITIVE)}
    a: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        a: Given | None = None,
        slope_factor: float | None = None,
        normalized: bool = True,
        over: int = 512,
        clip: int | None = None,
        network: str = "none",
    ) -> None:
        if slope_factor is not None:
            if a is not None:
                raise UserError("slope_factor: fixes a, which is given too; keep one of them")
            # ALiBi's slopes times a factor, as the authors' code has them: none below 0.01.
            factor = positive("slope_factor", slope_factor)
            a = [max(FLOOR, factor * slope) for slope in alibi_slopes(shape.heads)]
        super().__init__(shape, a=a)
        self.normalized = normalized
        self.over = whole("over", over, most=EXACT)
        self.clip = None if clip is None else whole("clip", clip, most=EXACT)
        self.has_network = chosen("network", network, NETWORKS) != "none"
        if not self.has_network:
            return
        # First values in the ranges of torch's nn.Linear, as in the authors' code. Fixed ones are
        # the same in every run: a checkpoint holds what is learned and nothing else.
        learned = network == "learned"
        generator = None if learned else torch.Generator().manual_seed(SEED)
        heads = shape.heads
        sizes = ([WIDTH, 1], [WIDTH], [heads, WIDTH], [heads])
        inputs = (1, 1, WIDTH, WIDTH)
        for name, size, count in zip(REFERENCE, sizes, inputs, strict=True):
            reach = 1 / math.sqrt(count)
            value = (2 * torch.rand(size, generator=generator) - 1) * reach
            if learned:
                self.register_parameter(name, nn.Parameter(value))
            else:
                self.register_buffer(name, value, persistent=False)

    def log_kernel(self, distance: Tensor) -> Tensor:
        x = self.rounded(self.scaled(distance))
        if self.has_network:
            weight_0, bias_0, weight_1, bias_1 = (
                self.rounded(self.bounded(name)) for name in REFERENCE
            )
            hidden = weight_0 * x + bias_0[:, None]  # [32, length]
            x = weight_1 @ nn.functional.gelu(hidden) + bias_1[:, None]  # [heads, length]
        return -self.per_head("a") * x

    def paper_kernel(self, distance: Tensor) -> Tensor:
        return self.log_kernel(distance)  # the forks clip and normalise before they round

    def scaled(self, distance: Tensor) -> Tensor:
        """The clipped and normalised distance: [length] float32 -> same."""
        x = distance
        if self.clip is not None:
            last = self.clip - 1
            x = torch.where(x < self.clip, x, last + (x - last) / self.clip)
        if self.normalized:
            mean = (self.over - 1) / 2
            mean_square = (self.over - 1) * (2 * self.over - 1) / 6
            x = (x - mean) / math.sqrt(mean_square + EPSILON)
        return x

    def reference(self) -> Iterator[tuple[str, Tensor]]:
        yield "bias_a", self.a
        if self.has_network:
            for ours, theirs in REFERENCE.items():
                yield theirs, getattr(self, ours)
