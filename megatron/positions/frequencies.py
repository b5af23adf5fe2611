"""Frequencies of rotary positions, and how they change for longer texts.

A frequency is the angle in radians by which a feature pair turns from one token to the next. All
functions compute in float64.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.positions.registry import chosen, listed, positive

SCALINGS = ("none", "linear", "ntk", "by_parts", "yarn", "llama3", "longrope")
LEAST_BASE = 1.001  # at 1 all features would turn alike
EFFECTIVE = {
    "factor": SCALINGS[1:],
    "attention_factor": ("yarn", "llama3", "longrope"),
    "long_factor": ("longrope",),
    "short_factor": ("longrope",),
}
"""Options that act with some scalings alone."""
ORDERED = (("beta_fast", "beta_slow"), ("high_freq_factor", "low_freq_factor"))
"""Pairs of options, the larger one first."""


@dataclass(frozen=True)
class Scaling:
    """The options of `Rotary` that stretch frequencies; see there."""

    name: str
    factor: float
    length: float  # the one that is stretched
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float | None
    high_freq_factor: float
    low_freq_factor: float
    long_factor: Sequence[float] | None
    short_factor: Sequence[float] | None

    def check(self, dim: int) -> None:
        """UserError for options that contradict each other."""
        name = chosen("scaling", self.name, SCALINGS)
        positive("factor", self.factor, least=1)
        for option, scalings in EFFECTIVE.items():
            value = getattr(self, option)
            if name not in scalings and value not in (None, 1):
                raise UserError(
                    f"{option}: {value} has no effect with scaling: {name};"
                    f" choose {' or '.join(scalings)}, or leave it out"
                )
        if name == "ntk" and dim < 4:
            raise UserError(
                f"scaling: ntk stretches nothing with {dim} turning features; give at least 4"
            )
        for larger, smaller in ORDERED:
            most, least = getattr(self, larger), getattr(self, smaller)
            if positive(larger, most) <= positive(smaller, least):
                raise UserError(f"{larger}: {most} is not more than {smaller}: {least}")
        for option in ("long_factor", "short_factor") if name == "longrope" else ():
            example = f"{dim // 2} numbers, one for each feature pair that turns"
            numbers = listed(option, getattr(self, option), example=example, most=dim // 2)
            if len(numbers) != dim // 2:
                raise UserError(f"{option}: {len(numbers)} numbers are given; give {example}")
            for number in numbers:
                positive(option, number)

    @property
    def amplitude(self) -> float:
        """The factor of queries and keys, so that scores change by its square."""
        if self.attention_factor is not None:
            return positive("attention_factor", self.attention_factor)
        if self.name == "yarn":
            # Section 3.4: temperature t is √(1/t) = 0.1 ln(factor) + 1 on queries and on keys.
            return 0.1 * math.log(self.factor) + 1
        if self.name == "longrope":
            return math.sqrt(1 + math.log(self.factor) / math.log(self.length))
        return 1.0

    def stretched(self, dim: int, base: float) -> Tensor:
        """The frequencies for long texts: [dim / 2]."""
        frequencies = inverse_frequencies(dim, base)
        if self.name == "linear":
            return frequencies / self.factor  # the same as position / factor
        if self.name == "ntk":
            return inverse_frequencies(dim, base * self.factor ** (dim / (dim - 2)))
        if self.name in ("by_parts", "yarn"):
            return _stretch(frequencies, self._part_by_feature(dim, base), self.factor)
        if self.name == "llama3":
            turns = self.length * frequencies / (2 * math.pi)
            low, high = self.low_freq_factor, self.high_freq_factor
            kept = (turns - low) / (high - low)
            return _stretch(frequencies, 1 - kept.clamp(0, 1), self.factor)
        if self.name == "longrope":
            return frequencies / _numbers(self.long_factor)
        return frequencies

    def of_short_texts(self, dim: int, base: float) -> Tensor | None:
        """The frequencies for texts of at most `length` tokens: [dim / 2]; None for the same."""
        if self.name != "longrope":
            return None
        return inverse_frequencies(dim, base) / _numbers(self.short_factor)

    def _part_by_feature(self, dim: int, base: float) -> Tensor:
        """How much of the stretching each feature gets, from 0 to 1: [dim / 2].

        The ramp is linear in the feature's number, between whole numbers with `truncate`, as in
        YaRN's code and every published checkpoint; the paper's section 3.2 has it linear in the
        number of turns.
        """

        def feature(turns: float) -> float:
            """The j that turns so often within `length`: length · base^(-2j/dim) = 2π · turns."""
            return dim * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(base))

        low, high = feature(self.beta_fast), feature(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low or 0.001
        ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / width
        return ramp.clamp(0, 1)


def inverse_frequencies(dim: int, base: float) -> Tensor:
    """base^(-2j/dim): [dim / 2]."""
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def with_whole_wavelengths(frequencies: Tensor) -> Tensor:
    """2π / round(2π / frequency), so that angles repeat after whole tokens: [pairs] -> same.

    Resonance RoPE (arXiv 2403.00071), equation 6. A frequency of 0 stays 0.
    """
    wavelengths = 2 * math.pi / frequencies
    return 2 * math.pi / wavelengths.round()


def fastest(frequencies: Tensor, fraction: float) -> Tensor:
    """The first floor(fraction · pairs) frequencies, and 0 for all others: [pairs] -> same.

    p-RoPE (arXiv 2410.06205), section 5.
    """
    kept = math.floor(fraction * len(frequencies))
    turns = torch.arange(len(frequencies)) < kept
    return torch.where(turns, frequencies, 0.0)


def _stretch(frequencies: Tensor, part: Tensor, factor: float) -> Tensor:
    """Divide this part of each frequency by the factor: [dim / 2] each -> same."""
    return part * frequencies / factor + (1 - part) * frequencies


def _numbers(factors: Sequence[float] | None) -> Tensor:
    return torch.tensor(factors, dtype=torch.float64)
