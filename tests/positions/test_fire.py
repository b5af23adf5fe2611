"""FIRE against its formula in float64, finite differences, and itself in pieces."""

import math
import resource
import sys

import pytest
import torch

from megatron.attention import attention
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


@pytest.mark.parametrize(("mlp_layers", "threshold"), [([32], None), ([5, 6], 100.0)])
def test_the_bias_is_the_papers_formula(mlp_layers, threshold):
    position = build(
        "fire", SHAPE, mlp_layers=mlp_layers, threshold=threshold, c=0.3, length_multiplier=1.5
    )
    assert position.threshold == (threshold or 32)
    for i, j in ((0, 0), (1, 0), (31, 5), (63, 63), (64, 0), (500, 499), (16383, 0), (131071, 7)):
        found = position.index_bias(torch.tensor([i]), torch.tensor([j]))[:, 0, 0]
        assert found.tolist() == pytest.approx(by_formula(position, i, j), rel=2e-5, abs=1e-6)


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
