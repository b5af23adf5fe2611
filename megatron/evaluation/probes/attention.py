"""How far back a model attends: the entropy of each head, and the probability by distance."""

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

QUERIES = 256  # the last queries of a window, which are measured
BLOCK = 64  # queries at a time
LONGEST = 2048  # tokens, for an encoding that needs the whole matrix of scores


def edges(length: int) -> list[int]:
    """The distances at which the bins of `mass` begin, and `length`: 0, 1, 2, 4, 8, …"""
    powers = [2**power for power in range(length.bit_length())]
    return [0, *(power for power in powers if power < length), length]


@torch.no_grad()
def attention_by_distance(model: GPT, windows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    """Entropy and mass of attention, means over the last queries of all windows.

    windows: [length + 1] tokens each
    -> entropy [layers, heads] in nats;
       mass [layers, bins], the probability by distance, a mean over heads; each layer sums to 1
    UserError for a long window where the encoding needs the whole matrix of scores.
    """
    length = len(windows[0]) - 1
    if model.looks_at_scores and length > LONGEST:
        raise UserError(
            f"attention of an encoding that looks at content is measured up to length {LONGEST}"
        )
    device = model.word_embeddings.weight.device
    inner_edges = torch.tensor(edges(length)[1:-1], device=device)
    entropies: list[Tensor] = []  # of each window and layer: [heads]
    masses: list[Tensor] = []  # of each window and layer: [bins]

    def recording(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **more: Any) -> Tensor:
        if "on_scores" in more:
            p = probabilities(q, k, bias, **more)
            out = (p @ v.to(p.dtype)).to(q.dtype)
            blocks = [p[0, :, -QUERIES:]]
        else:
            out = BACKENDS["sdpa"](q, k, v, bias, **more)
            blocks = list(_blocks(q, k, bias, **more))
        entropy = [_entropy(block) for block in blocks]  # [heads, queries] each
        mass = [_mass(block, inner_edges) for block in blocks]  # [heads, queries, bins] each
        entropies.append(torch.cat(entropy, dim=1).mean(dim=1))
        masses.append(torch.cat(mass, dim=1).mean(dim=(0, 1)))
        return out

    with computed_by(model, recording):
        for window in windows:
            ids = torch.from_numpy(window[None, :-1].astype(np.int64))
            model.features(ids.to(device))

    def mean_over_windows(values: list[Tensor]) -> Tensor:
        by_window = torch.stack(values).view(len(windows), len(model.layers), -1)
        return by_window.double().mean(dim=0).cpu()

    return mean_over_windows(entropies), mean_over_windows(masses)


def _blocks(q: Tensor, k: Tensor, bias: Tensor | None, **more: Any) -> Iterator[Tensor]:
    """Probabilities of the last queries, some at a time, over the keys up to the last of them.

    q, k [1, heads, length, head_dim] -> [heads, queries, keys] each
    """
    length = q.shape[2]
    score_bias = more.pop("score_bias", None)
    for start in range(max(0, length - QUERIES), length, BLOCK):
        end = min(start + BLOCK, length)
        if score_bias is not None:
            more["score_bias"] = score_bias.of_queries(start, end)
        yield probabilities(q[:, :, start:end], k[:, :, :end], bias, **more)[0]


def _entropy(p: Tensor) -> Tensor:
    """Entropy in nats: [heads, queries, keys] -> [heads, queries]."""
    return torch.special.entr(p).sum(dim=-1)


def _mass(p: Tensor, inner_edges: Tensor) -> Tensor:
    """Probability by distance: [heads, queries, keys] -> [heads, queries, bins].

    The queries are the last of the keys' positions. inner_edges [bins - 1]: where all bins but the
    first begin.
    """
    heads, queries, keys = p.shape
    key = torch.arange(keys, device=p.device)
    query = key[keys - queries :, None]
    distance = (query - key).clamp(min=0)  # later keys have no probability: any bin will do
    bins = torch.bucketize(distance, inner_edges, right=True)  # [queries, keys]
    mass = p.new_zeros(heads, queries, len(inner_edges) + 1)
    return mass.scatter_add_(2, bins.expand(heads, -1, -1), p)
