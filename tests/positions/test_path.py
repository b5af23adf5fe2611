"""PaTH against its authors' numbers, and against the product of its matrices, one by one."""

import pytest
import torch
from torch import Tensor

from megatron.attention import attention
from megatron.errors import UserError
from megatron.positions import Position, Shape, build
from megatron.positions.base import Memory
from tests.positions.golden import load
from tests.positions.test_authors import close

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)


def given(name: str, w: Tensor, beta: Tensor, log_f: Tensor | None):
    """The encoding with these numbers in place of those that it maps from its input."""
    position = build(name, SHAPE).double()
    position.transitions = lambda x, memory: (w, beta)
    position.log_gates = lambda x: log_f
    return position


def inputs_of(position: Position, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> dict:
    """What this encoding gives to attention."""
    inputs = {"block_scores": position.block_scores(q, k, x, memory)}
    if position.has("score_bias"):
        inputs["score_bias"] = position.score_bias(x, memory)
    return inputs


def score_by_score(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, log_f: Tensor | None) -> Tensor:
    """(k_jᵀ H_(j+1) … H_i q_i + Σ log f) / √head_dim: [batch, heads, length, length], later 0."""
    length, head_dim = q.shape[2:]
    products = q.new_zeros(*q.shape[:3], length)
    moved, fallen = q.clone(), q.new_zeros(q.shape[:3])  # of every query so far
    for j in reversed(range(length)):
        later = slice(j, length)
        by_key = (moved[:, :, later] * k[:, :, j, None]).sum(-1)
        products[:, :, later, j] = (by_key + fallen[:, :, later]) / head_dim**0.5
        along_w = (moved[:, :, later] * w[:, :, j, None]).sum(-1)
        moved[:, :, later] -= (beta[:, :, j, None] * along_w)[..., None] * w[:, :, j, None]
        if log_f is not None:
            fallen[:, :, later] += log_f[:, :, j, None]
    return products


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["path", "path_fox"])
def test_path_gives_the_numbers_of_its_authors(name, backend):
    golden, mapped = load("path", name), load("path", "only")
    assert golden.lengths
    for length in golden.lengths:
        expected = golden.of_length(length)
        leaves = {key: golden.inputs[f"{length}.{key}"].double() for key in ("q", "k", "v")}
        leaves |= {key: mapped.numbers[f"{length}.{key}"].double() for key in ("w", "beta")}
        if name == "path_fox":
            leaves["log_f"] = mapped.numbers[f"{length}.log_f"].double()
        for leaf in leaves.values():
            leaf.requires_grad_()
        q, k, v = leaves["q"], leaves["k"], leaves["v"]
        position = given(name, leaves["w"], leaves["beta"], leaves.get("log_f"))
        x = golden.inputs[f"{length}.x"].double()
        out = attention(q, k, v, **inputs_of(position, q, k, x, {}), backend=backend)
        close(out, expected["out"], 2e-5)
        (out * golden.inputs[f"{length}.dout"].double()).sum().backward()
        for key, leaf in leaves.items():
            if f"grad_{key}" in expected:
                close(leaf.grad, expected[f"grad_{key}"], 1e-4)


@pytest.mark.parametrize("name", ["path", "path_fox"])
def test_blocks_and_pieces_give_the_product_of_all_matrices(name):
    """Over several chunks and blocks of attention, whole and as a cached text, in float32."""
    length = 333
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 3, length, 8, dtype=torch.float64)
    x = torch.randn(1, length, 24)
    position = build(name, SHAPE)
    with torch.no_grad():
        w, beta = position.transitions(x, {})
        log_f = position.log_gates(x) if name == "path_fox" else None
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        numbers = (w.double(), beta.double(), None if log_f is None else log_f.double())
        expected = score_by_score(q, k, *numbers).masked_fill(later, -torch.inf).softmax(-1) @ v

        memory, begin = {}, 0
        q, k, v = q.float(), k.float(), v.float()
        for end in (70, 71, 72, length):
            new = slice(begin, end)
            terms = inputs_of(position, q[:, :, new], k[:, :, new], x[:, new], memory)
            out = attention(q[:, :, new], k[:, :, :end], v[:, :, :end], **terms)
            close(out, expected[:, :, new], 2e-5)
            begin = end
        whole = attention(q, k, v, **inputs_of(position, q, k, x, {}))
        close(whole, expected, 2e-5)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # it rounds no product
            assert torch.equal(attention(q, k, v, **inputs_of(position, q, k, x, {})), whole)


def test_masks_and_biases_act_in_blocks_as_on_all_scores():
    length = 300
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 3, length, 8, requires_grad=True) for _ in range(3))
    x, position = torch.randn(1, length, 24), build("path", SHAPE, taps=1)
    total = torch.rand(1, 3, length, dtype=torch.float64).cumsum(2).requires_grad_()
    options = {
        "window": {"window": 100},
        "chunks": {"chunk": 110},
        "documents": {"segments": torch.arange(length)[None] // 140},
        "table": {"bias": -torch.rand(3, length)},
        "content": {"score_bias": (None, total)},
    }
    for option in options.values():
        results = []
        for backend in ("eager", "sdpa"):
            block_scores = position.block_scores(q, k, x, {})
            out = attention(q, k, v, block_scores=block_scores, backend=backend, **option)
            leaves = [q, k, v, total] if "score_bias" in option else [q, k, v]
            gradients = torch.autograd.grad(out.square().sum(), leaves)
            results.append((out, *gradients))
        for eager, sdpa in zip(*results, strict=True):
            close(eager, sdpa, 2e-5)


def test_one_part_alone_gives_the_scores():
    with pytest.raises(UserError, match="parts: only one part can give the scores themselves"):
        build("sum", SHAPE, parts=["path", "path_fox"])
    assert build("sum", SHAPE, parts=["rotary", "path"]).has("block_scores")
