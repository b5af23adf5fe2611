"""Where attention looks: its entropy by head, and how much of it goes how far back, for the last queries of a text."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.attention import BACKENDS
from megatron.attention.eager import probabilities
from megatron.errors import UserError
from megatron.evaluation.probes.recorded import computed_by
from megatron.model import GPT

QUERIES, BLOCK = 256, 64  # queries of a window that are looked at, and how many at a time
LONGEST = 2048  # for an encoding that looks at content: it needs the whole matrix of scores


def edges(length: int) -> list[int]:
    """Distances at which the bins of `mass` begin, and `length`: 0, 1, 2, 4, 8, …"""
    return [0, *(2**power for power in range(length.bit_length()) if 2**power < length), length]


@torch.no_grad()
def attention_by_distance(model: GPT, windows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Windows [length + 1] -> (entropy [layers, heads] in nats, mass [layers, bins] at the distances of `edges`), means
    over the last queries of all windows; mass also over heads, and its rows sum to 1."""
    length = len(windows[0]) - 1
    if model.position.has("on_scores") and length > LONGEST:
        raise UserError(
            f"attention of an encoding that looks at content is measured up to length {LONGEST}"
        )
    device = model.word_embeddings.weight.device
    starts = torch.tensor(edges(length)[1:-1], device=device)
    entropy: list[Tensor] = []
    mass: list[Tensor] = []

    def recording(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **more: Any) -> Tensor:
        if "on_scores" in more:
            seen = probabilities(q, k, bias, **more)
            out, blocks = (seen @ v.to(seen.dtype)).to(q.dtype), [seen[0, :, -QUERIES:]]
        else:
            out, blocks = BACKENDS["sdpa"](q, k, v, bias, **more), _blocks(q, k, bias, **more)
        summed = [(_entropy(block), _mass(block, starts)) for block in blocks]
        entropy.append(torch.cat([one for one, _ in summed], dim=1).mean(dim=1))
        mass.append(torch.cat([one for _, one in summed], dim=1).mean(dim=(0, 1)))
        return out

    with computed_by(model, recording):
        for window in windows:
            model.features(torch.from_numpy(window[None, :-1].astype(np.int64)).to(device))
    layers = len(model.layers)
    by_layer = [
        torch.stack(found).view(len(windows), layers, -1).double().mean(0).cpu()
        for found in (entropy, mass)
    ]
    return by_layer[0], by_layer[1]


def _blocks(q: Tensor, k: Tensor, bias: Tensor | None, **more: Any) -> Iterator[Tensor]:
    """Probabilities of the last queries, some at a time: [heads, queries, keys up to the last of them]."""
    length = q.shape[2]
    for start in range(max(0, length - QUERIES), length, BLOCK):
        end = min(start + BLOCK, length)
        yield probabilities(q[:, :, start:end], k[:, :, :end], bias, **more)[0]


def _entropy(seen: Tensor) -> Tensor:
    """[heads, queries, keys] -> [heads, queries] in nats."""
    return torch.special.entr(seen).sum(dim=-1)


def _mass(seen: Tensor, starts: Tensor) -> Tensor:
    """[heads, queries, keys], the queries being the last of the keys' positions -> [heads, queries, bins]; starts
    [bins - 1]: the distances at which all bins but the first begin."""
    heads, queries, keys = seen.shape
    index = torch.arange(keys, device=seen.device)
    distance = (index[keys - queries :, None] - index).clamp(
        min=0
    )  # what comes later has no probability
    bins = torch.bucketize(distance, starts, right=True).expand(heads, -1, -1)
    return seen.new_zeros(heads, queries, len(starts) + 1).scatter_add_(2, bins, seen)
