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

from megatron.attention.scope import QueryBlock
from megatron.attention.terms import Terms

GRAIN = 128
"""Queries that begin at the same key, and keys that are skipped together."""
GRAINS_AT_ONCE = 64
"""Grains whose bounds by content are in memory together."""
FEWEST_KEYS = 1024
"""With fewer keys, finding out what could be skipped costs more than it saves."""
FirstKeys = list[list[int]]
"""The first key that counts: [g][h] for the queries GRAIN · g … GRAIN · (g + 1) - 1 and head h."""


def groups_of_heads(
    block: QueryBlock, heads: int, firsts: FirstKeys | None, most: int | None
) -> Iterator[tuple[slice, QueryBlock]]:
    """Heads beside each other that begin at one key, and the block from there on.

    most: scores of one sequence that a group of more than one head may have
    """
    starts = [0] * heads
    if firsts is not None:
        grains = firsts[block.start // GRAIN : (block.end - 1) // GRAIN + 1]
        starts = [min(starts_of_head) for starts_of_head in zip(*grains, strict=True)]
    head = 0
    for first, same in groupby(starts):
        part = block.from_key(first)
        end = head + len(list(same))
        step = heads if most is None else max(1, most // (part.rows * part.columns))
        while head < end:
            group = slice(head, min(head + step, end))
            yield group, part
            head = group.stop


def first_keys(q: Tensor, k: Tensor, terms: Terms) -> FirstKeys | None:
    """The first keys that count, or None if nothing can be or asking would cost more."""
    queries, keys, content = q.shape[2], k.shape[2], terms.content
    too_small = keys < FEWEST_KEYS or queries < GRAIN
    without_bound = terms.weight is not None or terms.scores is not None
    if too_small or without_bound or q.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    wide = torch.promote_types(q.dtype, torch.float32)
    # e to the power of minus this is 0, also after rounding: 105 for float32.
    numbers = torch.finfo(wide)
    gap = 1 - math.log(numbers.smallest_normal) - math.log(numbers.eps) + math.log(2)
    most_beyond = None  # the greatest bias at a distance and beyond, less that at 0: [heads, keys]
    if terms.bias is not None:
        bias = terms.bias.detach()[:, :keys].to(wide)
        most_beyond = bias.flip(1).cummax(1).values.flip(1) - bias[:, :1]
    # Whether the table alone puts some key far enough below another.
    falls = most_beyond is not None and bool(most_beyond[:, -1].min() < -gap)
    if content is None and not falls:
        return None

    # The most that a product of a query exceeds that with its own key, and a rounding more. The
    # product with the own key would give a closer bound, at twice the cost.
    query_norms = torch.linalg.vector_norm(q.detach(), dim=-1, dtype=wide)
    key_norms = torch.linalg.vector_norm(k.detach(), dim=-1, dtype=wide)
    both = query_norms * (key_norms.amax(2, keepdim=True) + key_norms[:, :, keys - queries :])
    # Each of two products is rounded by at most head_dim units in the last place.
    rounding = 4 * (q.shape[-1] + 8) * numbers.eps
    excess = both * (1 + rounding) / math.sqrt(q.shape[-1])
    excess = _in_grains(excess)  # [batch, heads, grains, GRAIN]
    first_queries = torch.arange(keys - queries, keys, GRAIN)  # of grains, among all keys
    boundaries = torch.arange(1, keys // GRAIN + 1) * GRAIN  # the keys before them have bounds
    u = origin = most_w = least_w = None
    if content is not None:
        w = content.w.detach()
        near = _in_grains(content.own_w.detach())  # [batch, heads, grains, GRAIN, rank]
        origin = near[:, :, :, -1:]  # w of a grain's last key: large sums say little by themselves
        near = near - origin
        # Greatest and least w of the keys before each boundary: [batch, heads, boundaries, rank].
        in_grains = w[:, :, : len(boundaries) * GRAIN].unflatten(2, (-1, GRAIN))
        most_w, least_w = in_grains.amax(3).cummax(2).values, in_grains.amin(3).cummin(2).values
        if content.u is not None:
            u = _in_grains(content.u.detach()).to(near.dtype)
            near = u * near
        excess = excess - near.sum(-1)
    beyond_own_key = excess.amax(3)  # [batch, heads, grains]

    firsts = []
    for grains in torch.arange(len(first_queries)).split(GRAINS_AT_ONCE):
        most = beyond_own_key[:, :, grains, None]
        if most_w is not None and least_w is not None and origin is not None:
            most_content = most_w[:, :, None] - origin[:, :, grains]
            if u is not None:  # the greatest product of a query's u and a w between the bounds
                least = least_w[:, :, None] - origin[:, :, grains]
                factors = u[:, :, grains]
                extremes = factors.amax(3, keepdim=True), factors.amin(3, keepdim=True)
                products = [end * bound for end in extremes for bound in (most_content, least)]
                most_content = torch.stack(products).amax(0)
            most = most + most_content.sum(-1)
        most = most.amax(0)
        distance = first_queries[grains, None] + 1 - boundaries  # of the last key before
        if most_beyond is not None:
            most = most + most_beyond[:, distance.clamp(min=0)]
        skipped = (most < -gap) & (distance > 0)  # [heads, grains, boundaries]
        firsts.append(skipped.sum(2).mT * GRAIN)
    starts = torch.cat(firsts)  # [grains, heads]
    return starts.tolist() if starts.any() else None


def _in_grains(x: Tensor) -> Tensor:
    """[batch, heads, queries, …] -> [batch, heads, grains, GRAIN, …], the last row repeated."""
    queries = x.shape[2]
    grains = -(-queries // GRAIN)
    index = torch.arange(grains * GRAIN).clamp(max=queries - 1)
    return x[:, :, index].unflatten(2, (grains, GRAIN))
