"""xPos: rotary positions whose slower features also decay with distance (LEX, arXiv 2212.10554)."""

import math
from typing import Any

import torch
from torch import Tensor

from megatron.errors import UserError
from megatron.positions.base import Pair, Shape, Turning
from megatron.positions.frequencies import inverse_frequencies
from megatron.positions.registry import positive, register
from megatron.positions.rotary import even, for_pairs, turn

ROOM = 64  # a scaled feature may be this much larger than its scale before it overflows


@register("xpos")
class XPos(Turning):
    """Rotary that also decays with distance: pair i is multiplied by zeta_i^(d / scale_base).

    zeta_i = (2i/head_dim + 0.4) / 1.4. This is the paper's algorithm 1, with gamma and scale_base
    of torchscale. The paper evaluates it with `blockwise: true`.

    base: slowest wavelength / 2π
    scale_base: the distance at which pair i has decayed to zeta_i
    xi: replaces zeta_i by one factor for all pairs: rotary's scores times xi^d (Su 2023,
        kexue.fm/archives/9431); exact at any length, because scores are multiplied, not q and k
    """

    inv_freq: Tensor
    log_zeta: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        base: float = 10000.0,
        scale_base: float = 512.0,
        xi: float | None = None,
    ) -> None:
        super().__init__(shape)
        dim = even(shape.head_dim, "head_dim:")
        self.xi = None if xi is None else positive("xi", xi, most=1.0)
        self.scale_base = positive("scale_base", scale_base)
        # A query carries zeta^n and a key zeta^-n, so any centre gives the same scores. torchscale
        # takes the middle of each text. That would make cached keys wrong, so we take the middle of
        # the training length for every text.
        self.centre = shape.train_length // 2
        if self.xi is None:
            self._check_length(shape.train_length, torch.float32)
        inv_freq = inverse_frequencies(dim, positive("base", base)).float()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        zeta = (torch.arange(0, dim, 2, dtype=torch.float64) / dim + 0.4) / 1.4
        self.register_buffer("log_zeta", zeta.log().float(), persistent=False)

    def on_queries_keys_at(
        self, q: Tensor, k: Tensor, query: Tensor, key: Tensor, *, start: int = 0, **place: Any
    ) -> Pair:
        """[batch, heads, length, head_dim] each -> same; angles, scales and products in float32.

        Raises UserError if the scale of a far key would overflow: beyond about 3000 tokens in fp16,
        and 34000 in bf16 and fp32.
        """
        if self.xi is None:
            self._check_length(start + q.shape[-2], q.dtype)
        query_table, _ = self.once(self._tables, query)
        _, key_table = self.once(self._tables, key)
        (q,), (k,) = turn(query_table, q), turn(key_table, k)
        return q, k

    def _tables(self, position: Tensor) -> Pair:
        """What `turn` reads for queries and for keys, at positions [length]."""
        angle = position[:, None] * self.inv_freq
        cos, sin = angle.cos(), angle.sin()
        scale = 1
        if self.xi is None:
            exponent = (position - self.centre) / self.scale_base
            scale = torch.exp(exponent[:, None] * self.log_zeta)  # [length, head_dim / 2]
        return for_pairs(cos * scale, sin * scale), for_pairs(cos / scale, sin / scale)

    def has(self, hook: str) -> bool:
        """There is a factor by distance with `xi` alone."""
        if hook == "distance_weight":
            return self.xi is not None
        return super().has(hook)

    def distance_weight(self, length: int) -> Tensor | None:
        """xi^d: [heads, length] float32, 0 where float32 has no such number."""
        return None if self.xi is None else self.table(self._shared_decay, length)

    def _shared_decay(self, distance: Tensor) -> Tensor:
        assert self.xi is not None
        # In float64: an exponent of -80 rounded to float32 would cost a factor 1 + 5e-6.
        decay = torch.exp(distance.double() * math.log(self.xi))
        return decay.to(distance.dtype).expand(self.shape.heads, -1)

    def _check_length(self, end: int, dtype: torch.dtype) -> None:
        """Raises UserError if the largest scale, 1 / zeta_0 at the last position, is too large."""
        largest = torch.finfo(dtype).max / ROOM
        exponent = math.log(largest) / math.log(1.4 / 0.4)
        most = int(exponent * self.scale_base + self.centre)
        if end > most:
            name = str(dtype).removeprefix("torch.")
            raise UserError(
                f"pos_emb: xpos overflows {name} beyond {most} tokens, so length {end} cannot be"
                " computed; use bf16 or fp32, a shorter length or a larger scale_base"
            )
