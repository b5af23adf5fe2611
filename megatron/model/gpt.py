"""The GPT of the papers: embedding, blocks, final norm, output matrix; the encoding enters through its hooks only."""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.errors import UserError
from megatron.model.block import Block
from megatron.model.init import initialize
from megatron.positions import Position

HEAD_TOKENS = 2048  # tokens whose logits exist at one time where no gradient is wanted


class GPT(nn.Module):
    """A decoder-only language model.

    model: the configuration's section of that name; vocab: rows of the embedding, padding included;
    position: the encoding, one for all layers; backend: which attention computes it
    """

    def __init__(self, model: Any, *, position: Position, vocab: int, backend: str = "auto") -> None:
        super().__init__()
        hidden = model.hidden_size
        self.vocab = vocab
        self.dropout = model.hidden_dropout
        self.checkpoint_activations = False
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(
            Block(
                hidden,
                model.num_attention_heads,
                epsilon=model.layernorm_epsilon,
                dropout=model.hidden_dropout,
                backend=backend,
            )
            for _ in range(model.num_layers)
        )
        self.norm = nn.LayerNorm(hidden, eps=model.layernorm_epsilon)
        self.final_linear = nn.Linear(hidden, vocab, bias=False) if model.no_weight_tying else None
        initialize(
            self,
            std=model.init_method_std,
            layers=model.num_layers,
            scaled=model.output_layer_init_method == "scaled_normal",
        )
        self.position = position  # after initialize: an encoding sets its own first values

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """ids [batch, length] -> logits [batch, length, vocab]; with labels [batch, length], the cross entropy of each
        token instead: [batch, length] float32."""
        x = self.features(ids)
        return F.linear(x, self.output_matrix) if labels is None else self.losses(x, labels)

    def features(self, ids: Tensor) -> Tensor:
        """ids [batch, length] -> [batch, length, hidden], after the final norm."""
        if ids.dim() != 2:
            raise UserError(f"ids: {list(ids.shape)} must be [batch, length]")
        length = ids.shape[1]
        bias, weight = self.position.distance_bias(length), self.position.distance_weight(length)  # once per step
        x = self.position.on_embeddings(self.word_embeddings(ids))
        x = F.dropout(x, self.dropout, self.training)
        for block in self.layers:
            if self.checkpoint_activations and torch.is_grad_enabled():
                x = checkpoint(block, x, self.position, bias, weight, use_reentrant=False)
            else:
                x = block(x, self.position, bias, weight)
        return self.norm(x)

    def losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """Cross entropy of each token in float32: [batch, length, hidden], [batch, length] -> [batch, length].

        Without gradients the logits exist for a block of tokens at a time: those of a 16384 window are 3.3 GB.
        """
        rows, targets = x.flatten(0, 1), labels.flatten()
        block = len(rows) if torch.is_grad_enabled() else HEAD_TOKENS
        parts = [
            F.cross_entropy(F.linear(part, self.output_matrix).float(), target, reduction="none")
            for part, target in zip(rows.split(block), targets.split(block), strict=True)
        ]
        return torch.cat(parts).view_as(labels)

    def use_backend(self, backend: str) -> None:
        """Compute attention by another backend from now on."""
        for block in self.layers:
            cast(Block, block).attention.backend = backend

    @property
    def output_matrix(self) -> Tensor:
        """[vocab, hidden]: the output's own matrix, or the embedding where they are tied."""
        return self.word_embeddings.weight if self.final_linear is None else self.final_linear.weight
