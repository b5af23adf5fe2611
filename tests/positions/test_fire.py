"""FIRE against its formula in float64, finite differences, and itself in pieces."""

import math
import resource
import sys

import pytest
import torch

from megatron.attention import attention
from megatron.errors import UserError
from megatron.positions import Position, Shape, build, fire

SHAPE = Shape(heads=3, head_dim=8, hidden=24, train_length=64)


def by_formula(position: Position, i: int, j: int) -> list[float]:
    """Equation 9 for one query and key: a value for each head, in Python's float64."""
    numbers = {name: value.detach().double() for name, value in position.named_parameters()}
    c, limit = numbers["c"].item(), numbers["length_multiplier"].item() * position.threshold

    def psi(x: float) -> float:
        return math.log(c * x + 1)

    values = torch.tensor([psi(i - j) / (psi(max(limit, i)) + 1e-6)], dtype=torch.float64)
    hidden = [name for name in numbers if name.startswith("bias_")]
    for name in hidden:
        values = (numbers[name.replace("bias", "weight")] @ values + numbers[name]).clamp(min=0)
    return (numbers[f"weight_{len(hidden)}"] @ values).tolist()


@pytest.mark.parametrize("mlp_layers", [[32], [32, 32], [5]])
@pytest.mark.parametrize("threshold", [None, 100.0])
def test_the_bias_is_the_papers_formula(mlp_layers, threshold):
    position = build(
        "fire", SHAPE, mlp_layers=mlp_layers, threshold=threshold, c=0.3, length_multiplier=1.5
    )
    assert position.threshold == (threshold or 32)
    for i, j in ((0, 0), (1, 0), (31, 5), (63, 63), (64, 0), (500, 499), (16383, 0), (131071, 7)):
        found = position.index_bias(torch.tensor([i]), torch.tensor([j]))[:, 0, 0]
        assert found.tolist() == pytest.approx(by_formula(position, i, j), rel=2e-5, abs=1e-6)


def test_an_unknown_activation_is_named_with_its_cure():
    with pytest.raises(UserError, match="'gelu' is not known; did you mean relu"):
        build("fire", SHAPE, activation="gelu")


def test_it_starts_as_the_papers_do():
    position = build("fire", SHAPE)
    assert (position.c.item(), position.length_multiplier.item()) == (pytest.approx(0.1), 1.0)
    shapes = [tuple(value.shape) for value in position.parameters()]
    assert shapes == [(1,), (1,), (32, 1), (32,), (3, 32)]


def test_keys_may_come_in_any_order_and_queries_in_any_portion(monkeypatch):
    position = build("fire", SHAPE)
    queries, keys = torch.arange(40, 100), torch.arange(100)
    whole = position.index_bias(queries, keys)
    assert whole.shape == (3, 60, 100)
    assert whole.dtype == torch.float32
    torch.testing.assert_close(
        position.index_bias(queries, keys.flip(0)), whole.flip(2), rtol=0, atol=1e-6
    )
    monkeypatch.setattr(fire, "NUMBERS", 10_000)
    torch.testing.assert_close(position.index_bias(queries, keys), whole, rtol=0, atol=1e-6)


def test_parameters_that_deepspeed_made_bfloat16_act_in_float32():
    position = build("fire", SHAPE)
    with torch.no_grad():
        for value in position.parameters():
            value.copy_(value.bfloat16())
    expected = position.index_bias(torch.arange(900, 910), torch.arange(910))
    for value in position.parameters():
        value.data = value.data.bfloat16()
    found = position.index_bias(torch.arange(900, 910), torch.arange(910))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("queries", [700, 300, 1])
def test_backends_agree_in_values_and_gradients(queries):
    position, keys = build("fire", SHAPE), 700
    q, (k, v) = torch.randn(2, 3, queries, 8), torch.randn(2, 2, 3, keys, 8)
    results = []
    for backend in ("eager", "sdpa"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, index_bias=position.index_bias, backend=backend)
        results.append(
            [out, *torch.autograd.grad(out.square().sum(), [*leaves, *position.parameters()])]
        )
    for eager, sdpa in zip(*results, strict=True):
        torch.testing.assert_close(sdpa, eager, rtol=1e-3, atol=1e-4)


def test_long_texts_need_no_square_of_memory():
    position = build("fire", Shape(1, 4, 4, 64), mlp_layers=[4])
    q, k, v = torch.randn(3, 1, 1, 8192, 4)
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    with torch.no_grad():
        out = attention(q, k, v, index_bias=position.index_bias, backend="sdpa")
    assert out.isfinite().all()
    # The square alone is 268 MB for one head, and the MLP's values four times that. A block of 256
    # queries is 8 MB, and a few exist at a time.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before < 200e6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mlp_layers": []},
            "mlp_layers: [] is not a list of widths; write mlp_layers: [32] or [32, 32]",
        ),
        ({"mlp_layers": 32}, "mlp_layers: 32 is not a list of widths"),
        ({"mlp_layers": [32, 0]}, "mlp_layers: [32, 0] is not a list of widths"),
        ({"threshold": 0}, "threshold: 0 is not a positive number"),
        ({"c": -0.1}, "c: -0.1 is not a positive number"),
        ({"length_multiplier": "one"}, "length_multiplier: 'one' is not a positive number"),
    ],
)
def test_a_slip_is_named_with_its_cure(options, message):
    with pytest.raises(UserError) as fault:
        build("fire", SHAPE, **options)
    assert message in str(fault.value)
