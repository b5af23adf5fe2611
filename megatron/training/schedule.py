"""Learning rate by step."""

import math

from megatron.config.schema import Optimizer


def learning_rate(step: int, optimizer: Optimizer) -> float:
    """The learning rate of step `step` (the first is 0); `optimizer` is the configuration's section of that name."""
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
    """Linear warm-up from the first step on, then a decay that would reach the floor one step after the last."""
    if step + 1 < warmup:
        return peak * (step + 1) / warmup
    progress = min(1.0, (step + 1 - warmup) / (steps + 1 - warmup))
    return floor + (peak - floor) * _decay(style, progress)


def neox_2022(
    step: int, *, peak: float, steps: int, warmup: float, style: str, floor: float
) -> float:
    """As GPT-NeoX computed it when KERPLE and MEP were made (learning_rates.py at 738b87e): the first step has rate 0,
    the decay is divided by the whole length instead of what the warm-up leaves, and the last `warmup` steps
    stand still."""
    reached = min(step, steps - warmup)
    if warmup > 0 and reached <= warmup:
        return peak * reached / warmup
    return peak * _decay(style, (reached - warmup) / steps)


def _decay(style: str, progress: float) -> float:
    """Share of the peak after `progress` (0 … 1) of the decay."""
    if style == "cosine":
        return (math.cos(math.pi * progress) + 1) / 2
    return 1 - progress if style == "linear" else 1.0
