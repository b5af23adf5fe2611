"""GRAPE-M: rotations whose frequencies, or whose steps, are learned (arXiv 2512.07805)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.positions.base import Memory, Pair, Shape, Turning
from megatron.positions.frequencies import inverse_frequencies
from megatron.positions.precision import at_least_float32, without_autocast
from megatron.positions.registry import positive, register, switch
from megatron.positions.rotary import even, rotate

SCALE = 16.0  # of the released code: what it learns is divided by this, so that it moves slowly
START = -math.log(1000.0 - 1)  # of b; divided by SCALE, so that the first steps are 0.394


@register("grape_m")
class GrapeM(Turning):
    """Rotary with learned frequencies, turned by the position or by Σ sigmoid(w·x_t + b).

    The commuting form of GRAPE-M with the released code's parameters: frequencies exp(f / 16) for
    turns by position, or exp(f) for steps by content, with w and b divided by 16 too. Each layer
    has its own.

    by_content: whether the step from token t to the next depends on the layer's input, per head
    by_head: whether each head has frequencies of its own
    base: base of the first frequencies, which are rotary's
    """

    per_layer = True
    bounds = {"log_frequencies": (-16 * SCALE, 2 * SCALE)}

    def __init__(
        self,
        shape: Shape,
        *,
        by_content: bool = False,
        by_head: bool = False,
        base: float = 10000.0,
    ) -> None:
        super().__init__(shape)
        frequencies = inverse_frequencies(
            even(shape.head_dim, "head_dim:"), positive("base", base)
        ).log()
        self.by_content = switch("by_content", by_content)
        self.rotates = not self.by_content
        self.scale = 1.0 if self.by_content else SCALE
        heads = shape.heads if switch("by_head", by_head) else 1
        self.grouped_queries = heads == 1 and not self.by_content
        start = (self.scale * frequencies).float()
        self.log_frequencies = nn.Parameter(start.repeat(heads, 1))  # [heads or 1, head_dim / 2]
        self.weight = self.bias = None
        if self.by_content:
            self.weight = nn.Parameter(torch.zeros(shape.heads, shape.hidden))
            self.bias = nn.Parameter(torch.full((shape.heads,), START))

    def has(self, hook: str) -> bool:
        """Content is looked at where the steps depend on it."""
        if hook == "on_queries_keys_by_content":
            return self.by_content
        return super().has(hook)

    def on_queries_keys_at(
        self, q: Tensor, k: Tensor, query: Tensor, key: Tensor, **place: Any
    ) -> Pair:
        """[batch, heads, length, head_dim] each -> same."""
        if self.by_content:
            return q, k
        with without_autocast(q):
            cos, sin = self._cos_sin(query)
            turned_q = rotate(q, cos, sin)
            if key is not query:
                cos, sin = self._cos_sin(key)
            return turned_q, rotate(k, cos, sin)

    def _cos_sin(self, position: Tensor) -> Pair:
        """[length] -> [heads or 1, length, head_dim / 2] each."""
        angle = position[:, None] * self._frequencies()[:, None]
        return angle.cos(), -angle.sin()

    def on_queries_keys_by_content(self, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> Pair:
        """The same by content; x [batch, length, hidden]. memory["sum"]: that of all steps."""
        if not self.by_content:
            return q, k
        with without_autocast(x):
            weight, bias = self.bounded("weight"), self.bounded("bias")
            step = F.linear(at_least_float32(x), weight, bias) / SCALE
            total = step.sigmoid().transpose(1, 2).double().cumsum(dim=-1)
            before = memory.get("sum", total.new_zeros(*total.shape[:2], 1))
            total = torch.cat([before, before + total], dim=-1)
            memory["sum"] = total[..., -1:].detach()
            phase = total[..., :-1, None]  # the steps before each token: [batch, heads, length, 1]
            turns = phase * self._frequencies()[:, None].double()
            angle = turns.fmod(2 * math.pi).to(self.origin.dtype)  # [batch, heads, length, pairs]
            cos, sin = angle.cos(), -angle.sin()
            return rotate(q, cos, sin), rotate(k, cos, sin)

    def _frequencies(self) -> Tensor:
        low, high = self.bounds["log_frequencies"]
        scaled = self.scale / SCALE
        return (self.bounded_to("log_frequencies", scaled * low, scaled * high) / self.scale).exp()
