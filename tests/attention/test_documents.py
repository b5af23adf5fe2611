"""Documents computed one by one give what the definition gives under a mask."""

import math

import pytest
import torch

from megatron.attention import attention
from megatron.attention.documents import TOGETHER, Stretch, stretches_of

BATCH, HEADS, KEYS, HEAD_DIM = 3, 2, 700, 8


def segments(kind: str) -> torch.Tensor:
    """[BATCH, KEYS] int64."""
    draw = torch.Generator().manual_seed(5)
    chance = {"long": 0.004, "mixed": 0.01, "short": 0.1, "one": 0.0}[kind]
    begins = torch.rand(BATCH, KEYS, generator=draw) < chance
    if kind == "mixed":
        begins[:, 100:140] = True  # documents of one token
        begins[1] = False  # and a row of one document
    return begins.long().cumsum(dim=1)


def index_bias(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Grows with the query's index, so that it must be that of the whole text."""
    distance = (queries[:, None] - keys).float()
    slopes = torch.tensor([0.01, 0.003])[:, None, None]
    return -slopes * distance * (1 + queries[:, None] / 100)


OPTIONS = {
    "plain": (),
    "bias": ("bias",),
    "weight": ("bias", "weight"),
    "window": ("bias", "window"),
    "index": ("index_bias",),
    "key bias": ("w",),
    "product": ("u", "w", "bias"),
    "rank 2": ("u2", "w2"),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_documents_one_by_one_are_attention_under_a_mask(option):
    for kind, queries in [("mixed", KEYS), ("short", KEYS), ("long", 450), ("mixed", 1)]:
        compare_with_the_mask(kind, queries, option)


def compare_with_the_mask(kind: str, queries: int, option: str) -> None:
    torch.manual_seed(1)
    sizes = {
        "q": (BATCH, HEADS, queries, HEAD_DIM),
        "k": (BATCH, HEADS, KEYS, HEAD_DIM),
        "v": (BATCH, HEADS, KEYS, HEAD_DIM),
        "bias": (HEADS, KEYS + 3),
        "weight": (HEADS, KEYS),
        "u": (BATCH, HEADS, queries),
        "w": (BATCH, HEADS, KEYS),
        "u2": (BATCH, HEADS, queries, 2),
        "w2": (BATCH, HEADS, KEYS, 2),
    }
    names = ["q", "k", "v", *(name for name in OPTIONS[option] if name in sizes)]
    tensors = {name: torch.randn(sizes[name]) for name in names}
    masks = {"segments": segments(kind)}
    if "window" in OPTIONS[option]:
        masks["window"] = 90
    if "index_bias" in OPTIONS[option]:
        masks["index_bias"] = index_bias

    def found(backend: str) -> list[torch.Tensor]:
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
        more = {name: leaves[name] for name in ("weight",) if name in leaves}
        w = leaves.get("w", leaves.get("w2"))
        if w is not None:
            more["score_bias"] = (leaves.get("u", leaves.get("u2")), w)
        q, k, v = (leaves[name] for name in ("q", "k", "v"))
        out = attention(q, k, v, leaves.get("bias"), backend=backend, **masks, **more)
        (out * torch.arange(HEAD_DIM)).sum().backward()
        return [out, *(leaf.grad for leaf in leaves.values())]

    for name, ours, theirs in zip(["out", *names], found("sdpa"), found("eager"), strict=True):
        size = max(1.0, float(theirs.detach().abs().max()))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * size, msg=name)


def test_neighbours_are_joined_while_they_are_short():
    sizes = [100, 100, 57, TOGETHER + 1, 1, 2, 240, 14, TOGETHER]
    numbers = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    (row,) = stretches_of(numbers[None])
    lengths = [(one.length, one.is_one) for one in row]
    assert lengths == [(200, False), (57, True), (257, True), (243, False), (14, True), (256, True)]
    assert row[0] == Stretch(0, 200, False)
    assert [one.start for one in row[1:]] == [one.end for one in row[:-1]]
    assert row[-1].end == sum(sizes)


def test_a_document_that_comes_back_is_computed_under_the_mask():
    numbers = torch.tensor([0] * 100 + [1] * 150 + [0] * 100)[None]
    assert stretches_of(numbers) is None
    q, k, v = torch.randn(3, 1, 2, 350, 4)
    last = attention(q, k, v, segments=numbers, backend="sdpa")[0, :, -1]
    visible = numbers[0] == 0
    scores = (q[0, :, -1:] @ k[0, :, visible].mT / math.sqrt(4)).softmax(dim=-1)
    torch.testing.assert_close(last, (scores @ v[0, :, visible])[:, 0], rtol=0, atol=1e-5)
