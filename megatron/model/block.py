"""One transformer layer: pre-norm, residual around attention and around the MLP."""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.layers import MLP, AttentionInputs, SelfAttention


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); dropout acts on what is added."""

    def __init__(self, hidden: int, heads: int, *, epsilon: float, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.input_layernorm = nn.LayerNorm(hidden, eps=epsilon)
        self.attention = SelfAttention(hidden, heads)
        self.post_attention_layernorm = nn.LayerNorm(hidden, eps=epsilon)
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x [batch, length, hidden] -> same."""
        attended = self.attention(self.input_layernorm(x), inputs)
        x = x + self._drop(attended)
        transformed = self.mlp(self.post_attention_layernorm(x))
        return x + self._drop(transformed)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)
