"""Rotary positions (RoFormer, arXiv 2104.09864, equation 34), in GPT-NeoX's layout of feature pairs, and the scalings
that stretch them to longer texts.

`dynamic` scaling is not offered: its angles depend on the length of the whole text, so that an early token would notice
what follows and cached keys would be wrong. At one length it is `scaling: ntk` with factor = length / train length.
"""

import math

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.positions.base import Position, Shape
from megatron.positions.registry import positive, register, suggestion


@register("rotary")
class Rotary(Position):
    """Queries and keys turn by position · base^(-2j/dim), so that q·k depends on their distance alone.

    rotary_pct: share of head_dim that turns; base: slowest wavelength / 2π
    scaling: none, linear (position interpolation, arXiv 2306.15595), ntk (a larger base), by_parts (slow features as
        linear, fast ones as none) or yarn (by_parts, and larger scores; arXiv 2309.00071)
    factor: how many times longer texts get; original_length: the length that is stretched, by default seq_length
    beta_fast, beta_slow: by_parts and yarn leave alone what turns more often than beta_fast times in original_length,
        stretch fully what turns less often than beta_slow times, and blend in between
    """

    reference_names = {"inv_freq": "inv_freq"}
    inv_freq: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        rotary_pct: float = 1.0,
        base: float = 10000.0,
        scaling: str = "none",
        factor: float = 1.0,
        original_length: int | None = None,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
    ) -> None:
        super().__init__(shape)
        if positive("rotary_pct", rotary_pct) > 1:
            raise UserError(
                f"rotary_pct: {rotary_pct} is more than 1; give the share of head_dim that turns"
            )
        self.dim = even(
            int(shape.head_dim * rotary_pct),
            f"rotary_pct: {rotary_pct} of head_dim = {shape.head_dim}",
        )
        if positive("base", base) <= 1:
            raise UserError(f"base: {base} is not more than 1; usual values are 10000 and above")
        _check_scaling(scaling, factor, self.dim)
        if positive("beta_fast", beta_fast) <= positive("beta_slow", beta_slow):
            raise UserError(f"beta_fast: {beta_fast} is not more than beta_slow: {beta_slow}")
        length = (
            shape.train_length
            if original_length is None
            else positive("original_length", original_length)
        )
        inv_freq = inverse_frequencies(self.dim, base)
        if scaling == "linear":
            inv_freq = inv_freq / factor  # the same as position / factor
        elif scaling == "ntk":
            inv_freq = inverse_frequencies(self.dim, base * factor ** (self.dim / (self.dim - 2)))
        elif scaling in ("by_parts", "yarn"):
            share = _stretched(self.dim, base, length, beta_fast, beta_slow)
            inv_freq = share * inv_freq / factor + (1 - share) * inv_freq
        # YaRN's section 3.4: √(1/t) = 0.1 ln(factor) + 1 on q and on k, for a softmax of temperature t.
        self.amplitude = 0.1 * math.log(factor) + 1 if scaling == "yarn" else 1.0
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """[batch, heads, length, head_dim] each -> same; angles and products in float32."""
        position = self.indices(start, q.shape[-2])
        angle = position[:, None] * self.inv_freq  # [length, dim / 2]
        cos, sin = self.amplitude * angle.cos(), self.amplitude * angle.sin()
        return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the feature pairs (j, j + dim/2) of x [..., length, head_dim] by angles [length, dim / 2]: -> same as x."""
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def inverse_frequencies(dim: int, base: float) -> Tensor:
    """base^(-2j/dim): [dim / 2] float64."""
    return base ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def even(features: int, described: str) -> int:
    """`features`, if they can be turned in pairs."""
    if features < 2 or features % 2:
        raise UserError(
            f"{described} is {features} features, not an even number;"
            " change rotary_pct, hidden_size or num_attention_heads"
        )
    return features


SCALINGS = ("none", "linear", "ntk", "by_parts", "yarn")


def _check_scaling(scaling: str, factor: float, dim: int) -> None:
    if scaling not in SCALINGS:
        raise UserError(f"scaling: {scaling!r} is not known; {suggestion(scaling, SCALINGS)}")
    if positive("factor", factor) < 1:
        raise UserError(f"factor: {factor} is less than 1; give how many times longer texts get")
    if scaling == "none" and factor != 1:
        raise UserError(
            f"factor: {factor} has no effect with scaling: none; choose {', '.join(SCALINGS[1:])}"
        )
    if scaling == "ntk" and dim < 4:
        raise UserError(
            f"scaling: ntk stretches nothing with {dim} turning features; give at least 4"
        )


def _stretched(dim: int, base: float, length: float, beta_fast: float, beta_slow: float) -> Tensor:
    """How far each feature is stretched, from 0 to 1: [dim / 2] float64.

    The ramp is linear in the feature's number between whole numbers, as in YaRN's code and every published checkpoint;
    the paper's section 3.2 has it linear in the number of turns.
    """

    def feature(turns: float) -> float:
        """Which feature turns that often within `length`: the solution of length · base^(-2j/dim) = 2π · turns."""
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(feature(beta_fast)), 0), min(math.ceil(feature(beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low or 0.001)
    return ramp.clamp(0, 1)
