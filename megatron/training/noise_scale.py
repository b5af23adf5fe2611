"""The gradient noise scale: the batch above which more windows help little.

McCandlish et al. 2018, An Empirical Model of Large-Batch Training (arXiv 1812.06162), appendix A.1.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megatron.parallel.grid import Grid
from megatron.splits import plain_sum

BETA = 0.99  # of the moving averages, as in GPT-NeoX


class NoiseScale:
    """B_simple = tr(Σ) / |G|² in windows, from the gradients of steps in groups.

    A step's gradient is that of a small batch of b windows, the mean over a group of n steps that
    of a large one of B = n·b. With the means of their squared norms,

        tr(Σ) ≈ (|G_b|² - |G_B|²) / (1/b - 1/B)        |G|² ≈ (B·|G_B|² - b·|G_b|²) / (B - b)

    are without bias, Σ being the covariance of the gradient of one window. Their ratio is not, so
    each has a moving average of its own. Within a group the weights are taken as constant.

    windows: of one step, on all ranks; steps: n ≥ 2; on_cpu: where the sum over a group is kept
    averages: what a checkpoint kept, in plain values. They still lack the correction for an average
    that began at zero. An unfinished group is not kept.
    """

    def __init__(
        self,
        windows: int,
        steps: int,
        grid: Grid,
        *,
        on_cpu: bool = False,
        averages: Mapping[str, Any] | None = None,
    ) -> None:
        self.windows, self.steps, self.grid = windows, steps, grid
        self.device = torch.device("cpu") if on_cpu else None
        self.averages: dict[str, Any] = {"groups": 0, "trace": 0.0, "square": 0.0}
        self.averages |= averages or {}
        self.sums: list[Tensor] = []
        self.squares: list[Tensor | float] = []
        self.count = 0

    @torch.no_grad()
    def add(self, parts: Iterable[Tensor]) -> None:
        """The gradient of one step before clipping: this rank's parts, see `gradient_parts`.

        Every rank calls this. A group in which a gradient is not finite is left out.
        """
        square: Tensor | float = 0.0
        for index, part in enumerate(parts):
            square = square + _square(part)
            gradient = part.float() if self.device is None else part.to(self.device, torch.float32)
            if self.count:
                self.sums[index] += gradient
            else:
                self.sums.append(gradient.clone())
        self.squares.append(square)
        self.count += 1
        if self.count < self.steps:
            return
        small_part = plain_sum(float(square) / self.steps for square in self.squares)
        large_part = plain_sum(float(_square(total)) / self.steps**2 for total in self.sums)
        self.sums, self.squares, self.count = [], [], 0
        numbers = torch.tensor(
            [small_part, large_part], dtype=torch.float64, device=self.grid.device
        )
        small, large = self.grid.sum(numbers).tolist()
        if not (math.isfinite(small) and math.isfinite(large)):
            return
        batch, many = self.windows, self.windows * self.steps
        estimates = {
            "trace": (small - large) / (1 / batch - 1 / many),
            "square": (many * large - batch * small) / (many - batch),
        }
        self.averages["groups"] += 1
        for name, value in estimates.items():
            self.averages[name] = BETA * self.averages[name] + (1 - BETA) * value

    def numbers(self) -> dict[str, float | None]:
        """noise_scale in windows, tr(Σ) of one window, |G|²; {} before the first group.

        noise_scale is None if the estimate of |G|² is not positive: noise hides the gradient.
        """
        if not self.averages["groups"]:
            return {}
        correction = 1 - BETA ** self.averages["groups"]
        trace, square = self.averages["trace"] / correction, self.averages["square"] / correction
        scale = trace / square if square > 0 else None
        return {"noise_scale": scale, "noise_trace": trace, "gradient_square": square}


def _square(part: Tensor) -> Tensor:
    return torch.linalg.vector_norm(part, dtype=torch.float64).square()


def gradient_parts(parameters: Iterable[Any], grid: Grid) -> Iterator[Tensor]:
    """This rank's parts of an engine's gradient, between its backward pass and its step.

    The parts of all ranks together hold every number once, and zeros. Any shapes.
    """
    for parameter in parameters:
        if hasattr(parameter, "ds_id"):  # ZeRO 3
            from deepspeed.utils import safe_get_local_grad

            yield safe_get_local_grad(parameter)
        elif hasattr(parameter, "_hp_mapping"):  # ZeRO 1 and 2
            mapping: Any = parameter._hp_mapping
            if mapping is None:  # all of it is on other ranks
                yield parameter.new_zeros(0)
                continue
            fragment = mapping.get_lp_grad_fragment(parameter._index_in_param_group).flatten()
            address = mapping.lp_fragment_address
            if fragment.numel() != address.numel:  # DeepSpeed's bf16 engine keeps all of it
                fragment = fragment.narrow(0, address.start, address.numel)
            yield fragment
        elif grid.rank < grid.tensor_ranks and parameter.grad is not None:  # others have the same
            yield parameter.grad
