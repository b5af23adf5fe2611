"""Shapes of a decay of the learning rate, by the names of `lr_decay_style`.

A shape is the share of the peak that is left, from 1 to 0, at a share of the decay's steps.
"""

import math
from collections.abc import Callable


def constant(progress: float) -> float:
    return 1.0


def cosine(progress: float) -> float:
    return (math.cos(math.pi * progress) + 1) / 2


def linear(progress: float) -> float:
    return 1 - progress


def exponential(progress: float) -> float:
    return 2 * 0.5**progress - 1


def minus_sqrt(progress: float) -> float:
    return 1 - math.sqrt(progress)


SHAPES: dict[str, Callable[[float], float]] = {
    "constant": constant,
    "cosine": cosine,
    "linear": linear,
    "exponential": exponential,
    "minus_sqrt": minus_sqrt,
}
"""The last two, and their names, are Megatron-LM's. `wsd` takes the shape of lr_wsd_decay_style."""
