"""The tanh kernel of MEP's ablations (arXiv 2403.17698; the code's `tanh_kernel_slopes`)."""

import torch
from torch import Tensor

from megatron.positions.alibi import Sloped, slopes
from megatron.positions.registry import register

# The authors' list for 12 heads (ParallelSNOPE.tanh_kernel_slopes). The steep ones are 0.515 times
# ALiBi's slopes, the other four 0.522 to 0.655 times.
PUBLISHED = [
    0.25737,
    0.12873,
    0.06437,
    0.03219,
    0.0163,
    0.00849,
    0.00457,
    0.00256,
    0.36406,
    0.18203,
    0.09103,
    0.04552,
]
RATIO = 0.5148
EPSILON = 1e-6  # the authors': at large distances the kernel is 1e-6, not 0


@register("tanh")
class Tanh(Sloped):
    """log(1e-6 + 1 + tanh(-s · d)), on the 12 slopes of the authors' code.

    They published slopes for 12 heads only. For another number of heads we take 0.5148 times
    ALiBi's, about the ratio of the steeper published ones. With slopes s/2 it is the sigmoid kernel
    of slope s plus the constant log 2, because 1 + tanh(-x/2) = 2 / (1 + exp(x)).
    """

    published = True
    claims = ("zero_at_0", "never_rises")

    def published_slopes(self, heads: int) -> list[float]:
        if heads == len(PUBLISHED):
            return PUBLISHED
        return [RATIO * slope for slope in slopes(heads)]

    def log_kernel(self, distance: Tensor) -> Tensor:
        # In float32 1 + tanh(-x) loses every digit from x = 9 on; 2 / (1 + exp(2x)) loses none.
        kernel = 2 * torch.sigmoid(-2 * self.per_head("slopes") * distance)
        return torch.log(EPSILON + kernel)

    def paper_kernel(self, distance: Tensor) -> Tensor:
        return torch.log(self.paper_probability(distance))

    def paper_probability(self, distance: Tensor) -> Tensor:
        tanh = torch.tanh(-self.per_head("slopes") * distance.bfloat16())
        return EPSILON + 1 + tanh
