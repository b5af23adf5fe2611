"""How a matrix of Hugging Face's becomes one of ours, and the other way round.

Every form only moves numbers, so ours -> theirs -> ours is equal bit for bit. Each works on a
matrix [rows, columns] and on the bias [rows] that belongs to it.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from megatron.model import Architecture


class Form(Protocol):
    """Both directions; `model` gives the numbers of heads."""

    def ours(self, parts: Sequence[Tensor], model: Architecture) -> Tensor:
        """Our tensor from theirs. RuntimeError where shapes do not fit."""
        ...

    def theirs(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        """Their tensors from ours."""
        ...


class Same:
    """One tensor, as it is."""

    def ours(self, parts: Sequence[Tensor], model: Architecture) -> Tensor:
        return parts[0]

    def theirs(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        return [tensor]


class Transposed:
    """GPT-2's Conv1D keeps [columns, rows]."""

    def ours(self, parts: Sequence[Tensor], model: Architecture) -> Tensor:
        return turned(parts[0])

    def theirs(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        return [turned(tensor)]


class Stacked:
    """Matrices of equal size, the rows of one after those of the other: gate, up."""

    def __init__(self, parts: int) -> None:
        self.parts = parts

    def ours(self, parts: Sequence[Tensor], model: Architecture) -> Tensor:
        return torch.cat(list(parts))

    def theirs(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        return list(tensor.chunk(self.parts))


class Heads:
    """Queries, keys and values, each [heads, head_dim]: ours are fused by key head."""

    def ours(self, parts: Sequence[Tensor], model: Architecture) -> Tensor:
        q, k, v = parts
        group = model.num_attention_heads // model.key_heads
        by_key_head = [by_heads(q, model, group), by_heads(k, model, 1), by_heads(v, model, 1)]
        return torch.cat(by_key_head, dim=1).flatten(0, 2)

    def theirs(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        group = model.num_attention_heads // model.key_heads
        fused = by_heads(tensor, model, group + 2)
        return [part.flatten(0, 2) for part in fused.split([group, 1, 1], dim=1)]


class ColumnsOfHeads:
    """GPT-2's fused Conv1D: [columns, (q, k, v) rows], each of them [heads, head_dim]."""

    def ours(self, parts: Sequence[Tensor], model: Architecture) -> Tensor:
        return Heads().ours(turned(parts[0]).chunk(3), model)

    def theirs(self, tensor: Tensor, model: Architecture) -> list[Tensor]:
        return [turned(torch.cat(Heads().theirs(tensor, model)))]


def turned(tensor: Tensor) -> Tensor:
    """[columns, rows] -> [rows, columns]; a bias [rows] stays as it is."""
    return tensor if tensor.dim() == 1 else tensor.T


def by_heads(tensor: Tensor, model: Architecture, in_group: int) -> Tensor:
    """[rows, …] -> [key heads, in_group, head_dim, …]."""
    return tensor.unflatten(0, (model.key_heads, in_group, model.features_of_head))
