"""Rotary positions (RoFormer, arXiv 2104.09864, equation 34), and scalings for longer texts.

Feature pairs are laid out as in GPT-NeoX: feature j turns with feature j + dim/2.

There is no `dynamic` scaling. Its angles depend on the length of the whole text, so the scores of
an early token would depend on what follows, and cached keys would be wrong. At one length it equals
`scaling: ntk` with factor = length / train length.
"""

import math

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.positions.base import Position, Shape
from megatron.positions.registry import positive, register, suggestion


@register("rotary")
class Rotary(Position):
    """Rotate queries and keys by position · base^(-2j/dim), so that q·k depends on distance alone.

    rotary_pct: part of head_dim that turns; base: slowest wavelength / 2π
    scaling: none, linear (position interpolation, arXiv 2306.15595), ntk (a larger base),
        by_parts (slow features as linear, fast ones as none) or yarn (by_parts with larger scores,
        arXiv 2309.00071)
    factor: how many times longer texts get
    original_length: the length that is stretched, by default seq_length
    beta_fast, beta_slow: for by_parts and yarn; features that turn more than beta_fast times within
        original_length stay as they are, features that turn less than beta_slow times are stretched
        fully, and features in between are stretched in part
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
                f"rotary_pct: {rotary_pct} is more than 1; give the part of head_dim that turns"
            )
        described = f"rotary_pct: {rotary_pct} of head_dim = {shape.head_dim}"
        self.dim = even(int(shape.head_dim * rotary_pct), described)
        if positive("base", base) <= 1:
            raise UserError(f"base: {base} is not more than 1; usual values are 10000 and above")
        _check_scaling(scaling, factor, self.dim)
        if positive("beta_fast", beta_fast) <= positive("beta_slow", beta_slow):
            raise UserError(f"beta_fast: {beta_fast} is not more than beta_slow: {beta_slow}")
        length: float = shape.train_length
        if original_length is not None:
            length = positive("original_length", original_length)
        inv_freq = inverse_frequencies(self.dim, base)
        if scaling == "linear":
            inv_freq = inv_freq / factor  # the same as position / factor
        elif scaling == "ntk":
            larger_base = base * factor ** (self.dim / (self.dim - 2))
            inv_freq = inverse_frequencies(self.dim, larger_base)
        elif scaling in ("by_parts", "yarn"):
            stretched = _stretched_part(self.dim, base, length, beta_fast, beta_slow)
            inv_freq = stretched * inv_freq / factor + (1 - stretched) * inv_freq
        # YaRN's section 3.4: temperature t is √(1/t) = 0.1 ln(factor) + 1 on queries and on keys.
        self.amplitude = 0.1 * math.log(factor) + 1 if scaling == "yarn" else 1.0
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """[batch, heads, length, head_dim] each -> same; angles and products in float32."""
        position = self.indices(start, q.shape[-2])
        angle = position[:, None] * self.inv_freq  # [length, dim / 2]
        cos, sin = self.amplitude * angle.cos(), self.amplitude * angle.sin()
        return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the feature pairs (j, j + dim/2) of x: [..., length, head_dim] -> same.

    cos, sin [length, dim / 2] are those of the angles; features from dim on stay as they are.
    """
    half = cos.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    turned = torch.cat([turned_first, turned_second], dim=-1).to(x.dtype)
    if not rest.shape[-1]:
        return turned
    return torch.cat([turned, rest], dim=-1)


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


def _stretched_part(
    dim: int, base: float, length: float, beta_fast: float, beta_slow: float
) -> Tensor:
    """How much of the stretching each feature gets, from 0 to 1: [dim / 2] float64.

    The ramp is linear in the feature's number between whole numbers, as in YaRN's code and every
    published checkpoint; the paper's section 3.2 has it linear in the number of turns.
    """

    def feature(turns: float) -> float:
        """The j that turns so often within `length`: length · base^(-2j/dim) = 2π · turns."""
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(feature(beta_fast)), 0)
    high = min(math.ceil(feature(beta_slow)), dim - 1)
    width = high - low or 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / width
    return ramp.clamp(0, 1)
