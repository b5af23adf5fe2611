"""Random shapes and options of attention with tables, and what the definition gives for them.

A case is made of its number alone, so a failure can be run again. Torch is all that it needs.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.attention.eager import eager

HEAD_DIMS = (1, 8, 16, 20, 24, 32, 40, 48, 64, 72, 80, 96, 112, 128)
EDGES = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129)
"""Lengths around the edges of tiles."""
BIASES = (None, "rough", "rough", "steep", "underflows")
LAYOUTS = ("heads before length", "length before heads", "head_dim first")
NAMES = ("q", "k", "v", "bias", "weight")


@dataclass(frozen=True)
class Case:
    """The sizes and options of an attention.

    keys of a query: those of its window, of its chunk and the one before, of its document
    bias: how the table falls with distance; documents: how many at most, 0 for no segments
    spare: entries of the tables beyond the keys; learned: whether the tables get gradients
    """

    number: int
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    bias: str | None
    weight: bool
    window: int | None
    chunk: int | None
    documents: int
    spare: int
    learned: bool
    layout: str


def random_case(number: int, longest: int, head_dims: Sequence[int] = HEAD_DIMS) -> Case:
    """The case of this number, with at most `longest` keys."""
    draw = random.Random(number)
    keys = min(longest, draw.choice([draw.randint(1, longest), draw.choice(EDGES)]))
    queries = draw.choice([keys, keys, 1, draw.randint(1, keys)])
    return Case(
        number=number,
        batch=draw.randint(1, 2),
        heads=draw.choice([1, 1, 2]),
        queries=queries,
        keys=keys,
        head_dim=draw.choice(head_dims),
        bias=draw.choice(BIASES),
        weight=draw.random() < 0.4,
        window=draw.choice([None, draw.randint(1, keys + 5)]),
        chunk=draw.choice([None, None, draw.randint(1, keys + 5)]),
        documents=draw.choice([0, 0, 1, 2, 5]),
        spare=draw.choice([0, 0, 3]),
        learned=draw.random() < 0.8,
        layout=draw.choice(LAYOUTS),
    )


@dataclass(frozen=True)
class Inputs:
    """q, k, v and the tables that are present, by name; the masks; and a gradient of the output."""

    tensors: dict[str, Tensor]
    masks: dict[str, Any]
    dout: Tensor


def inputs_of(case: Case, dtype: torch.dtype, device: str) -> Inputs:
    """The tensors of a case: q, k, v in `dtype`, tables in float32."""
    draw = torch.Generator().manual_seed(case.number)
    tensors = {
        name: laid_out(
            torch.randn(case.batch, case.heads, length, case.head_dim, generator=draw), case.layout
        )
        for name, length in (("q", case.queries), ("k", case.keys), ("v", case.keys))
    }
    tensors = {name: x.to(device, dtype) for name, x in tensors.items()}
    dout = torch.randn(tensors["q"].shape, generator=draw).to(device, dtype)
    if case.bias is not None:
        tensors["bias"] = bias_of(case, draw).to(device)
    if case.weight:
        weight = 0.2 + torch.rand(case.heads, case.keys + case.spare, generator=draw)
        tensors["weight"] = weight.to(device)
    segments = None
    if case.documents:
        # Documents need not be in order, and one may come back after another.
        lengths = torch.randint(1, case.keys + 1, (case.batch, 1), generator=draw)
        places = torch.arange(case.keys) // lengths
        segments = (places % case.documents).to(device)
    masks = {"window": case.window, "chunk": case.chunk, "segments": segments, "index_bias": None}
    return Inputs(tensors, masks, dout)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same numbers [batch, heads, length, head_dim], in another order in memory."""
    if layout == "length before heads":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "head_dim first":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    return x


def bias_of(case: Case, draw: torch.Generator) -> Tensor:
    """A table [heads, keys + spare] float32."""
    distance = torch.arange(case.keys + case.spare)
    noise = torch.randn(case.heads, len(distance), generator=draw)
    if case.bias == "steep":
        return noise - 0.7 * distance
    if case.bias == "underflows":
        return noise.masked_fill(distance > case.keys // 2, -torch.inf)
    return noise


def values_and_gradients(
    function: Any, inputs: Inputs, *, learned: bool, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The output as `out`, and the gradients of q, k, v and of learned tables.

    dtype: of the computation, where it is not that of the inputs
    """
    leaves = {name: x.detach().to(dtype or x.dtype) for name, x in inputs.tensors.items()}
    wanted = [name for name in leaves if learned or name in ("q", "k", "v")]
    for name in wanted:
        leaves[name].requires_grad_()
    q, k, v, bias, weight = (leaves.get(name) for name in NAMES)
    out = function(q, k, v, bias, weight=weight, **inputs.masks)
    gradients = torch.autograd.grad(
        out, [leaves[name] for name in wanted], inputs.dout.to(out.dtype)
    )
    return {"out": out.detach(), **dict(zip(wanted, gradients, strict=True))}


def errors(
    ours: dict[str, Tensor], exact: dict[str, Tensor], least: dict[str, float]
) -> dict[str, float]:
    """Norm of each difference, relative to the norm of the exact value or the least given here."""
    assert ours.keys() == exact.keys()
    found = {}
    for name, expected in exact.items():
        difference = ours[name].double() - expected
        found[name] = float(difference.norm() / expected.norm().clamp(min=least[name]))
    return found


def errors_of(case: Case, function: Any, dtype: torch.dtype, device: str) -> dict[str, float]:
    """How far a backend is from the definition in float64, in `out` and every gradient."""
    inputs = inputs_of(case, dtype, device)
    ours = values_and_gradients(function, inputs, learned=case.learned)
    assert ours["out"].dtype == dtype
    exact = values_and_gradients(eager, inputs, learned=case.learned, dtype=torch.float64)
    # Where every probability is 0 or 1, scores have no gradient: numbers as large as dout cancel.
    least = dict.fromkeys(exact, float(inputs.dout.double().norm()))
    return errors(ours, exact, {**least, "out": 1.0})
