"""Rotary positions (RoFormer, arXiv 2104.09864, equation 34), and scalings for longer texts.

Feature pairs are laid out as in GPT-NeoX: feature j turns with feature j + dim/2. With
`interleaved` they are those of GPT-J: feature 2j turns with feature 2j + 1.

There is no `dynamic` scaling. Its angles depend on the length of the whole text, so the scores of
an early token would depend on what follows, and cached keys would be wrong. At one length it equals
`scaling: ntk` with factor = length / train length.
"""

import math

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.positions.base import Position, Shape
from megatron.positions.registry import positive, register, suggestion, switch


@register("rotary")
class Rotary(Position):
    """Rotate queries and keys by position · base^(-2j/dim), so that q·k depends on distance alone.

    rotary_pct: part of head_dim that turns; base: slowest wavelength / 2π
    interleaved: whether feature 2j turns with 2j + 1 (GPT-J), and not j with j + dim/2 (GPT-NeoX)
    scaling: none, linear (position interpolation, arXiv 2306.15595), ntk (a larger base),
        by_parts (slow features as linear, fast ones as none), yarn (by_parts with larger scores,
        arXiv 2309.00071) or llama3 (by_parts with another ramp, as in Llama 3.1)
    factor: how many times longer texts get
    original_length: the length that is stretched, by default seq_length
    beta_fast, beta_slow: for by_parts and yarn; features that turn more than beta_fast times within
        original_length stay as they are, features that turn less than beta_slow times are stretched
        fully, and features in between are stretched in part
    truncate: for by_parts and yarn; whether the ramp between them begins and ends at whole features
    attention_factor: for yarn; multiplies queries and keys, by default 0.1 ln(factor) + 1
    high_freq_factor, low_freq_factor: for llama3 what beta_fast and beta_slow are for by_parts;
        its ramp is linear in the number of turns
    """

    published = True
    reference_names = {"inv_freq": "inv_freq"}
    inv_freq: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        rotary_pct: float = 1.0,
        base: float = 10000.0,
        interleaved: bool = False,
        scaling: str = "none",
        factor: float = 1.0,
        original_length: int | None = None,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
        attention_factor: float | None = None,
        high_freq_factor: float = 4.0,
        low_freq_factor: float = 1.0,
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
        _check_order("beta_fast", beta_fast, "beta_slow", beta_slow)
        _check_order("high_freq_factor", high_freq_factor, "low_freq_factor", low_freq_factor)
        if attention_factor is not None and scaling != "yarn":
            raise UserError(
                f"attention_factor: {attention_factor} has no effect with scaling: {scaling};"
                " choose yarn, or leave it out"
            )
        self.turn = rotate_interleaved if switch("interleaved", interleaved) else rotate
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
            whole_features = switch("truncate", truncate)
            stretched = _stretched_part(
                self.dim, base, length, beta_fast, beta_slow, whole_features=whole_features
            )
            inv_freq = _stretch(inv_freq, stretched, factor)
        elif scaling == "llama3":
            turns = length * inv_freq / (2 * math.pi)
            kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
            inv_freq = _stretch(inv_freq, 1 - kept.clamp(0, 1), factor)
        self.is_scaled = scaling != "none"
        self.amplitude = 1.0
        if scaling == "yarn":
            # Section 3.4: temperature t is √(1/t) = 0.1 ln(factor) + 1 on queries and on keys.
            self.amplitude = 0.1 * math.log(factor) + 1
            if attention_factor is not None:
                self.amplitude = positive("attention_factor", attention_factor)
        self.register_buffer("inv_freq", inv_freq.float(), persistent=False)

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> tuple[Tensor, Tensor]:
        """[batch, heads, length, head_dim] each -> same; angles and products in float32."""
        position = self.indices(start, q.shape[-2])
        angle = self._angle(position)
        cos, sin = self.amplitude * angle.cos(), self.amplitude * angle.sin()
        cos, sin = self.rounded(cos).to(angle.dtype), self.rounded(sin).to(angle.dtype)
        return self.turn(q, cos, sin), self.turn(k, cos, sin)

    def _angle(self, position: Tensor) -> Tensor:
        """[length] float32 -> [length, dim / 2] float32.

        The forks' engine rounds the frequencies, and they make positions and angles of the same
        dtype. MEP's YaRN has its angles before the engine comes.
        """
        if self.paper_precision and not self.is_scaled:
            return (self.rounded(position)[:, None] * self.rounded(self.inv_freq)).float()
        return position[:, None] * self.inv_freq


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


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the feature pairs (2j, 2j + 1) of x: [..., length, head_dim] -> same.

    cos, sin as for `rotate`.
    """
    half = cos.shape[-1]
    turning, rest = x.split([2 * half, x.shape[-1] - 2 * half], dim=-1)
    first, second = turning.unflatten(-1, (half, 2)).unbind(-1)
    pairs = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1)
    turned = pairs.flatten(-2).to(x.dtype)
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


SCALINGS = ("none", "linear", "ntk", "by_parts", "yarn", "llama3")


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


def _check_order(larger: str, value: float, smaller: str, bound: float) -> None:
    if positive(larger, value) <= positive(smaller, bound):
        raise UserError(f"{larger}: {value} is not more than {smaller}: {bound}")


def _stretch(inv_freq: Tensor, part: Tensor, factor: float) -> Tensor:
    """Divide this part of each frequency by the factor: [dim / 2] each -> same."""
    return part * inv_freq / factor + (1 - part) * inv_freq


def _stretched_part(
    dim: int,
    base: float,
    length: float,
    beta_fast: float,
    beta_slow: float,
    *,
    whole_features: bool,
) -> Tensor:
    """How much of the stretching each feature gets, from 0 to 1: [dim / 2] float64.

    The ramp is linear in the feature's number, between whole numbers with `whole_features`, as in
    YaRN's code and every published checkpoint; the paper's section 3.2 has it linear in the number
    of turns.
    """

    def feature(turns: float) -> float:
        """The j that turns so often within `length`: length · base^(-2j/dim) = 2π · turns."""
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = feature(beta_fast), feature(beta_slow)
    if whole_features:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    ramp = (torch.arange(dim // 2, dtype=torch.float64) - low) / width
    return ramp.clamp(0, 1)
