"""Scores that grow with the number of keys: scalable softmax (arXiv 2501.19399) and Llama 4."""

import math

import torch
from torch import Tensor, nn

from megatron.positions.base import EXACT, Position, Shape
from megatron.positions.registry import positive, register, whole


@register("ssmax")
class SSMax(Position):
    """softmax(s · ln n · q·k/√head_dim) for a query with n visible keys, s learned for each head.

    Alone it has no positions; `sum` joins it to an encoding, such as rotary. Every layer has its
    own s. Keys that a window, blocks or documents hide do not count. With `scale: null` and
    `learned: false` it is the trained form of log-n scaling (Su 2021, kexue.fm/archives/8823). For
    models that were trained without it, use the key `logn_scale`.

    scale: first value of s; null for 1 / ln(seq_length), so that the factor is 1 there
    learned: whether s is trained
    bias: whether b is learned too, from 0: softmax((s · ln n + b) · q·k/√head_dim)
    """

    per_layer = True
    by_distance = False
    fixed: Tensor

    def __init__(
        self,
        shape: Shape,
        *,
        scale: float | None = 0.43,
        learned: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__(shape)
        if scale is None:
            scale = 1 / math.log(max(2, shape.train_length))
        first = torch.full((shape.heads,), positive("scale", scale))
        self.scale = nn.Parameter(first) if learned else None
        if self.scale is None:
            self.register_buffer("fixed", first, persistent=False)
        self.offset = nn.Parameter(torch.zeros(shape.heads)) if bias else None

    def score_scale(self, visible_keys: Tensor) -> Tensor:
        """[queries] int64, or with a batch before it -> […, heads, queries] float32."""
        scale = self.fixed if self.scale is None else self.bounded("scale")
        log_n = visible_keys.to(self.origin.dtype).log()
        factor = scale[:, None] * log_n[..., None, :]
        if self.offset is not None:
            factor = factor + self.bounded("offset")[:, None]
        return factor


@register("attn_temperature")
class AttentionTemperature(Position):
    """Scores times 1 + attn_scale · ln(1 + floor(n / floor_scale)) for n visible keys (Llama 4).

    Llama 4 has it in its layers without positions (`attn_temperature_tuning`), which are what it is
    alone; `sum` joins it to an encoding. Keys that a window, blocks or documents hide do not count.

    floor_scale: tokens of a step, before which nothing changes
    attn_scale: how fast the factor grows
    """

    by_distance = False

    def __init__(self, shape: Shape, *, floor_scale: int = 8192, attn_scale: float = 0.1) -> None:
        super().__init__(shape)
        self.floor_scale = whole("floor_scale", floor_scale, most=EXACT)
        self.attn_scale = positive("attn_scale", attn_scale)

    def score_scale(self, visible_keys: Tensor) -> Tensor:
        """[queries] int64, or with a batch before it -> […, 1, queries] float32."""
        steps = visible_keys // self.floor_scale
        factor = 1 + self.attn_scale * steps.to(self.origin.dtype).log1p()
        return factor[..., None, :]
