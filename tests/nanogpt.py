"""nanoGPT's model in torch alone: what a step of ours is timed beside (tools/bench.py)."""

from argparse import Namespace

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A layer: x [batch, length, hidden] -> same."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(hidden), nn.LayerNorm(hidden)])
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).split(hidden, dim=2)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norms[1](x))


class NanoGPT(nn.Module):
    """Learned positions, and the output matrix tied to the embedding."""

    def __init__(self, options: Namespace) -> None:
        super().__init__()
        hidden, longest = options.hidden, max(options.length, options.train_length)
        self.tokens = nn.Embedding(options.vocab, hidden)
        self.places = nn.Embedding(longest, hidden)
        self.layers = nn.ModuleList(Block(hidden, options.heads) for _ in range(options.layers))
        self.norm = nn.LayerNorm(hidden)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, labels: Tensor, mean: bool = True) -> Tensor:
        """The mean cross entropy; ids, labels [batch, length] int64 -> []"""
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
