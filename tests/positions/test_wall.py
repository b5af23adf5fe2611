"""Wall against its authors' numbers, and against its formula in float64, one gate at a time."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.attention import attention
from megatron.conformance.subject import scores
from megatron.positions import Position, Shape, build
from megatron.positions.base import Memory
from tests.positions.golden import load
from tests.positions.test_authors import close, lower_triangle

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)
GATES = ("gate_logits", "scalar_gate_logits", "sink")


def inputs_of(position: Position, q: Tensor, k: Tensor, x: Tensor, memory: Memory) -> dict:
    """What this encoding gives to attention."""
    inputs = {"block_scores": position.block_scores(q, k, x, memory)}
    if position.has("score_bias"):
        inputs["score_bias"] = position.score_bias(x, memory)
    return inputs


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
        if "scores" in expected:
            ours = lower_triangle(scores(position, q, k, x))
            close(ours[: len(expected["scores"])], expected["scores"], 1e-6)
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


def test_gradients_are_those_of_the_formula_in_blocks_of_attention():
    length = 300
    torch.manual_seed(0)
    numbers = torch.randn(4, 1, 3, length, 8, dtype=torch.float64)
    gradients = []
    for ours in (True, False):
        q, k, v, gates = (x.clone().requires_grad_() for x in numbers)
        log_f = F.logsigmoid(2 * gates)
        if ours:
            position, logits = build("wall", SHAPE).double(), 2 * gates.transpose(1, 2).flatten(2)
            position.mapped = lambda x, weight, bias, logits=logits: logits
            terms = inputs_of(position, q, k, torch.zeros(1, length, 24), {})
            out = attention(q, k, v, **terms, backend="sdpa")
        else:
            fallen = log_f.cumsum(2)
            between = (fallen[:, :, :, None] - fallen[:, :, None]).clamp(max=0).exp()
            products = torch.einsum("bhic,bhjc,bhijc->bhij", q, k, between) / math.sqrt(8)
            out = softmax_of(products, v)
        gradients.append(torch.autograd.grad(out.square().sum(), [q, k, v, gates]))
    for ours, expected in zip(*gradients, strict=True):
        close(ours, expected, 1e-9)


@torch.no_grad()
def test_the_last_of_16384_tokens_reads_what_the_formula_says():
    length, shape = 16384, Shape(heads=1, head_dim=4, hidden=4, train_length=64)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 1, length, 4)
    x = torch.randn(1, length, 4)
    position = build("wall", shape, gate_bias=7.0, init_std=2.0)
    out = attention(q, k, v, **inputs_of(position, q, k, x, {}))
    log_f = F.logsigmoid(x.double() @ position.weight.double().mT + 7.0)[:, None]
    fallen = log_f.cumsum(2)
    assert fallen[0, 0, -1].min() < -100  # exp of it with the other sign is no float32 number
    for i in (255, 256, 9000, length - 1):
        faded = k[:, :, : i + 1].double() * (fallen[:, :, i : i + 1] - fallen[:, :, : i + 1]).exp()
        products = (q[:, :, i].double()[:, :, None] * faded).sum(-1) / 2
        expected = (products.softmax(-1)[..., None] * v[:, :, : i + 1].double()).sum(2)
        close(out[:, :, i], expected, 2e-6)


def test_the_scalar_gate_is_a_bias_of_the_scores():
    plain, gated = build("wall", SHAPE), build("wall", SHAPE, scalar_gate=True)
    assert not plain.has("score_bias")
    assert gated.has("score_bias")
    assert set(dict(gated.named_parameters())) - set(dict(plain.named_parameters())) == {
        "scalar_weight",
        "scalar_bias",
    }
    x = torch.randn(2, 20, 24)
    q, k = torch.randn(2, 2, 3, 20, 8)
    with torch.no_grad():
        gated.weight.copy_(plain.weight)
        log_f = F.logsigmoid(x.double() @ gated.scalar_weight.double().mT + 8.0).transpose(1, 2)
        fallen = log_f.cumsum(2)
        difference = scores(gated, q, k, x) - scores(plain, q, k, x)
        close(difference, (fallen[..., :, None] - fallen[..., None, :]).tril(), 1e-6)
