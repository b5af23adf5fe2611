"""Whether an engine's weights and averages are numbers: what is not must not replace what is."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.parallel.grid import Grid

CURE = "lower optimizer.params.lr, raise warmup, or use precision: fp32"
SHOWN = 3  # names in the message


def check_finite(engine: Any, grid: Grid, step: int, kept: str) -> None:
    """UserError on every rank where any of them holds NaN or infinity after `step`.

    The weights, the float32 masters and the optimizer's averages are looked at, one reduction each,
    on the device. kept: the checkpoint that stays, for the message
    """
    bad = not_finite(engine)
    for names in grid.gather(bad):
        if names:
            shown = ", ".join(names[:SHOWN])
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise UserError(
                f"save: not finite after step {step}: {shown}{more}"
                f" - nothing was saved, {kept}; {CURE}"
            )


def not_finite(engine: Any) -> list[str]:
    """Names of the tensors that this rank would save and that hold NaN or infinity."""
    named = [(name, tensor.detach()) for name, tensor in _numbers(engine) if tensor.numel()]
    if _are_finite([tensor for _, tensor in named]):
        return []
    return [name for name, tensor in named if not _are_finite([tensor])]


def _are_finite(tensors: list[Tensor]) -> bool:
    """Whether all numbers are finite: least and largest show it, at an eighth of a norm's time."""
    extremes = [value.float() for tensor in tensors for value in torch.aminmax(tensor)]
    return not extremes or bool(torch.stack(extremes).isfinite().all())


def _numbers(engine: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights by name; of the optimizer, which ZeRO gives flat parts of all weights, by number."""
    yield from engine.module.named_parameters()
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):  # the engine wraps torch's own
        optimizer = optimizer.optimizer
    for number, (master, state) in enumerate(optimizer.state.items()):
        yield f"master weights {number}", master
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                yield f"{name} {number}", value
