"""Learning rate by step."""

import math

from megatron.config.schema import Optimizer


def learning_rate(step: int, optimizer: Optimizer) -> float:
    """The learning rate of a step (the first is 0) by the configuration's section `optimizer`."""
    rule = neox_2022 if optimizer.lr_schedule == "neox-2022" else standard
    value = rule(
        step,
        peak=optimizer.lr,
        steps=max(1, optimizer.lr_decay_iters),
        warmup=optimizer.warmup * optimizer.lr_decay_iters,
        style=optimizer.lr_decay_style,
        floor=optimizer.min_lr,
    )
    return max(value, optimizer.min_lr)


def standard(
    step: int, *, peak: float, steps: int, warmup: float, style: str, floor: float
) -> float:
    """Linear warm-up, then a decay that would reach the floor one step after the last."""
    if step + 1 < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step + 1 - warmup) / (steps + 1 - warmup))
    return floor + (peak - floor) * _decay(style, progress)


def neox_2022(
    step: int, *, peak: float, steps: int, warmup: float, style: str, floor: float
) -> float:
    """As GPT-NeoX computed it when KERPLE and MEP were made (learning_rates.py at 738b87e).

    The first step has rate 0. The decay is divided by the whole length, not by what the warm-up
    leaves, so the rate stays constant in the last `warmup` steps.
    """
    reached = min(step, steps - warmup)
    if warmup > 0 and reached <= warmup:
        return peak * reached / warmup
    return peak * _decay(style, (reached - warmup) / steps)


def _decay(style: str, progress: float) -> float:
    """The rate as a fraction of its peak after `progress` (0 … 1) of the decay."""
    if style == "cosine":
        return (math.cos(math.pi * progress) + 1) / 2
    return 1 - progress if style == "linear" else 1.0
