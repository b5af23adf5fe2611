"""The two halves of a transformer block: self-attention and the MLP, with GPT-NeoX's parameter names and layout."""

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.attention import attention
from megatron.positions import Position


@dataclass(frozen=True)
class Sight:
    """What a layer's attention needs beside its input, the same for every token of a step.

    bias, weight [heads, keys] or None; start: index of the first query; window, chunk: see `attention`;
    query_scale [queries]: multiplies the queries; memory: keys, values and more of earlier tokens, or None
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
    """Multi-head causal self-attention; the fused projection is ordered [heads, (q, k, v), head_dim]."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, sight: Sight) -> Tensor:
        """x [batch, length, hidden] -> same."""
        batch, length, hidden = x.shape
        fused = self.query_key_value(x).view(batch, length, self.heads, 3, -1)
        q, k, v = fused.permute(3, 0, 2, 1, 4)  # [batch, heads, length, head_dim] each
        q, k = sight.position.on_queries_keys(q, k, sight.start)
        if sight.query_scale is not None:
            q = (q * sight.query_scale[:, None]).to(q.dtype)
        memory = {} if sight.memory is None else sight.memory
        if sight.memory is not None:
            k, v = _remember(memory, "k", k), _remember(memory, "v", v)
        position = sight.position
        out = attention(
            q,
            k,
            v,
            sight.bias,
            weight=sight.weight,
            window=sight.window,
            chunk=sight.chunk,
            index_bias=position.index_bias if position.has("index_bias") else None,
            on_scores=partial(position.on_scores, x=x, memory=memory)
            if position.has("on_scores")
            else None,
            backend=sight.backend,
            self_check=sight.self_check,
        )
        return self.dense(out.transpose(1, 2).reshape(batch, length, hidden))


def _remember(memory: dict[str, Tensor], name: str, new: Tensor) -> Tensor:
    """Earlier tokens and these: [batch, heads, keys, head_dim]."""
    memory[name] = torch.cat([memory[name], new], dim=2) if name in memory else new
    return memory[name]


class MLP(nn.Module):
    """hidden -> 4 hidden -> GELU -> hidden."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden, 4 * hidden)
        self.dense_4h_to_h = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))
