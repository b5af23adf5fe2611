"""Shapes of the learning rate's decay, by the names that `lr_decay_style` accepts.

A shape maps the fraction of the decay's steps that are done to a fraction of the peak rate, from 1
to 0.
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
"""The last two shapes and their names are Megatron-LM's. `wsd` uses the shape
lr_wsd_decay_style."""
