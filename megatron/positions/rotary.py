"""Rotary positions (RoFormer, arXiv 2104.09864, equation 34), and scalings for longer texts.

Feature pairs are laid out as in GPT-NeoX: feature j turns with feature j + dim/2. With
`interleaved` they are those of GPT-J: feature 2j turns with feature 2j + 1.

There is no `dynamic` scaling. Its angles depend on the length of the whole text, so the scores of
an early token would depend on what follows, and cached keys would be wrong. At one length it equals
`scaling: ntk` with factor = length / train length. `evaluate.py --method dynamic_ntk` has a form of
it without these faults. `longrope` has two sets of frequencies, one for texts up to
original_length, and therefore refuses to continue a cached text beyond that length.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.positions.base import Pair, Shape, Turning
from megatron.positions.frequencies import LEAST_BASE, Scaling, fastest, with_whole_wavelengths
from megatron.positions.frequencies import inverse_frequencies as inverse_frequencies
from megatron.positions.registry import positive, register, switch


@register("rotary", aliases=("rope",))
class Rotary(Turning):
    """Rotate queries and keys by position · base^(-2j/dim), so that q·k depends on distance alone.

    rotary_pct: fraction of head_dim that turns; base: slowest wavelength / 2π
    fraction: fraction of the frequencies that turn, the fastest ones; the others carry content
        without positions (p-RoPE, arXiv 2410.06205). Unlike rotary_pct, it changes no frequency
    resonance: whether wavelengths are rounded to whole tokens (Resonance RoPE, arXiv 2403.00071)
    interleaved: whether feature 2j turns with 2j + 1 (GPT-J), and not j with j + dim/2 (GPT-NeoX)
    scaling: none, linear (position interpolation, arXiv 2306.15595), ntk (a larger base),
        by_parts (slow features as linear, fast ones as none), yarn (by_parts with larger scores,
        arXiv 2309.00071), llama3 (by_parts with another ramp, as in Llama 3.1) or longrope (a
        factor for each feature, arXiv 2402.13753)
    factor: length of the texts, as a multiple of original_length
    original_length: the length before stretching, by default seq_length
    beta_fast, beta_slow: for by_parts and yarn; features with more than beta_fast turns within
        original_length stay, those with fewer than beta_slow are stretched fully, the others in
        part
    truncate: for by_parts and yarn; whether the ramp between them begins and ends at whole features
    attention_factor: multiplies queries and keys; for yarn, by default 0.1 ln(factor) + 1, for
        longrope, by default √(1 + ln(factor) / ln(original_length)), and for llama3 1
    high_freq_factor, low_freq_factor: for llama3; as beta_fast and beta_slow for by_parts, with a
        ramp that is linear in the number of turns
    long_factor: for longrope; divisors of the frequencies in texts longer than original_length
    short_factor: for longrope; divisors of the frequencies in all other texts
    """

    published = True
    heads_alike = True
    draws_positions = False
    reference_names = {"inv_freq": "inv_freq"}
    inv_freq: Tensor
    short_inv_freq: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        rotary_pct: float = 1.0,
        fraction: float = 1.0,
        resonance: bool = False,
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
        long_factor: list[float] | None = None,
        short_factor: list[float] | None = None,
    ) -> None:
        super().__init__(shape)
        positive("rotary_pct", rotary_pct, most=1)
        described = f"rotary_pct: {rotary_pct} of head_dim = {shape.head_dim}"
        self.dim = even(int(shape.head_dim * rotary_pct), described)
        positive("fraction", fraction, least=2 / self.dim, most=1)
        positive("base", base, least=LEAST_BASE)
        self.turn = partial(rotate, interleaved=switch("interleaved", interleaved))
        length: float = shape.train_length
        if original_length is not None:
            length = positive("original_length", original_length)
        self.own_scaling = Scaling(
            scaling,
            factor,
            length,
            beta_fast,
            beta_slow,
            switch("truncate", truncate),
            attention_factor,
            high_freq_factor,
            low_freq_factor,
            long_factor,
            short_factor,
        )
        self.stretches = scaling == "none" and self.dim > 2
        self.stretched_by = None if scaling == "none" else scaling
        self.base = base
        self.fraction, self.resonance = fraction, switch("resonance", resonance)
        self.scaling: Scaling | None = None  # in use
        self.use_scaling({})
        self.is_short = False

    def use_scaling(self, options: Mapping[str, Any]) -> None:
        """See Position."""
        scaling = replace(self.own_scaling, **options)
        if scaling == self.scaling:  # transformers calls this where numbers cannot be made
            return
        scaling.check(self.dim)
        self.scaling = scaling
        self.is_scaled = scaling.name != "none"
        self.amplitude = scaling.amplitude
        inv_freq = self._turning(scaling.stretched(self.dim, self.base)).to(self.origin)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.short_length = 0  # up to which the other frequencies hold
        short_inv_freq = scaling.of_short_texts(self.dim, self.base)
        if short_inv_freq is not None:
            self.short_length = int(scaling.length)
            short_inv_freq = self._turning(short_inv_freq).to(self.origin)
        self.register_buffer("short_inv_freq", short_inv_freq, persistent=False)

    @property
    def movable(self) -> bool:
        """Not where the frequencies of training depend on the length of the text."""
        return self.own_scaling.name != "longrope"

    def prepare(self, length: int) -> None:
        """Choose the frequencies for a text of that many tokens."""
        self.is_short = length <= self.short_length

    def check_cached(self, before: int, length: int) -> None:
        if before <= self.short_length < length:
            raise UserError(
                f"pos_emb: rotary with scaling: longrope has other frequencies beyond"
                f" {self.short_length} tokens, so cached keys of a shorter text cannot be used;"
                " compute the text without a cache"
            )

    def on_queries_keys_at(
        self,
        q: Tensor,
        k: Tensor,
        query: Tensor,
        key: Tensor,
        *,
        stretch: float = 1.0,
        **place: Any,
    ) -> Pair:
        """See Position. The base becomes base · stretch^(dim / (dim - 2))."""
        frequencies = self._frequencies()
        if stretch != 1:
            base = self.base * stretch ** (self.dim / (self.dim - 2))
            frequencies = self._turning(inverse_frequencies(self.dim, base)).to(self.inv_freq)
        cos, sin = self._cos_sin(query, frequencies)
        turned_q = self.turn(q, cos, sin)
        if key is not query:
            cos, sin = self._cos_sin(key, frequencies)
        return turned_q, self.turn(k, cos, sin)

    def _turning(self, frequencies: Tensor) -> Tensor:
        """As this encoding uses them: [dim / 2] -> [dim / 2] float32."""
        if self.resonance:
            frequencies = with_whole_wavelengths(frequencies)
        return fastest(frequencies, self.fraction).float()

    def _frequencies(self) -> Tensor:
        """Those of the text that was prepared: [dim / 2] float32."""
        return self.short_inv_freq if self.is_short else self.inv_freq

    def _cos_sin(self, position: Tensor, frequencies: Tensor) -> Pair:
        """[length], [dim / 2] -> [length, dim / 2] each, float32.

        The forks' engine rounds the frequencies, and they make positions and angles of the same
        dtype. MEP's YaRN has its angles before the engine comes.
        """
        if self.paper_precision and not self.is_scaled:
            angle = (self.rounded(position)[:, None] * self.rounded(frequencies)).float()
        else:
            angle = position[:, None] * frequencies
        cos, sin = self.amplitude * angle.cos(), self.amplitude * angle.sin()
        return self.rounded(cos).to(angle.dtype), self.rounded(sin).to(angle.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn the feature pairs (j, j + dim/2) of x: [..., length, head_dim] -> same.

    cos, sin [length, dim / 2] are those of the angles; features from dim on stay as they are.
    interleaved: the pairs are (2j, 2j + 1)
    """
    half = cos.shape[-1]
    still = x.shape[-1] - 2 * half
    turning, rest = x.split([2 * half, still], dim=-1)
    pairs, of_pair = (2, half), -2
    if interleaved:
        pairs, of_pair = (half, 2), -1
    first, second = turning.unflatten(-1, pairs).unbind(of_pair)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin
    turned = torch.stack([turned_first, turned_second], dim=of_pair)
    turned = turned.flatten(-2).to(x.dtype)
    if not still:
        return turned
    return torch.cat([turned, rest], dim=-1)


def even(features: int, described: str) -> int:
    """`features`, if they can be turned in pairs."""
    if features < 2 or features % 2:
        raise UserError(
            f"{described} is {features} features, not an even number;"
            " change rotary_pct, hidden_size or num_attention_heads"
        )
    return features
