"""Sums over all tokens up to a key, for encodings that count by content."""

import torch
from torch import Tensor


def running_sum(new: Tensor, memory: dict[str, Tensor], name: str) -> Tensor:
    """Sums of the tokens up to each key: [batch, heads, queries] -> [batch, heads, keys] float64.

    memory[name] holds those of earlier tokens, and then all of them. In float64, because a sum
    over 16384 tokens in float32 has lost what its neighbours differ by.
    """
    total = new.double().cumsum(dim=-1)
    if name in memory:
        earlier = memory[name]
        total = torch.cat([earlier, earlier[..., -1:] + total], dim=-1)
    memory[name] = total
    return total
