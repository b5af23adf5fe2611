"""`xsa` against its formula, one number at a time in float64."""

import math

import pytest
import torch

from megatron.attention.terms import Terms
from megatron.model import Architecture
from megatron.model.block import AttentionInputs, SelfAttention
from megatron.positions import Shape, build
from tests.positions.test_authors import close

LENGTH, HEADS, KEY_HEADS, HEAD_DIM = 9, 4, 2, 5
HIDDEN = HEADS * HEAD_DIM


def layer_of(**keys) -> SelfAttention:
    model = Architecture(
        hidden_size=HIDDEN,
        num_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        seq_length=16,
        use_bias_in_attn_linear=False,  # nor in its output
        **keys,
    )
    torch.manual_seed(0)
    layer = SelfAttention(model).double()
    torch.nn.init.eye_(layer.dense.weight)
    return layer


def dot(first: list[float], second: list[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def test_each_head_reads_nothing_along_the_tokens_own_value():
    layer = layer_of(xsa=True)
    inputs = AttentionInputs(build("none", Shape(HEADS, HEAD_DIM, HIDDEN, 16)), Terms())
    x = torch.randn(1, LENGTH, HIDDEN, dtype=torch.float64)
    out = layer(x, inputs)[0].unflatten(-1, (HEADS, HEAD_DIM)).tolist()

    projected = layer.query_key_value(x)[0].unflatten(-1, (KEY_HEADS, -1))
    group = HEADS // KEY_HEADS
    for h in range(HEADS):
        rows = projected[:, h // group].tolist()  # queries of the group, then its key and value
        first = (h % group) * HEAD_DIM
        q = [row[first : first + HEAD_DIM] for row in rows]
        k = [row[group * HEAD_DIM : (group + 1) * HEAD_DIM] for row in rows]
        v = [row[(group + 1) * HEAD_DIM :] for row in rows]
        for i in range(LENGTH):
            exponentials = [math.exp(dot(q[i], k[j]) / math.sqrt(HEAD_DIM)) for j in range(i + 1)]
            total = sum(exponentials)
            y = [
                sum(e * v[j][c] for j, e in enumerate(exponentials)) / total
                for c in range(HEAD_DIM)
            ]
            share = dot(y, v[i]) / dot(v[i], v[i])
            expected = [y[c] - share * v[i][c] for c in range(HEAD_DIM)]
            assert out[i][h] == pytest.approx(expected, abs=1e-12)
        assert out[0][h] == pytest.approx([0.0] * HEAD_DIM, abs=1e-12)  # it has its own key alone


def test_a_gate_multiplies_what_is_left():
    inputs = AttentionInputs(build("none", Shape(HEADS, HEAD_DIM, HIDDEN, 16)), Terms())
    x = torch.randn(1, LENGTH, HIDDEN, dtype=torch.float64)
    gated = layer_of(xsa=True, attention_gate="head")
    plain = layer_of(xsa=True)
    group = HEADS // KEY_HEADS
    rows = gated.query_key_value.weight.detach().unflatten(0, (KEY_HEADS, -1))
    queries, gates, others = rows.split([group * HEAD_DIM, group, 2 * HEAD_DIM], dim=1)
    with torch.no_grad():
        plain.query_key_value.weight.copy_(torch.cat([queries, others], dim=1).flatten(0, 1))
    gate = (x @ gates.flatten(0, 1).mT).sigmoid()[..., None]
    expected = plain(x, inputs).unflatten(-1, (HEADS, HEAD_DIM)) * gate
    close(gated(x, inputs), expected.flatten(2), 1e-12)


def test_a_value_of_zero_takes_nothing_and_has_gradients():
    layer = layer_of(xsa=True)
    inputs = AttentionInputs(build("none", Shape(HEADS, HEAD_DIM, HIDDEN, 16)), Terms())
    x = torch.randn(1, LENGTH, HIDDEN, dtype=torch.float64)
    x[0, 3] = 0
    x.requires_grad_()
    out = layer(x, inputs)
    plain = layer_of()(x, inputs)
    close(out[0, 3], plain[0, 3], 1e-12)
    assert not torch.allclose(out[0, 4], plain[0, 4], atol=1e-3)
    out.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
