"""Rotary positions (RoFormer, arXiv 2104.09864, equation 34).

Feature pairs are laid out as in GPT-NeoX: feature j turns with feature j + dim/2. With
`interleaved` they are those of GPT-J: feature 2j turns with feature 2j + 1.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.positions.base import Fork, Pair, Shape, Turning
from megatron.positions.frequencies import LEAST_BASE, inverse_frequencies
from megatron.positions.registry import (
    MOST,
    chosen,
    encoding_called,
    listed,
    options_of,
    positive,
    register,
    whole,
)

CACHED_NUMBERS = 3 * 2**15
"""Numbers of queries and keys that a core turns at once: 384 KiB, which its cache holds."""


@register("rotary", aliases=("rope",))
class Rotary(Turning):
    """Queries and keys turn with position: pair j by position · base^(-2j/dim).

    So q·k depends on the distance alone. With `scaling` it is one of pi, ntk, by_parts, yarn,
    llama3 and longrope, which change the frequencies for longer texts. They take their options as
    Hugging Face spells them: {scaling: yarn, factor: 4}, where `linear` is pi. p_rope,
    clipped_rope, resonance and rope_pp take `scaling` too.

    rotary_pct: fraction of head_dim that turns
    base: slowest wavelength / 2π
    interleaved: whether feature 2j turns with 2j + 1 (GPT-J), instead of j with j + dim/2
        (GPT-NeoX)
    frequencies: radians per token, one number for each pair that turns, at most π, in place of
        the formula; a pair with 0 has no position
    """

    only_rotates = True
    in_parts = ("prepare",)  # which draws nothing
    fork = Fork({"inv_freq": "inv_freq"})
    trained_amplitude: float = 1.0  # a factor of queries and keys, so that scores get its square
    trained_short_length: int = 0  # up to which short_frequencies hold
    short_frequencies: Tensor | None = None
    inv_freq: Tensor
    short_inv_freq: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        rotary_pct: float = 1.0,
        base: float = 10000.0,
        interleaved: bool = False,
        frequencies: Sequence[float] | None = None,
    ) -> None:
        super().__init__(shape)
        positive("rotary_pct", rotary_pct, most=1)
        described = f"rotary_pct: {rotary_pct} of head_dim = {shape.head_dim}"
        self.dim = even(int(shape.head_dim * rotary_pct), described)
        self.base = positive("base", base, least=LEAST_BASE)
        self.interleaved = interleaved
        self.own_frequencies = None
        if frequencies is not None:
            self.own_frequencies = number_of_each_pair(
                "frequencies", frequencies, self.dim // 2, most=math.pi
            )
        self.stretched_by = scaling_of(type(self)) if isinstance(self, Stretched) else None
        self.scaling: dict[str, Any] = {}  # of `use_scaling`
        self.is_short = False
        self._turn_as(self)

    @property
    def stretch_fault(self) -> str | None:
        """See Position."""
        if self.stretched_by is not None:
            return f"it is stretched already (scaling: {self.stretched_by}); take another method"
        return None if self.dim > 2 else "it turns one pair of features, which cannot be stretched"

    def frequencies(self, base: float) -> Tensor:
        """Frequencies for a base, of long texts where they differ: [dim / 2] float64."""
        if self.own_frequencies is None:
            return inverse_frequencies(self.dim, base)
        if base != self.base:
            raise UserError("frequencies: they have no base that could change; take another method")
        return self.own_frequencies

    def turning(self, frequencies: Tensor) -> Tensor:
        """Frequencies as they are used, whatever the scaling: [dim / 2] float64 -> float32."""
        return frequencies.float()

    @classmethod
    def changeable(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        """See Position. Which features turn does not change, nor what follows from the length."""
        if options.get("scaling") == "dynamic":
            return {}
        names = {"scaling"}.union(options_of(cls), *map(options_of, SCALINGS.values()))
        names -= {"rotary_pct", "interleaved"}
        return {name: value for name, value in options.items() if name in names}

    def use_scaling(self, options: Mapping[str, Any]) -> None:
        """See Position."""
        if options == self.scaling:  # transformers calls this where numbers cannot be made
            return
        source = self
        if options:
            stretching = {"scaling" if name == "name" else name: options[name] for name in options}
            kind, arguments = self.joined({**self.options, **stretching})
            source = kind(self.shape, **arguments)
        self.scaling = dict(options)
        self._turn_as(source)

    def _turn_as(self, source: "Rotary") -> None:
        """Take the frequencies of an encoding, which may be this one."""
        self.is_scaled = source.stretched_by is not None
        self.amplitude = source.trained_amplitude
        self.short_length = source.trained_short_length
        both = (source.frequencies(source.base), source.short_frequencies)
        for name, frequencies in zip(("inv_freq", "short_inv_freq"), both, strict=True):
            if frequencies is not None:
                frequencies = source.turning(frequencies).to(self.origin)
            self.register_buffer(name, frequencies, persistent=False)

    def prepare(self, length: int) -> None:
        """Choose the frequencies for a text of that many tokens."""
        self.is_short = length <= self.short_length

    def check_cached(self, before: int, length: int) -> None:
        if before <= self.short_length < length:
            raise UserError(
                f"pos_emb: longrope has other frequencies beyond {self.short_length} tokens, so"
                " cached keys of a shorter text cannot be used; compute the text without a cache"
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
        frequencies = self.short_inv_freq if self.is_short else self.inv_freq
        if stretch != 1:
            base = self.base * stretch ** (self.dim / (self.dim - 2))
            frequencies = self.turning(self.frequencies(base)).to(self.inv_freq)
        table = self.once(self._table, query, frequencies)
        if key is query:
            q, k = turn(table, q, k)
        else:
            (q,), (k,) = turn(table, q), turn(self._table(key, frequencies), k)
        return q, k

    def _table(self, position: Tensor, frequencies: Tensor) -> Tensor:
        """What `turn` reads, in float32, for positions […, length] and frequencies [dim / 2].

        The forks' engine rounds the frequencies, and they make positions and angles of the same
        dtype. MEP's YaRN has its angles before the engine comes.
        """
        if self.paper_precision and not self.is_scaled:
            angle = (self.rounded(position)[..., None] * self.rounded(frequencies)).float()
        else:
            angle = position[..., None] * frequencies
        cos, sin = self.amplitude * angle.cos(), self.amplitude * angle.sin()
        return self.rounded(for_pairs(cos, sin, self.interleaved)).to(angle.dtype)

    @classmethod
    def joined(cls, options: Mapping[str, Any]) -> tuple[type["Rotary"], dict[str, Any]]:
        """The class of these options, which `scaling` may change, and those that it takes."""
        rest = dict(options)
        scaling = chosen("scaling", rest.pop("scaling", "none"), SCALINGS)
        kind = SCALINGS[scaling]
        if issubclass(cls, kind):
            kind = cls
        elif not issubclass(kind, cls):
            kind = type(cls.__name__, (cls, kind), {})
        takes = options_of(kind)
        for name in rest.keys() - takes.keys():
            if any(name in options_of(other) for other in SCALINGS.values()):
                raise UserError(f"{name}: {rest[name]} has no effect with scaling: {scaling}")
        if "factor" in takes:
            rest.setdefault("factor", 1.0)
        return kind, rest


@register("p_rope")
class PRope(Rotary):
    """Rotary in which only the fastest frequencies turn (p-RoPE, arXiv 2410.06205).

    The other features carry content without positions. Unlike rotary_pct, it changes no frequency.

    fraction: fraction of the frequencies that turn
    """

    def __init__(self, shape: Shape, *, fraction: float = 0.75, **rotary: Any) -> None:
        self.fraction = fraction
        super().__init__(shape, **rotary)

    def turning(self, frequencies: Tensor) -> Tensor:
        fraction = positive("fraction", self.fraction, least=2 / self.dim, most=1)
        turns = torch.arange(len(frequencies)) < math.floor(fraction * len(frequencies))
        return torch.where(turns, super().turning(frequencies), 0.0)


@register("clipped_rope")
class ClippedRope(Rotary):
    """Rotary whose slowest frequencies fade to 0 by half a cosine (CoPE, arXiv 2602.05258).

    The frequencies of the last `clipped` pairs are multiplied by (1 + cos(π m / (clipped - 1))) / 2
    with m = 0 … clipped - 1, after any scaling. So the last pair carries content without positions.
    The authors' code clips 20 of 64 pairs.

    clipped: how many pairs; null for those that turn less than once within seq_length
    """

    def __init__(self, shape: Shape, *, clipped: int | None = None, **rotary: Any) -> None:
        self.clipped = clipped
        super().__init__(shape, **rotary)

    def turning(self, frequencies: Tensor) -> Tensor:
        if self.clipped is None:
            turns = inverse_frequencies(self.dim, self.base) * self.shape.train_length / math.tau
            clipped = int((turns < 1).sum())
        else:
            clipped = whole("clipped", self.clipped, most=len(frequencies))
        angle = torch.arange(clipped, dtype=torch.float64) * math.pi / max(1, clipped - 1)
        factors = torch.ones_like(frequencies)
        factors[len(frequencies) - clipped :] = (1 + angle.cos()) / 2
        return super().turning(frequencies * factors)


@register("resonance")
class Resonance(Rotary):
    """Rotary with wavelengths of whole tokens: frequency 2π / round(2π / θ) (arXiv 2403.00071).

    This is equation 6 of Resonance RoPE.
    """

    def turning(self, frequencies: Tensor) -> Tensor:
        wavelengths = 2 * math.pi / frequencies
        return super().turning(2 * math.pi / wavelengths.round())


class Stretched(Rotary):
    """Rotary for longer texts.

    factor: length of the texts, as a multiple of original_length
    original_length: the length before stretching, by default seq_length
    attention_factor: multiplies queries and keys; by default 1, or what the formula has
    """

    usual_amplitude: float = 1.0

    def __init__(
        self,
        shape: Shape,
        *,
        factor: float,
        original_length: int | None = None,
        attention_factor: float | None = None,
        **rotary: Any,
    ) -> None:
        self.factor = positive("factor", factor, least=1)
        self.length: float = shape.train_length
        if original_length is not None:
            self.length = positive("original_length", original_length, least=2)
        if attention_factor is None:
            attention_factor = self.usual_amplitude
        self.trained_amplitude = positive("attention_factor", attention_factor)
        super().__init__(shape, **rotary)


@register("pi")
class Interpolation(Stretched):
    """Position interpolation: rotary at position / factor (arXiv 2306.15595)."""

    def frequencies(self, base: float) -> Tensor:
        return super().frequencies(base) / self.factor


@register("ntk")
class Ntk(Stretched):
    """Rotary with a larger base: base · factor^(dim / (dim - 2)), where dim features turn.

    NTK-aware scaling (arXiv 2309.00071, section 3.1). Hugging Face's `dynamic` is rotary with
    {scaling: dynamic, factor: …}: there early tokens depend on the length of the text. `evaluate.py
    --method dynamic_ntk` has a form without this fault.
    """

    def frequencies(self, base: float) -> Tensor:
        if self.dim < 4:
            raise UserError(
                f"scaling: ntk stretches nothing with {self.dim} turning features; give at least 4"
            )
        return super().frequencies(base * self.factor ** (self.dim / (self.dim - 2)))


class Dynamic(Ntk):
    """Ntk by (factor · length / original_length - factor + 1) in texts beyond original_length.

    Hugging Face's `dynamic`. Its length is that of the text that is computed, while transformers
    keeps the longest one since a text below original_length. No cached text grows beyond it.
    """

    movable = False  # the frequencies of training depend on the length of the text

    def __init__(self, shape: Shape, *, factor: float, **rotary: Any) -> None:
        self.growth = positive("factor", factor, least=1)
        super().__init__(shape, factor=1.0, **rotary)

    @classmethod
    def changeable(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}

    def prepare(self, length: int) -> None:
        self.factor = self.growth * max(length / self.length, 1) - self.growth + 1
        self.inv_freq = self.turning(self.frequencies(self.base)).to(self.inv_freq)

    def check_cached(self, before: int, length: int) -> None:
        if length > self.length:
            raise UserError(
                f"pos_emb: scaling: dynamic has other frequencies at each length beyond"
                f" {self.length:g} tokens, so cached keys of a shorter text cannot be used; compute"
                " the text without a cache"
            )


class Partly(Stretched):
    """Rotary of which slow features are stretched and fast ones stay."""

    def frequencies(self, base: float) -> Tensor:
        frequencies = super().frequencies(base)
        part = self.stretched_part(base, frequencies)
        return part * frequencies / self.factor + (1 - part) * frequencies

    def stretched_part(self, base: float, frequencies: Tensor) -> Tensor:
        """How much of the stretching each feature gets, from 0 to 1: [dim / 2] -> same."""
        raise NotImplementedError


@register("by_parts")
class ByParts(Partly):
    """Position interpolation of the slow features only: fast ones stay (arXiv 2309.00071).

    The ramp between them is linear in the feature's number, as in YaRN's code and every published
    checkpoint. In the paper's section 3.2 it is linear in the number of turns.

    beta_fast: features with more turns than this within original_length stay
    beta_slow: features with fewer turns than this are stretched fully, those between in part
    truncate: whether the ramp begins and ends at whole features
    """

    def __init__(
        self,
        shape: Shape,
        *,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        truncate: bool = True,
        **rotary: Any,
    ) -> None:
        self.turns = falling({"beta_fast": beta_fast, "beta_slow": beta_slow})
        self.truncate = truncate
        super().__init__(shape, **rotary)

    def stretched_part(self, base: float, frequencies: Tensor) -> Tensor:
        # The j that turns so often within `length`: length · base^(-2j/dim) = 2π · turns.
        low, high = (
            self.dim * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in self.turns
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.dim - 1)
        width = high - low or 0.001
        ramp = (torch.arange(self.dim // 2, dtype=torch.float64) - low) / width
        return ramp.clamp(0, 1)


@register("yarn")
class Yarn(ByParts):
    """Slow features interpolated, scores scaled: by_parts with q and k times 0.1 ln(factor) + 1.

    YaRN (arXiv 2309.00071).
    """

    @property
    def usual_amplitude(self) -> float:
        """Section 3.4: temperature t is √(1/t) = 0.1 ln(factor) + 1 on queries and on keys."""
        return 0.1 * math.log(self.factor) + 1


@register("llama3")
class Llama3(Partly):
    """Llama 3.1's variant of by_parts: the ramp is linear in the number of turns.

    See section 3.2 of arXiv 2309.00071.

    high_freq_factor: as beta_fast of by_parts
    low_freq_factor: as beta_slow of by_parts
    """

    def __init__(
        self,
        shape: Shape,
        *,
        high_freq_factor: float = 4.0,
        low_freq_factor: float = 1.0,
        **rotary: Any,
    ) -> None:
        self.turns = falling(
            {"high_freq_factor": high_freq_factor, "low_freq_factor": low_freq_factor}
        )
        super().__init__(shape, **rotary)

    def stretched_part(self, base: float, frequencies: Tensor) -> Tensor:
        high, low = self.turns
        turns = self.length * frequencies / (2 * math.pi)
        return 1 - ((turns - low) / (high - low)).clamp(0, 1)


@register("longrope")
class LongRope(Stretched):
    """Rotary with a divisor for each frequency (LongRoPE, arXiv 2402.13753).

    Texts up to original_length have other divisors than longer ones, so a cached text cannot grow
    beyond that length. Queries and keys are multiplied by √(1 + ln(factor) / ln(original_length)).

    long_factor: divisors in texts longer than original_length, one for each pair that turns, or one
        for all
    short_factor: divisors in all other texts
    """

    movable = False  # the frequencies of training depend on the length of the text

    def __init__(
        self,
        shape: Shape,
        *,
        long_factor: float | Sequence[float] | None = None,
        short_factor: float | Sequence[float] = 1.0,
        **rotary: Any,
    ) -> None:
        self.long_factor, self.short_factor = long_factor, short_factor
        super().__init__(shape, **rotary)

    @property
    def usual_amplitude(self) -> float:
        return math.sqrt(1 + math.log(self.factor) / math.log(self.length))

    @property
    def trained_short_length(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return int(self.length)

    @property
    def short_frequencies(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return super().frequencies(self.base) / self._divisors("short_factor")

    def frequencies(self, base: float) -> Tensor:
        return super().frequencies(base) / self._divisors("long_factor")

    def _divisors(self, option: str) -> Tensor:
        """The numbers of an option: [dim / 2] float64."""
        pairs = self.dim // 2
        numbers = getattr(self, option)
        if isinstance(numbers, int | float):
            numbers = [numbers] * pairs
        divisors = number_of_each_pair(option, numbers, pairs)
        positive(option, float(divisors.min()))
        return divisors


SCALINGS: dict[str, type[Rotary]] = {
    "none": Rotary,
    "linear": Interpolation,
    "ntk": Ntk,
    "dynamic": Dynamic,
    "by_parts": ByParts,
    "yarn": Yarn,
    "llama3": Llama3,
    "longrope": LongRope,
    "clipped_rope": ClippedRope,
}
"""Values of the option `scaling`."""


def scaling_of(encoding: type[Rotary]) -> str:
    """The last of SCALINGS that a class is."""
    *_, scaling = [name for name, kind in SCALINGS.items() if issubclass(encoding, kind)]
    return scaling


def spelled_out(name: str, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """An encoding by all of its options, relatives of rotary as `scaling` of it.

    So yarn {factor: 4} and rotary {scaling: yarn, factor: 4} are the same.
    """
    called = encoding_called(name)
    encoding, chosen_options = called.joined(options)
    spelled = {key: option.default for key, option in options_of(encoding).items()} | chosen_options
    is_ours = called.__module__ == __name__  # a user's subclass may turn by other angles
    if not (is_ours and encoding.only_rotates):
        return name, spelled
    spelled |= {"scaling": scaling_of(encoding), "resonance": issubclass(encoding, Resonance)}
    frequencies = spelled["frequencies"]
    if frequencies is not None and spelled["scaling"] == "none" and all(frequencies):
        # Longrope says the same by divisors, and transformers has it.
        usual = inverse_frequencies(2 * len(frequencies), spelled["base"])
        divisors = (usual / torch.tensor(frequencies, dtype=torch.float64)).tolist()
        factors = {"short_factor": divisors, "long_factor": divisors, "factor": 1.0}
        rest = {key: value for key, value in options.items() if key != "frequencies"}
        return spelled_out(name, {**rest, "scaling": "longrope", **factors})
    return "rotary", spelled


def number_of_each_pair(option: str, numbers: Any, pairs: int, most: float = MOST) -> Tensor:
    """The numbers of an option, positive or 0: [pairs] float64."""
    example = f"{pairs} numbers, one for each feature pair that turns"
    numbers = listed(option, numbers, example=example, most=pairs)
    if len(numbers) != pairs:
        raise UserError(f"{option}: {len(numbers)} numbers are given; give {example}")
    checked = [number if number == 0 else positive(option, number, most=most) for number in numbers]
    return torch.tensor(checked, dtype=torch.float64)


def falling(options: Mapping[str, float]) -> tuple[float, float]:
    """Values of two options, the first of which must be larger."""
    (larger, most), (smaller, least) = options.items()
    if positive(larger, most) <= positive(smaller, least):
        raise UserError(f"{larger}: {most} is not more than {smaller}: {least}")
    return most, least


class Turn(torch.autograd.Function):
    """Tensors turned by a table's angles, forth (1) or back (-1) as their gradients are.

    They are rounded once, to their own dtype.
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, direction: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(table)
        ctx.direction = direction
        turned = torch.cat(tensors, dim=1)
        rows = turned.shape[2]
        if turned.device.type == "cpu":
            rows = 1 + CACHED_NUMBERS * rows // (1 + turned.numel())
        layout = table.shape[-3:]
        for x, (cos, sin) in zip(turned.split(rows, dim=2), table.split(rows, dim=-4), strict=True):
            pairs = x[..., : layout.numel()].unflatten(-1, layout)
            others = pairs.roll(1, -2)  # the other feature of each pair
            if x.dtype == cos.dtype:
                # Not by addcmul, which may round once where a product and a sum round twice.
                pairs.mul_(cos).add_(others.mul_(sin), alpha=direction)
            else:
                torch.addcmul(pairs * cos, others, sin, value=direction, out=pairs)
        return turned.split([x.shape[1] for x in tensors], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *Turn.apply(*ctx.saved_tensors, -ctx.direction, *gradients)


def turn(table: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`rotate` of tensors at the same positions, at once and in few operations.

    table: of `for_pairs`, which gets no gradient; tensors [batch, heads, length, head_dim] -> same
    """
    if torch.compiler.is_compiling():  # it makes one pass of the definition
        both = table.select(-2, 1).flatten(-2)
        return tuple(rotate(x, *both, interleaved=table.shape[-1] == 1) for x in tensors)
    return Turn.apply(table, 1, *tensors)


def for_pairs(cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """What a feature and the other of its pair are multiplied by: [2, ...].

    cos, sin [..., dim / 2] -> [2, ..., 1, 2, dim / 2], or interleaved [2, ..., dim / 2, 2, 1]
    """
    cos, sin = (x.unsqueeze(-1 if interleaved else -2) for x in (cos, sin))
    return torch.stack([torch.stack([cos, cos], -2), torch.stack([-sin, sin], -2)])


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn the feature pairs (j, j + dim/2) of x: [..., length, head_dim] -> same.

    cos, sin [length, dim / 2] are those of the angles; features from dim on stay as they are.
    interleaved: the pairs are (2j, 2j + 1)
    """
    pairs, axis = ((-1, 2), -1) if interleaved else ((2, -1), -2)
    dim = 2 * cos.shape[-1]
    turning, rest = x.split([dim, x.shape[-1] - dim], dim=-1)
    first, second = turning.unflatten(-1, pairs).unbind(axis)
    turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=axis)
    turned = turned.flatten(-2).to(x.dtype)
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def rotate_both(q: Tensor, k: Tensor, angle: Tensor) -> Pair:
    """Queries and keys turned by the same angles [..., length, dim / 2]: see `rotate`."""
    cos, sin = angle.cos(), angle.sin()
    return rotate(q, cos, sin), rotate(k, cos, sin)


def even(features: int, described: str) -> int:
    """`features`, if they can be turned in pairs."""
    if features < 2 or features % 2:
        raise UserError(
            f"{described} is {features} features, not an even number;"
            " change rotary_pct, hidden_size or num_attention_heads"
        )
    return features
