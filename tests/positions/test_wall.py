"""Wall against its authors' numbers, and against its formula in float64, one gate at a time."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention import attention
from megatron.positions import Shape, build
from tests.positions.golden import load
from tests.positions.test_authors import close
from tests.positions.test_path import inputs_of

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)
GATES = ("gate_logits", "scalar_gate_logits", "sink")


def score_by_score(q: Tensor, k: Tensor, log_f: Tensor) -> Tensor:
    """Σ_c q_ic k_jc Π f_lc / √head_dim, l = j+1 … i: [batch, heads, length, length], later 0."""
    length, head_dim = q.shape[2:]
    products = q.new_zeros(*q.shape[:3], length)
    faded = torch.zeros_like(k)
    for i in range(length):
        faded = faded * log_f[:, :, i, None].exp()
        faded[:, :, i] = k[:, :, i]
        products[:, :, i] = (faded * q[:, :, i, None]).sum(-1) / math.sqrt(head_dim)
    return products


def softmax_of(products: Tensor, v: Tensor) -> Tensor:
    later = torch.ones(products.shape[-2:], dtype=torch.bool).triu(1)
    return products.masked_fill(later, -math.inf).softmax(-1) @ v


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("variant", ["wall", "wall_scalar", "wall_sink"])
def test_wall_gives_the_numbers_of_its_authors(variant, backend):
    golden, gates = load("wall", variant), load("wall", "only")
    assert golden.lengths
    for length in golden.lengths:
        expected = golden.of_length(length)
        leaves = {key: golden.inputs[f"{length}.{key}"].double() for key in ("q", "k", "v")}
        leaves |= {key: gates.numbers[f"{length}.{key}"].double() for key in GATES}
        for leaf in leaves.values():
            leaf.requires_grad_()
        position = build("wall", SHAPE, scalar_gate=variant == "wall_scalar").double()
        logits = {
            "weight": leaves["gate_logits"].transpose(1, 2).flatten(2),
            "scalar_weight": leaves["scalar_gate_logits"].transpose(1, 2),
        }
        position.mapped = lambda x, weight, bias, logits=logits: logits[weight]
        q, k, v = leaves["q"], leaves["k"], leaves["v"]
        x = golden.inputs[f"{length}.x"].double()
        sink = leaves["sink"] if variant == "wall_sink" else None
        out = attention(q, k, v, **inputs_of(position, q, k, x, {}), sink=sink, backend=backend)
        close(out, expected["out"], 1e-6)
        gradients = [name for name in expected if name.startswith("grad")]
        if gradients:
            (out * golden.inputs[f"{length}.dout"].double()).sum().backward()
        for name in gradients:
            leaf = leaves[name.removeprefix("grad").lstrip("._")]
            close(leaf.grad, expected[name], 1e-6)


@pytest.mark.parametrize("steepness", [0.1, 10.0])
def test_spans_and_pieces_give_the_product_of_all_gates(steepness):
    """Over several spans and blocks of attention, whole and as a cached text, in float32; also
    where features are forgotten from one token to the next."""
    length = 333
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, length, 8, dtype=torch.float64)
    x = torch.randn(2, length, 24)
    position = build("wall", SHAPE, gate_bias=2.0, init_std=steepness)
    with torch.no_grad():
        log_f = F.logsigmoid(x.double() @ position.weight.double().mT + 2.0)
        log_f = log_f.unflatten(-1, (3, 8)).transpose(1, 2)
        expected = softmax_of(score_by_score(q, k, log_f), v)

        memory, begin = {}, 0
        q, k, v = q.float(), k.float(), v.float()
        for end in (70, 71, 72, length):
            new = slice(begin, end)
            terms = inputs_of(position, q[:, :, new], k[:, :, new], x[:, new], memory)
            out = attention(q[:, :, new], k[:, :, :end], v[:, :, :end], **terms)
            close(out, expected[:, :, new], 2e-6)
            begin = end
        whole = attention(q, k, v, **inputs_of(position, q, k, x, {}))
        close(whole, expected, 2e-6)
        with torch.autocast("cpu", dtype=torch.bfloat16):  # it rounds no product
            assert torch.equal(attention(q, k, v, **inputs_of(position, q, k, x, {})), whole)
