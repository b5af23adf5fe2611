"""Documents and chunks under a mask give what the definition gives."""

import pytest
import torch

from megatron.attention import attend
from megatron.attention.terms import mask
from tests.attention.random_cases import Case, inputs_of, largest_error

KEYS = 400


def segments(kind: str) -> torch.Tensor:
    """[3, KEYS] int64."""
    draw = torch.Generator().manual_seed(5)
    chance = {"long": 0.007, "mixed": 0.01, "short": 0.1}[kind]
    begins = torch.rand(3, KEYS, generator=draw) < chance
    if kind == "mixed":
        begins[:, 100:140] = True  # documents of one token
        begins[1] = False  # and a row of one document
    return begins.long().cumsum(dim=1)


def index_bias(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Grows with the query's index, so that it must be that of the whole text."""
    distance = (queries[:, None] - keys).float()
    slopes = torch.tensor([0.01, 0.003])[:, None, None]
    return -slopes * distance * (1 + queries[:, None] / 100)


def one_by_one(q, k, v, terms):
    """Attention as models call it, which has no lse."""
    return attend(q, k, v, terms, "sdpa"), None


OPTIONS = {
    "window": {"weight": True, "window": 90},
    "index": {"bias": None},
    "product": {"content": 2},
    "chunk": {"weight": True, "content": 1},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_documents_one_by_one_are_attention_under_a_mask(option):
    for kind, queries in [("mixed", KEYS), ("short", KEYS), ("long", 300), ("mixed", 1)]:
        sizes = {
            "batch": 3,
            "heads": 2,
            "queries": queries,
            "keys": KEYS,
            "head_dim": 8,
            "lse": False,
        }
        inputs = inputs_of(Case(**sizes, **OPTIONS[option]))
        inputs.options["segments"] = segments(kind)
        if option == "index":
            inputs.options["index_bias"] = index_bias
        if option == "chunk":
            inputs.options["chunk"] = 130
        assert largest_error(one_by_one, inputs) < 1e-5, kind


def test_chunks_are_the_own_one_and_the_one_before():
    index = torch.arange(30)
    chunks_between = index[:, None] // 7 - index // 7
    expected = (chunks_between > 1) | (index > index[:, None])
    assert torch.equal(mask(index, index, None, 7, None), expected)
