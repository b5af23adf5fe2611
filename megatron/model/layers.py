"""Self-attention and MLP of a transformer block, with GPT-NeoX's parameter names and layout."""

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.attention import attention
from megatron.positions import Position


@dataclass(frozen=True)
class AttentionInputs:
    """What a layer's attention needs beside x, the same for every token of a step.

    bias, weight [heads, keys] or None; start: index of the first query;
    window, chunk: see `attention`; query_scale [queries]: multiplies the queries;
    memory: keys, values and more of earlier tokens; None to keep nothing
    """

    position: Position
    bias: Tensor | None = None
    weight: Tensor | None = None
    start: int = 0
    window: int | None = None
    chunk: int | None = None
    query_scale: Tensor | None = None
    backend: str = "auto"
    self_check: bool = True
    memory: dict[str, Tensor] | None = field(default=None, compare=False)


class SelfAttention(nn.Module):
    """Causal self-attention; its fused projection is ordered [heads, (q, k, v), head_dim]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x [batch, length, hidden] -> same."""
        batch, length, hidden = x.shape
        position = inputs.position
        fused = self.query_key_value(x).view(batch, length, self.heads, 3, -1)
        q, k, v = fused.permute(3, 0, 2, 1, 4)  # [batch, heads, length, head_dim] each
        q, k = position.on_queries_keys(q, k, inputs.start)
        if inputs.query_scale is not None:
            q = (q * inputs.query_scale[:, None]).to(q.dtype)
        memory = {}
        if inputs.memory is not None:
            memory = inputs.memory
            k = _remember(memory, "k", k)
            v = _remember(memory, "v", v)
        on_scores = None
        if position.has("on_scores"):
            on_scores = partial(position.on_scores, x=x, memory=memory)
        out = attention(
            q,
            k,
            v,
            inputs.bias,
            weight=inputs.weight,
            window=inputs.window,
            chunk=inputs.chunk,
            index_bias=position.index_bias if position.has("index_bias") else None,
            on_scores=on_scores,
            backend=inputs.backend,
            self_check=inputs.self_check,
        )
        return self.dense(out.transpose(1, 2).reshape(batch, length, hidden))


def _remember(memory: dict[str, Tensor], name: str, new: Tensor) -> Tensor:
    """Append new tokens to those in memory: [batch, heads, keys, head_dim]."""
    if name in memory:
        new = torch.cat([memory[name], new], dim=2)
    memory[name] = new
    return new


class MLP(nn.Module):
    """hidden -> 4 hidden -> GELU -> hidden."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden, 4 * hidden)
        self.dense_4h_to_h = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))
