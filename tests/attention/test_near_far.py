"""Attention with two versions of the score, against its formula in float64."""

import math

import torch
from torch import Tensor

from megatron.attention import near_far as module
from megatron.attention.eager import ScoreBias
from megatron.attention.near_far import Keys, Tables, near_far

BATCH, HEADS, DIM = 2, 3, 4


def keys_of(queries: int, keys: int, query: Tensor, key: Tensor, wider: int = 0) -> Keys:
    q = torch.randn(BATCH, HEADS, queries, DIM + wider, dtype=torch.float64)
    k = torch.randn(BATCH, HEADS, keys, DIM + wider, dtype=torch.float64)
    return Keys(q, k, query, key)


def by_definition(near: Keys, far: Keys, v: Tensor, *, distance, window, sinks, tables) -> Tensor:
    """The same with one matrix of scores for each version."""
    queries, keys = near.q.shape[2], v.shape[2]
    index = torch.arange(keys)
    back = index[keys - queries :, None] - index
    versions = []
    for one in (near, far):
        scores = one.q @ one.k.mT / math.sqrt(one.q.shape[-1])
        table_distance = (one.query[:, None] - one.key).clamp(0, tables.bias.shape[1] - 1)
        scores = scores * tables.weight[:, table_distance] + tables.bias[:, table_distance]
        if tables.score_bias is not None:
            scores = scores + tables.score_bias.u @ tables.score_bias.w.mT
        versions.append(scores)
    is_near = (back >= 0) & (back < distance)
    is_far = back >= distance
    if sinks is not None:
        is_far = is_far & (index < sinks)
    visible = (is_near | is_far) & (back < (window or keys))
    scores = torch.where(is_near, *versions).masked_fill(~visible, -math.inf)
    return scores.softmax(-1) @ v


def test_blocks_give_the_formula(monkeypatch):
    monkeypatch.setattr(module, "BLOCK", 8)
    for number, (queries, keys, distance, window, sinks) in enumerate((
        (40, 40, 7, None, None),
        (40, 40, 1, None, None),
        (40, 40, 100, None, None),
        (40, 40, 7, 20, None),
        (40, 40, 20, 7, None),
        (40, 40, 9, None, 30),
        (40, 40, 1, None, 1),
        (1, 40, 7, None, None),
        (13, 40, 7, None, 2),
        (1, 1, 7, None, 2),
    )):  # fmt: skip
        index = torch.arange(keys)
        query = index[keys - queries :]
        near = keys_of(queries, keys, query, index)
        far = keys_of(queries, keys, (query + 3) // 2, index // 2, wider=2)
        v = torch.randn(BATCH, HEADS, keys, 5, dtype=torch.float64)
        u, w = torch.randn(2, BATCH, HEADS, keys, 2, dtype=torch.float64)
        score_bias = ScoreBias(u[:, :, keys - queries :], w) if number % 2 else None
        bias, weight = torch.randn(2, HEADS, keys + 2, dtype=torch.float64)
        tables = Tables(bias, weight, score_bias)
        options = {"distance": distance, "window": window, "sinks": sinks, "tables": tables}
        found = near_far(near, far, v, **options)
        expected = by_definition(near, far, v, **options)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_scores_are_float32_in_half_precision():
    index = torch.arange(30)
    near, far = keys_of(30, 30, index, index), keys_of(30, 30, index, index)
    v = torch.randn(BATCH, HEADS, 30, DIM, dtype=torch.float64)
    half = [Keys(one.q.bfloat16(), one.k.bfloat16(), index, index) for one in (near, far)]
    found = near_far(*half, v.bfloat16(), distance=5)
    assert found.dtype == torch.bfloat16
    rounded = [Keys(one.q.double(), one.k.double(), index, index) for one in half]
    expected = near_far(*rounded, v.bfloat16().double(), distance=5)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-6)
