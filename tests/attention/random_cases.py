"""Random shapes and options of attention, and how far a backend is from the definition for them.

A case is made of its number alone, so a failure can be run again. Torch is all that it needs.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron.attention import Backend
from megatron.attention.eager import eager
from megatron.attention.terms import Content, Terms

HEAD_DIMS = (1, 8, 16, 20, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128)
EDGES = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Lengths around the edges of tiles."""
LAYOUTS = ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2))
"""Orders in memory: as it is, length before heads, head_dim before length."""


@dataclass(frozen=True)
class Case:
    """The sizes and options of an attention.

    keys of a query: those of its window, of its document
    bias: how the table falls with distance; documents: how many at most, 0 for no segments
    content: the rank of a bias by content, 0 for none; ones: it has no u
    learned: whether tables and content get gradients; lse: whether it is compared too
    value_dim: features of the values; 0: head_dim
    """

    number: int = 0
    batch: int = 2
    heads: int = 1
    queries: int = 100
    keys: int = 100
    head_dim: int = 16
    bias: str | None = "rough"
    weight: bool = False
    window: int | None = None
    documents: int = 0
    content: int = 0
    ones: bool = False
    learned: bool = True
    lse: bool = True
    layout: tuple[int, ...] = LAYOUTS[0]
    value_dim: int = 0


def random_case(
    number: int, longest: int, head_dims: Sequence[int] = HEAD_DIMS, most_rank: int = 1
) -> Case:
    """The case of this number, with at most `longest` keys."""
    draw = random.Random(number)
    keys = min(longest, draw.choice([draw.randint(1, longest), draw.choice(EDGES)]))
    return Case(
        number=number,
        batch=draw.randint(1, 2),
        heads=draw.choice([1, 1, 2]),
        queries=draw.choice([keys, keys, 1, draw.randint(1, keys)]),
        keys=keys,
        head_dim=draw.choice(head_dims),
        bias=draw.choice([None, "rough", "rough", "steep", "underflows"]),
        weight=draw.random() < 0.4,
        window=draw.choice([None, draw.randint(1, keys + 5)]),
        documents=draw.choice([0, 0, 1, 2, 5]),
        content=draw.choice([0, 0, draw.randint(1, most_rank)]),
        ones=draw.random() < 0.4,
        learned=draw.random() < 0.8,
        layout=draw.choice(LAYOUTS),
        lse=draw.random() < 0.6,
    )


@dataclass
class Inputs:
    """Tensors by name, u and w with their rank; other terms; gradients of the output and the lse.

    An lse is compared wherever `dlse` is given.
    """

    tensors: dict[str, Tensor]
    dout: Tensor
    dlse: Tensor | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def attend(self, function: Backend, leaves: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The output, and the lse if it is compared, with leaves in place of the tensors."""
        content = None
        if "w" in leaves:
            content = Content.of((leaves.get("u"), leaves["w"]), leaves["q"].shape[2])
        tables = {name: leaves.get(name) for name in ("bias", "weight")}
        compares_lse = self.dlse is not None
        terms = Terms(**tables, **self.options, content=content, needs_lse=compares_lse)
        out, lse = function(leaves["q"], leaves["k"], leaves["v"], terms)
        return (out, lse) if compares_lse else (out,)


def inputs_of(case: Case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Inputs:
    """The tensors of a case: q, k, v in `dtype`, the others in float32, w in float64."""
    draw = torch.Generator().manual_seed(case.number)
    batch, heads, keys = case.batch, case.heads, case.keys

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    tensors = {}
    order = case.layout
    value_dim = case.value_dim or case.head_dim
    widths = {"q": case.head_dim, "k": case.head_dim, "v": value_dim}
    for name, width in widths.items():
        x = drawn(batch, heads, case.queries if name == "q" else keys, width)
        tensors[name] = x.permute(order).contiguous().permute(order).to(dtype)
    dout = drawn(batch, heads, case.queries, value_dim).to(device, dtype)
    dlse = drawn(*tensors["q"].shape[:3]).to(device)
    distance = torch.arange(keys + 3)  # tables may be longer than the keys
    noise = drawn(heads, keys + 3)
    if case.bias == "steep":
        noise = noise - 2 * distance
    elif case.bias == "underflows":
        noise = noise.masked_fill(distance > keys // 2, -torch.inf)
    if case.bias is not None:
        tensors["bias"] = noise
    if case.weight:
        tensors["weight"] = 0.2 + drawn(heads, keys + 3).sigmoid()
    if case.content:
        steps = drawn(batch, heads, keys, case.content).double()
        tensors["w"] = 0.3 * steps.cumsum(2)
        if not case.ones:
            tensors["u"] = drawn(batch, heads, case.queries, case.content)
    segments = None
    if case.documents:
        # Documents need not be in order, and one may come back after another.
        lengths = torch.randint(1, keys + 1, (batch, 1), generator=draw)
        segments = (torch.arange(keys) // lengths % case.documents).to(device)
    tensors = {name: x.to(device) for name, x in tensors.items()}
    masks = {"window": case.window, "segments": segments}
    return Inputs(tensors, dout, dlse if case.lse else None, masks)


def values_and_gradients(
    function: Backend, inputs: Inputs, *, learned: bool = True, double: bool = False
) -> dict[str, Tensor]:
    """`out`, `lse`, and the gradients of q, k, v and, if learned, of all other tensors."""
    leaves = {}
    for name, x in inputs.tensors.items():
        leaf = x.detach().to(torch.float64) if double else x.detach()
        leaves[name] = leaf.requires_grad_(learned or name in ("q", "k", "v"))
    results = inputs.attend(function, leaves)
    learning = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    downs = [dy.to(y.dtype) for y, dy in zip(results, (inputs.dout, inputs.dlse), strict=False)]
    gradients = torch.autograd.grad(results, list(learning.values()), downs)
    values = {name: y.detach() for name, y in zip(("out", "lse"), results, strict=False)}
    return {**values, **dict(zip(learning, gradients, strict=True))}


def largest_error(function: Backend, inputs: Inputs, *, learned: bool = True) -> float:
    """The norm of a difference from the definition in float64, relative to the exact value.

    The largest of the output and all gradients. If every probability is 0 or 1, scores have no
    gradient and numbers as large as dout cancel; so no gradient counts as smaller than dout.
    """
    ours = values_and_gradients(function, inputs, learned=learned)
    exact = values_and_gradients(eager, inputs, learned=learned, double=True)
    assert ours["out"].dtype == inputs.dout.dtype
    errors = []
    for name, expected in exact.items():
        least = 1.0 if name in ("out", "lse") else float(inputs.dout.double().norm())
        difference = ours[name].double() - expected
        errors.append(float(difference.norm() / expected.norm().clamp(min=least)))
    return max(errors)


def error_of(case: Case, function: Backend, dtype: torch.dtype, device: str) -> float:
    """How far a backend is from the definition for a case."""
    return largest_error(function, inputs_of(case, dtype, device), learned=case.learned)
