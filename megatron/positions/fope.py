"""FoPE: rotary in which every angle is a mixture of frequencies (arXiv 2412.17739)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.errors import UserError
from megatron.positions.base import Pair, Position, Shape
from megatron.positions.frequencies import LEAST_BASE, inverse_frequencies
from megatron.positions.precision import without_autocast
from megatron.positions.registry import positive, register, whole
from megatron.positions.rotary import even, rotate


@register("fope")
class FoPE(Position):
    """Rotary whose angles mix frequencies: Σ_n a_nc cos(tθ_n) and Σ_n b_nc sin(tθ_n) for pair c.

    These sums at token t replace the cosine and the sine of pair c. θ_n are rotary's frequencies
    whose wavelength is at most seq_length (arXiv 2412.17739, with the first values of the released
    code). They fill up to a quarter of head_dim pairs. The other pairs have no position: as in the
    released code, their cosine and sine are both 1. Scores don't depend on the distance alone.

    base: slowest wavelength / 2π
    dim: rotary has half as many frequencies; at least head_dim
    keep_slow: whether slower frequencies stay as constants, for as many pairs as rotary turns
    shared: whether a and b are one matrix for all heads, instead of two for each
    learned: whether a and b are learned in each layer; otherwise all layers share one random draw,
        as in the paper
    gain: size of the random part of the first values; 0.3 for 60 million weights, 0.6 for 1.2
        billion
    seed: of the random draw, if a and b are not learned
    """

    by_distance = False
    grouped_queries = False
    frequencies: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        base: float = 10000.0,
        dim: int | None = None,
        keep_slow: bool = False,
        shared: bool = False,
        learned: bool = False,
        gain: float = 0.3,
        seed: int = 1,
    ) -> None:
        super().__init__(shape)
        self.per_layer = learned
        self.grouped_queries = shared
        self.pairs = even(shape.head_dim, "head_dim:") // 2
        if dim is not None:
            dim = even(whole("dim", dim, least=shape.head_dim, most=2**16), "dim:")
        base = positive("base", base, least=LEAST_BASE)
        frequencies = inverse_frequencies(dim or shape.head_dim, base)
        fast = frequencies >= 2 * math.pi / shape.train_length
        if keep_slow:
            frequencies, outputs = frequencies * fast, self.pairs
        else:
            frequencies = frequencies[fast]
            outputs = min(len(frequencies), shape.head_dim // 4)
        if not outputs:
            raise UserError(
                f"seq_length: {shape.train_length} and head_dim = {shape.head_dim} let no pair turn"
                " - give at least 7 and 4"
            )
        self.register_buffer("frequencies", frequencies.float(), persistent=False)

        first = torch.zeros(len(frequencies), outputs)
        row = torch.arange(0, len(frequencies), math.ceil(len(frequencies) / outputs))
        first[row, torch.arange(len(row))] = 1.0  # the last columns may have none, as there
        seed = whole("seed", seed, most=2**31)
        generator = None if learned else torch.Generator().manual_seed(seed)
        sizes = first.shape if shared else (shape.heads, *first.shape)
        gain = positive("gain", gain)
        self.mixtures = ("cosines", "cosines") if shared else ("cosines", "sines")
        for name in dict.fromkeys(self.mixtures):
            noise = nn.init.xavier_normal_(torch.empty(sizes), gain, generator=generator)
            if learned:
                self.register_parameter(name, nn.Parameter(first + noise))
            else:
                self.register_buffer(name, first + noise, persistent=False)

    def on_queries_keys(self, q: Tensor, k: Tensor, start: int = 0) -> Pair:
        """[batch, heads, length, head_dim] each -> same."""
        with without_autocast(q):
            angle = self.indices(start, q.shape[-2])[:, None] * self.frequencies
            cosines, sines = (self.bounded(name) for name in self.mixtures)
            cos, sin = angle.cos() @ cosines, angle.sin() @ sines  # [heads, length, turning pairs]
            rest = (0, self.pairs - cos.shape[-1])
            cos, sin = (F.pad(x, rest, value=1.0) for x in (cos, sin))
            return rotate(q, cos, sin), rotate(k, cos, sin)
