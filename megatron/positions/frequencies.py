"""Frequencies of rotary positions.

A frequency is the angle in radians by which a feature pair turns from one token to the next. All
functions compute in float64.
"""

import torch
from torch import Tensor

LEAST_BASE = 1.001  # at 1 all features would turn alike


def inverse_frequencies(dim: int, base: float) -> Tensor:
    """base^(-2j/dim): [dim / 2]."""
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
