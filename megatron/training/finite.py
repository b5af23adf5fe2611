"""Whether an engine's weights and averages are numbers: what is not must not replace what is."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Numbers = Sequence[tuple[str, Tensor]]


def saved_numbers(engine: Any) -> Numbers:
    """What this rank saves: weights, float32 masters and the optimizer's averages, by name.

    ZeRO has flat parts of all weights, which have numbers for names.
    """
    return [(name, tensor.detach()) for name, tensor in _tensors(engine) if tensor.numel()]


def not_finite(numbers: Numbers) -> list[str]:
    """Names of the tensors that hold NaN or infinity; one reduction each, on their device."""
    if _are_finite([tensor for _, tensor in numbers]):
        return []
    return [name for name, tensor in numbers if not _are_finite([tensor])]


def _are_finite(tensors: list[Tensor]) -> bool:
    """Whether all numbers are finite: least and largest show it, at an eighth of a norm's time."""
    extremes = [value.float() for tensor in tensors for value in torch.aminmax(tensor)]
    return not extremes or bool(torch.stack(extremes).isfinite().all())


def _tensors(engine: Any) -> Iterator[tuple[str, Tensor]]:
    yield from engine.module.named_parameters()
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):  # the engine wraps torch's own
        optimizer = optimizer.optimizer
    for number, (master, state) in enumerate(optimizer.state.items()):
        yield f"master weights {number}", master
        for name, value in state.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                yield f"{name} {number}", value
