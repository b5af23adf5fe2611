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
from itertools import groupby

import torch
from torch import Tensor

from megatron.attention.scope import Inputs, QueryBlock

GRAIN = 128
"""Queries that begin at the same key, and keys that are skipped together."""
GRAINS_AT_ONCE = 64
"""Grains whose bounds by content are in memory together."""
FEWEST_KEYS = 1024
"""With fewer keys, finding out what could be skipped costs more than it saves."""
FirstKeys = list[list[int]]
"""The first key that counts: [g][h] for the queries GRAIN · g … GRAIN · (g + 1) - 1 and head h."""


def groups_of_heads(
    block: QueryBlock, heads: int, firsts: FirstKeys | None, most: int | None = None
) -> Iterator[tuple[slice, QueryBlock]]:
    """Heads beside each other that begin at one key, and the block from there on.

    most: scores of one sequence that a group of more than one head may have
    """
    of_heads = [0] * heads
    if firsts is not None:
        grains = firsts[block.start // GRAIN : (block.end - 1) // GRAIN + 1]
        of_heads = [min(of_head) for of_head in zip(*grains, strict=True)]
    head = 0
    for first, same in groupby(of_heads):
        part = block.from_key(first)
        end = head + len(list(same))
        step = heads if most is None else max(1, most // (part.rows * part.columns))
        while head < end:
            group = slice(head, min(head + step, end))
            yield group, part
            head = group.stop


def first_keys(inputs: Inputs) -> FirstKeys | None:
    """The first keys that count, or None if nothing can be or asking would cost more."""
    q, k, scope, score_bias = inputs.q, inputs.k, inputs.scope, inputs.score_bias
    too_small = scope.keys < FEWEST_KEYS or scope.queries < GRAIN
    without_bound = inputs.weight is not None or inputs.index_bias is not None
    if too_small or without_bound or not inputs.on_cpu or torch.compiler.is_compiling():
        return None
    wide = torch.promote_types(q.dtype, torch.float32)
    # e to the power of minus this is 0, also after rounding: 105 for float32.
    numbers = torch.finfo(wide)
    gap = 1 - math.log(numbers.smallest_normal) - math.log(numbers.eps) + math.log(2)
    most_beyond = None  # the greatest bias at a distance and beyond, less that at 0: [heads, keys]
    if inputs.bias is not None:
        bias = inputs.bias.detach()[:, : scope.keys].to(wide)
        most_beyond = bias.flip(1).cummax(1).values.flip(1) - bias[:, :1]
    # Whether the table alone puts some key far enough below another.
    falls = most_beyond is not None and bool(most_beyond[:, -1].min() < -gap)
    if score_bias is None and not falls:
        return None

    # The most that a product of a query exceeds that with its own key, and a rounding more. The
    # product with the own key would give a closer bound, at twice the cost.
    of_queries = torch.linalg.vector_norm(q.detach(), dim=-1, dtype=wide)
    of_keys = torch.linalg.vector_norm(k.detach(), dim=-1, dtype=wide)
    both = of_queries * (of_keys.amax(2, keepdim=True) + of_keys[:, :, scope.before :])
    # Each of two products is rounded by at most head_dim units in the last place.
    rounding = 4 * (q.shape[-1] + 8) * numbers.eps
    excess = both * (1 + rounding) / math.sqrt(q.shape[-1])
    excess = _in_grains(excess)  # [batch, heads, grains, GRAIN]
    first_queries = torch.arange(scope.before, scope.keys, GRAIN)  # of grains, among all keys
    if score_bias is None:
        assert most_beyond is not None
        largest = excess.amax((0, 3))  # [heads, grains]
        nearest_skipped = torch.searchsorted(-most_beyond, largest + gap, right=True)
        firsts = (first_queries + 1 - nearest_skipped).mT
    else:  # the keys before GRAIN, 2 GRAIN, … have bounds
        w = score_bias.w.detach()
        near = _in_grains(w[:, :, scope.before :])  # [batch, heads, grains, GRAIN, rank]
        origin = near[:, :, :, -1:]  # w of a grain's last key: large sums say little by themselves
        near = near - origin
        # Greatest and least w of the keys before each boundary: [batch, heads, boundaries, rank].
        whole = w.shape[2] // GRAIN * GRAIN
        in_grains = w[:, :, :whole].unflatten(2, (-1, GRAIN))
        most_w, least_w = in_grains.amax(3).cummax(2).values, in_grains.amin(3).cummin(2).values
        u = None
        if score_bias.u is not None:
            u = _in_grains(score_bias.u.detach()).to(near.dtype)
            near = u * near
        beyond_own_key = (excess - near.sum(-1)).amax(3)  # [batch, heads, grains]

        boundaries = torch.arange(1, most_w.shape[2] + 1) * GRAIN
        firsts_of_parts = []
        for grains in torch.arange(len(first_queries)).split(GRAINS_AT_ONCE):
            most = most_w[:, :, None] - origin[:, :, grains]
            if u is not None:  # the greatest product of a query's u and a w between the bounds
                least = least_w[:, :, None] - origin[:, :, grains]
                of_grains = u[:, :, grains]
                extremes = (of_grains.amax(3, keepdim=True), of_grains.amin(3, keepdim=True))
                products = [one * bound for one in extremes for bound in (most, least)]
                most = torch.stack(products).amax(0)
            most = (beyond_own_key[:, :, grains, None] + most.sum(-1)).amax(0)
            distance = first_queries[grains, None] + 1 - boundaries  # of the last key before
            if most_beyond is not None:
                most = most + most_beyond[:, distance.clamp(min=0)]
            skipped = (most < -gap) & (distance > 0)  # [heads, grains, boundaries]
            firsts_of_parts.append(skipped.sum(2).mT * GRAIN)
        firsts = torch.cat(firsts_of_parts)
    # [grains, heads]; heads that begin together are computed together.
    rounded = (firsts // GRAIN * GRAIN).clamp(min=0)
    return rounded.tolist() if rounded.any() else None


def _in_grains(x: Tensor) -> Tensor:
    """[batch, heads, queries, …] -> [batch, heads, grains, GRAIN, …], the last row repeated."""
    queries = x.shape[2]
    grains = -(-queries // GRAIN)
    index = torch.arange(grains * GRAIN).clamp(max=queries - 1)
    return x[:, :, index].unflatten(2, (grains, GRAIN))
