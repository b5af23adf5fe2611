"""Scores that grow with the number of keys: scalable softmax (arXiv 2501.19399) and Llama 4."""

import math

import torch
from torch import Tensor, nn

from megatron.positions.base import EXACT, Position, Shape
from megatron.positions.registry import positive, register, whole


@register("ssmax")
class SSMax(Position):
    """Scores that grow with the number n of visible keys: softmax(s · ln n · q·k/√head_dim).

    It has no positions of its own; `sum` combines it with an encoding such as rotary. Every head of
    every layer learns its own s. Keys hidden by a window, blocks or documents don't count. With
    `scale: null` and `learned: false` it is the trained form of log-n scaling (Su 2021,
    kexue.fm/archives/8823). For models that were trained without it, use the key `logn_scale`.

    scale: first value of s; null for 1 / ln(seq_length), which makes the factor 1 at that length
    learned: whether s is trained
    bias: whether b is learned too, starting at 0: softmax((s · ln n + b) · q·k/√head_dim)
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
    """Llama 4's temperature for long texts: 1 + attn_scale · ln(1 + floor(n / floor_scale)).

    This factor multiplies the scores of a query with n visible keys. Llama 4 uses it in its layers
    without positions (`attn_temperature_tuning`). Alone it is such a layer; `sum` combines it with
    an encoding. Keys hidden by a window, blocks or documents don't count.

    floor_scale: tokens of a step; nothing changes before the first step
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
