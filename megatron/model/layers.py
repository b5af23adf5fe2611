"""The two halves of a transformer block: self-attention and the MLP, with GPT-NeoX's parameter names and layout."""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.attention import attention
from megatron.positions import Position


class SelfAttention(nn.Module):
    """Multi-head causal self-attention; the fused projection is ordered [heads, (q, k, v), head_dim]."""

    def __init__(self, hidden: int, heads: int, backend: str) -> None:
        super().__init__()
        self.heads = heads
        self.backend = backend
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, position: Position, bias: Tensor | None, weight: Tensor | None) -> Tensor:
        """x [batch, length, hidden], bias and weight [heads, length] or None -> [batch, length, hidden]."""
        batch, length, hidden = x.shape
        fused = self.query_key_value(x).view(batch, length, self.heads, 3, -1)
        q, k, v = fused.permute(3, 0, 2, 1, 4)  # [batch, heads, length, head_dim] each
        q, k = position.on_queries_keys(q, k)
        out = attention(q, k, v, bias, weight=weight, backend=self.backend)
        return self.dense(out.transpose(1, 2).reshape(batch, length, hidden))


class MLP(nn.Module):
    """hidden -> 4 hidden -> GELU -> hidden."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(hidden, 4 * hidden)
        self.dense_4h_to_h = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(F.gelu(self.dense_h_to_4h(x)))
