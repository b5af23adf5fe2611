"""One transformer layer: pre-norm, residual around attention and around the MLP."""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.layers import MLP, SelfAttention
from megatron.positions import Position


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); dropout acts on what is added."""

    def __init__(self, hidden: int, heads: int, *, epsilon: float, dropout: float, backend: str) -> None:
        super().__init__()
        self.dropout = dropout
        self.input_layernorm = nn.LayerNorm(hidden, eps=epsilon)
        self.attention = SelfAttention(hidden, heads, backend)
        self.post_attention_layernorm = nn.LayerNorm(hidden, eps=epsilon)
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor, position: Position, bias: Tensor | None, weight: Tensor | None) -> Tensor:
        """x [batch, length, hidden], bias and weight [heads, length] or None -> [batch, length, hidden]."""
        x = x + self._drop(self.attention(self.input_layernorm(x), position, bias, weight))
        return x + self._drop(self.mlp(self.post_attention_layernorm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)
