"""Scale-invariant attention: far keys compete more sharply for less attention."""

from torch import Tensor

from megatron.positions.base import KERNEL, DistanceBias, Shape
from megatron.positions.registry import positive, register


@register("scale_invariant")
class ScaleInvariant(DistanceBias):
    """Far keys compete more sharply for less attention: √(1 + 2b) · q·k/√head_dim - 2b.

    b = ln(1 + d/tau). If q·k/√head_dim is standard normal, exp of the score has the mean √e / (1 +
    d/tau). So the tokens 100 to 1000 back get about as much attention as those 1000 to 10000 back
    (arXiv 2505.17083). Nothing is learned, and all heads are the same. We could read only the
    introduction of the paper: the formula is that of four other sources, which agree. The paper
    combines it with p-RoPE: use `sum` with `parts: [p_rope, scale_invariant]`.

    tau: distance up to which scores change little
    """

    claims = KERNEL

    def __init__(self, shape: Shape, *, tau: float = 10.0) -> None:
        super().__init__(shape)
        self.tau = positive("tau", tau, least=1e-6)

    def log_kernel(self, distance: Tensor) -> Tensor:
        return -2 * (distance / self.tau).log1p().expand(self.shape.heads, -1)

    def distance_weight(self, length: int) -> Tensor:
        return self.table(lambda distance: (1 - self.log_kernel(distance)).sqrt(), length)
