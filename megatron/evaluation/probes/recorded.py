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
    """ids [length] -> the probabilities of every layer and head: [layers, heads, length, length] float32."""
    layers: list[Tensor] = []

    def recording(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **more: Any) -> Tensor:
        seen = probabilities(q, k, bias, **more)
        layers.append(seen[0])
        return (seen @ v.to(seen.dtype)).to(q.dtype)

    with computed_by(model, recording):
        model(ids[None])
    return torch.stack(layers).float().cpu()


@contextmanager
def computed_by(model: GPT, recording: Callable[..., Tensor]) -> Iterator[None]:
    """Inside the block `recording`, called as `eager` is, computes the attention of every layer."""
    backend, model.backend = model.backend, "eager"
    BACKENDS["eager"] = recording
    try:
        yield
    finally:
        BACKENDS["eager"] = eager
        model.backend = backend
