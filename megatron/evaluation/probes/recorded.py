"""The attention probabilities of a model on a text, recorded while it computes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron.attention import BACKENDS, eager
from megatron.attention.eager import probabilities
from megatron.model import GPT


@torch.no_grad()
def attention_of(model: GPT, ids: Tensor) -> Tensor:
    """The probabilities of every layer and head, float32 on the CPU.

    ids [length] -> [layers, heads, length, length]
    """
    layers: list[Tensor] = []

    def recording(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **more: Any) -> Tensor:
        p = probabilities(q, k, bias, **more)
        layers.append(p[0])
        return (p @ v.to(p.dtype)).to(q.dtype)

    with computed_by(model, recording):
        model(ids[None])
    return torch.stack(layers).float().cpu()


@contextmanager
def computed_by(model: GPT, attention: Callable[..., Tensor]) -> Iterator[None]:
    """Inside the block every layer computes attention by this function, called as `eager` is."""
    backend = model.backend
    model.backend = "eager"
    BACKENDS["eager"] = attention
    try:
        yield
    finally:
        BACKENDS["eager"] = eager
        model.backend = backend
