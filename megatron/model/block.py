"""One transformer layer: pre-norm, residual around attention and around the MLP."""

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.model.layers import MLP, AttentionInputs, SelfAttention, normalisation
from megatron.model.settings import Architecture


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); dropout acts on what is added.

    With parallel_residual both read the same x: x + attention(norm(x)) + mlp(norm(x)).
    """

    def __init__(self, model: Architecture) -> None:
        super().__init__()
        self.dropout = model.hidden_dropout
        self.parallel_residual = model.parallel_residual
        self.input_layernorm = normalisation(model.hidden_size, model)
        self.attention = SelfAttention(model)
        self.post_attention_layernorm = normalisation(model.hidden_size, model)
        self.mlp = MLP(model)

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x [batch, length, hidden] -> same."""
        attended = x + self._drop(self.attention(self.input_layernorm(x), inputs))
        read_by_mlp = x if self.parallel_residual else attended
        transformed = self.mlp(self.post_attention_layernorm(read_by_mlp))
        return attended + self._drop(transformed)

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)
