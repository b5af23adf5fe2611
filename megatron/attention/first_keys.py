"""Which keys a block of queries need not look at, because they get exactly nothing.

A score that lies about 104 below that of another key has
a probability of e⁻¹⁰⁴, which float32 rounds to 0; so are its gradients. Every query attends to its
own key. So a key counts only if this is not below -104:

    (score of the key) - (score of the own key)
        ≤ |q_i| (max|k| + |k_i|) / √head_dim
        + max(bias at i - j and beyond) - bias(0) + max(u·w before j) - u_i·w_i

The bounds only fall towards earlier keys. So the keys that count begin at one place, for each block
of queries and head.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from megatron.attention.eager import ScoreBias
from megatron.attention.scope import Block, Inputs, Scope

GRAIN = 128
"""Queries that begin at the same key, and keys that are skipped together."""
GRAINS_AT_ONCE = 64
"""Grains whose bounds by content are in memory together."""
FEWEST_KEYS = 1024
"""With fewer keys, finding out what could be skipped costs more than it saves."""


@dataclass(frozen=True)
class FirstKeys:
    """The first key that counts.

    of_grains[g][h]: for the queries GRAIN · g … GRAIN · (g + 1) - 1 and head h
    """

    of_grains: list[list[int]]

    def of_block(self, block: Block) -> list[int]:
        """The first key that counts for some query of a block, for each head."""
        grains = self.of_grains[block.start // GRAIN : (block.end - 1) // GRAIN + 1]
        return [min(of_head) for of_head in zip(*grains, strict=True)]


@dataclass
class Pairs:
    """How many pairs of a query and a key there were, up to GRAIN more for a query, and skipped."""

    all: int = 0
    skipped: int = 0

    def add(self, scope: Scope, heads: int, firsts: FirstKeys | None) -> None:
        """Count an attention of these lengths."""
        for block in scope.blocks(GRAIN):
            self.all += heads * block.rows * block.columns
            for group, part in groups_of_heads(block, heads, firsts):
                fewer = part.first_key - block.first_key
                self.skipped += (group.stop - group.start) * block.rows * fewer

    def __str__(self) -> str:
        share = self.skipped / max(1, self.all)
        return f"{share:.0%} of the pairs of a query and a key were skipped: they have no weight"


def groups_of_heads(
    block: Block, heads: int, firsts: FirstKeys | None
) -> Iterator[tuple[slice, Block]]:
    """Heads beside each other that begin at one key, and the block from there on."""
    if firsts is None:
        yield slice(0, heads), block
        return
    head = 0
    for first, same in groupby(firsts.of_block(block)):
        end = head + len(list(same))
        yield slice(head, end), block.from_key(first)
        head = end


def first_keys(inputs: Inputs) -> FirstKeys | None:
    """What may be skipped, or None where nothing can be or asking would cost more."""
    q, bias, scope = inputs.q, inputs.bias, inputs.scope
    too_small = scope.keys < FEWEST_KEYS or scope.queries < GRAIN
    without_bound = inputs.weight is not None or inputs.index_bias is not None
    if too_small or without_bound or not inputs.on_cpu or torch.compiler.is_compiling():
        return None
    if inputs.score_bias is None:
        if bias is None:
            return None
        # Whether the table alone puts some key far enough below another.
        wide = torch.promote_types(q.dtype, torch.float32)
        most_beyond = _most_beyond(bias.detach()[:, : scope.keys].to(wide))
        if not most_beyond[:, -1].min() < -_gap(wide):
            return None
    firsts = first_of_grains(q, inputs.k, bias, inputs.score_bias, scope)
    # Heads that begin together are computed together.
    rounded = (firsts // GRAIN * GRAIN).clamp(min=0)
    return FirstKeys(rounded.tolist()) if rounded.any() else None


def first_of_grains(
    q: Tensor, k: Tensor, bias: Tensor | None, score_bias: ScoreBias | None, scope: Scope
) -> Tensor:
    """The first key that counts by the bounds of its scores, for each GRAIN queries and head.

    [grains, heads] int64 on the device of q, which need not be waited for; it may be negative. At
    least one of bias and score_bias is given.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    gap = _gap(wide)
    excess = _excess(q, k, wide)
    most_beyond = None
    if bias is not None:
        most_beyond = _most_beyond(bias.detach()[:, : scope.keys].to(wide))
    if score_bias is not None:
        return _by_content(excess, most_beyond, score_bias, scope, gap)
    assert most_beyond is not None
    excess = _in_grains(excess).amax((0, 3))  # [heads, grains]
    nearest_skipped = torch.searchsorted(-most_beyond, excess + gap, right=True)
    return (_first_queries(scope, excess.device) + 1 - nearest_skipped).mT


def _by_content(
    excess: Tensor, most_beyond: Tensor | None, score_bias: ScoreBias, scope: Scope, gap: float
) -> Tensor:
    """The same with a bias by content: keys before GRAIN, 2 GRAIN, … have bounds."""
    w = score_bias.w.detach()
    near = _in_grains(w[:, :, scope.before :])  # [batch, heads, grains, GRAIN, rank]
    origin = near[:, :, :, -1:]  # w of a grain's last key: large sums say little by themselves
    near = near - origin
    most_w, least_w = _extremes(w)
    u = None
    if score_bias.u is not None:
        u = _in_grains(score_bias.u.detach()).to(near.dtype)
        near = u * near
    beyond_own_key = (_in_grains(excess) - near.sum(-1)).amax(3)  # [batch, heads, grains]

    first_queries = _first_queries(scope, w.device)
    boundaries = torch.arange(1, most_w.shape[2] + 1, device=w.device) * GRAIN
    firsts = []
    for grains in torch.arange(len(first_queries), device=w.device).split(GRAINS_AT_ONCE):
        most = most_w[:, :, None] - origin[:, :, grains]
        if u is not None:
            least = least_w[:, :, None] - origin[:, :, grains]
            most = _greatest_product(u[:, :, grains], most, least)
        most = (beyond_own_key[:, :, grains, None] + most.sum(-1)).amax(0)
        distance = first_queries[grains, None] + 1 - boundaries  # of the last key before
        if most_beyond is not None:
            most = most + most_beyond[:, distance.clamp(min=0)]
        skipped = (most < -gap) & (distance > 0)  # [heads, grains, boundaries]
        firsts.append(skipped.sum(2).mT * GRAIN)
    return torch.cat(firsts)


def _first_queries(scope: Scope, device: torch.device) -> Tensor:
    """The index of each grain's first query among all keys: [grains] int64."""
    return torch.arange(scope.before, scope.keys, GRAIN, device=device)


def _in_grains(x: Tensor) -> Tensor:
    """[batch, heads, queries, …] -> [batch, heads, grains, GRAIN, …], the last row repeated."""
    queries = x.shape[2]
    grains = -(-queries // GRAIN)
    index = torch.arange(grains * GRAIN, device=x.device).clamp(max=queries - 1)
    return x[:, :, index].unflatten(2, (grains, GRAIN))


def _gap(dtype: torch.dtype) -> float:
    """e to the power of minus this is 0 in `dtype`, also after rounding: 105 for float32."""
    numbers = torch.finfo(dtype)
    least = math.log(numbers.smallest_normal) + math.log(numbers.eps)
    return 1 - least + math.log(2)


def _most_beyond(bias: Tensor) -> Tensor:
    """The greatest bias at a distance and beyond, less that at 0: [heads, keys] -> same."""
    beyond = bias.flip(1).cummax(1).values.flip(1)
    return beyond - bias[:, :1]


def _excess(q: Tensor, k: Tensor, dtype: torch.dtype) -> Tensor:
    """The most that a product of a query exceeds that with its own key: [batch, heads, queries].

    |q_i| (max|k| + |k_i|) / √head_dim, and a rounding more. The product with the own key would
    give a closer bound, at twice the cost.
    """
    head_dim = q.shape[-1]
    of_queries = torch.linalg.vector_norm(q.detach(), dim=-1, dtype=dtype)
    of_keys = torch.linalg.vector_norm(k.detach(), dim=-1, dtype=dtype)
    of_own_keys = of_keys[:, :, k.shape[2] - q.shape[2] :]
    both = of_queries * (of_keys.amax(2, keepdim=True) + of_own_keys)
    # Each of two products is rounded by at most head_dim units in the last place.
    rounding = 4 * (head_dim + 8) * torch.finfo(dtype).eps
    return both * (1 + rounding) / math.sqrt(head_dim)


def _extremes(w: Tensor) -> tuple[Tensor, Tensor]:
    """Greatest and least w of the keys before GRAIN, 2 GRAIN, …, for each of the rank's numbers.

    [batch, heads, keys, rank] -> [batch, heads, keys // GRAIN, rank] twice
    """
    whole = w.shape[2] // GRAIN * GRAIN
    grains = w[:, :, :whole].unflatten(2, (-1, GRAIN))
    most = grains.amax(3).cummax(2).values
    least = grains.amin(3).cummin(2).values
    return most, least


def _greatest_product(u: Tensor, w_most: Tensor, w_least: Tensor) -> Tensor:
    """The greatest u·w of a grain's queries and w between these bounds, as w_most.

    u [batch, heads, grains, GRAIN, rank]; bounds [batch, heads, grains, boundaries, rank]
    """
    products = []
    for of_query in (u.amax(3, keepdim=True), u.amin(3, keepdim=True)):
        products += [of_query * w_most, of_query * w_least]
    return torch.stack(products).amax(0)
