"""The gradient noise scale: the batch above which more windows help little.

McCandlish et al. 2018, An Empirical Model of Large-Batch Training (arXiv 1812.06162), appendix A.1.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.grid import Grid

BETA = 0.99  # of the moving averages, as in GPT-NeoX


class NoiseScale:
    """B_simple = tr(Σ) / |G|² in windows, from the gradients of steps in groups.

    A step's gradient is that of a small batch of b windows, the mean over a group of n steps that
    of a large one of B = n·b. With the means of their squared norms,

        tr(Σ) ≈ (|G_b|² - |G_B|²) / (1/b - 1/B)        |G|² ≈ (B·|G_B|² - b·|G_b|²) / (B - b)

    are without bias, Σ being the covariance of the gradient of one window. Their ratio is not, so
    each has a moving average of its own. Within a group the weights are taken as constant.

    windows: of one step, on all ranks; steps: n ≥ 2; on_cpu: where the sum over a group is kept
    state: what `state` returned when a checkpoint was written
    """

    def __init__(
        self,
        windows: int,
        steps: int,
        grid: Grid,
        *,
        on_cpu: bool = False,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.windows, self.steps, self.grid = windows, steps, grid
        self.device = torch.device("cpu") if on_cpu else None
        kept = state or {}
        self.groups: int = kept.get("groups", 0)
        self.trace: float = kept.get("trace", 0.0)  # these two still lack the correction
        self.square: float = kept.get("square", 0.0)  # for an average that began at zero
        self._begin_group()

    @torch.no_grad()
    def add(self, parts: Iterable[Tensor]) -> None:
        """The gradient of one step before clipping: this rank's parts, see `own_gradients`.

        Every rank calls this. A group in which a gradient is not finite is left out.
        """
        total = None
        for index, part in enumerate(parts):
            square = torch.linalg.vector_norm(part, dtype=torch.float64).square()
            total = square if total is None else total + square
            kept = part.float() if self.device is None else part.to(self.device, torch.float32)
            if self.count:
                self.sums[index] += kept
            else:
                self.sums.append(kept.clone())
        if total is not None:
            self.squares.append(total)
        self.count += 1
        if self.count == self.steps:
            self._end_group()
            self._begin_group()

    def numbers(self) -> dict[str, float | None]:
        """noise_scale in windows, tr(Σ) of one window, |G|²; {} before the first group.

        noise_scale is None where the estimate of |G|² is not positive: noise hides the gradient.
        """
        if self.groups == 0:
            return {}
        correction = 1 - BETA**self.groups
        trace, square = self.trace / correction, self.square / correction
        scale = trace / square if square > 0 else None
        return {"noise_scale": scale, "noise_trace": trace, "gradient_square": square}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, in plain values. An unfinished group is not kept."""
        return {"groups": self.groups, "trace": self.trace, "square": self.square}

    def _begin_group(self) -> None:
        self.count = 0
        self.sums: list[Tensor] = []
        self.squares: list[Tensor] = []

    def _end_group(self) -> None:
        """Both squared norms over all ranks, in one exchange, and the averages with them."""
        own = torch.zeros(2, dtype=torch.float64)
        for square in self.squares:
            own[0] += square.cpu() / self.steps
        for part in self.sums:
            mean_square = torch.linalg.vector_norm(part, dtype=torch.float64).square()
            own[1] += mean_square.cpu() / self.steps**2
        small, large = self.grid.sum(own.to(self.grid.device)).tolist()
        if not math.isfinite(small) or not math.isfinite(large):
            return
        trace, square = estimates(small, large, self.windows, self.steps)
        self.groups += 1
        self.trace = BETA * self.trace + (1 - BETA) * trace
        self.square = BETA * self.square + (1 - BETA) * square


def estimates(small: float, large: float, windows: int, steps: int) -> tuple[float, float]:
    """tr(Σ) and |G|² of McCandlish et al. (A.2, A.3).

    small: mean of |G_b|² for batches of `windows`; large: |G_B|² for B = windows * steps
    """
    many = windows * steps
    trace = (small - large) / (1 / windows - 1 / many)
    square = (many * large - windows * small) / (many - windows)
    return trace, square


def own_gradients(parameters: Iterable[Tensor], grid: Grid) -> Iterator[Tensor]:
    """This rank's parts of an engine's gradient, between its backward pass and its step.

    The parts of all ranks together hold every number once, and zeros. Any shapes.
    """
    for parameter in parameters:
        if hasattr(parameter, "ds_id"):  # ZeRO 3
            from deepspeed.utils import safe_get_local_grad

            yield safe_get_local_grad(parameter)
        elif hasattr(parameter, "_hp_mapping"):  # ZeRO 1 and 2
            yield _fragment(parameter)
        elif grid.first and parameter.grad is not None:  # all ranks have all of it
            yield parameter.grad


def _fragment(parameter: Any) -> Tensor:
    mapping = parameter._hp_mapping
    if mapping is None:  # all of it is on other ranks
        return parameter.new_zeros(0)
    address = mapping.lp_fragment_address
    part = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
    if part.numel() == address.numel:
        return part
    return part.narrow(0, address.start, address.numel)  # DeepSpeed's bf16 engine keeps all of it
