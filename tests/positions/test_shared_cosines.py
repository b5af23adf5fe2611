"""Layers share the cosines of a pass, and no cosines outlive what they were made from."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.conformance.subject import Subject
from megatron.positions import Position, Shape, build

SHAPE = Shape(heads=2, head_dim=8, hidden=16, train_length=16)
Q, K = torch.randn(2, 3, 2, 16, 8, generator=torch.Generator().manual_seed(1))


class Cosines(TorchDispatchMode):
    """Counts calls of cos."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.__name__ == "cos.default"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["rotary", "xpos"])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_pass_computes_cosines_once_for_all_layers(name, recompute):
    model = Subject(name, {}, 2, 8, 16, 61).gpt(layers=3).train()
    model.checkpoint_activations = recompute
    ids = torch.randint(61, (2, 17))
    for _ in range(2):
        with Cosines() as made:
            model(ids[:, :-1], labels=ids[:, 1:], mean=True).backward()
        assert made.count == 1


def turned(position: Position, start: int = 0) -> tuple[Tensor, ...]:
    dtype = position.origin.dtype
    return position.on_queries_keys(Q.to(dtype), K.to(dtype), start)


CHANGES: dict[str, Callable[[Position], object]] = {
    "scaling": lambda position: position.use_scaling({"name": "yarn", "factor": 4.0}),
    "paper_precision": lambda position: position.use_paper_precision(True),
    "dtype": lambda position: position.double(),
    "frequencies": lambda position: setattr(position, "inv_freq", position.inv_freq / 2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_encoding_makes_new_cosines(change):
    used, fresh = (build("rotary", SHAPE) for _ in range(2))
    before = turned(used)
    for position in (used, fresh):
        CHANGES[change](position)
    after = turned(used)
    assert all(map(torch.equal, after, turned(fresh)))
    assert not torch.equal(after[0], before[0])


def test_each_draw_and_each_place_has_cosines_of_its_own():
    position = build("randomized", SHAPE).train()
    for _ in range(2):
        position.prepare(16)
        where = position.drawn.float()
        expected = position.inner.on_queries_keys_at(Q, K, where, where)
        assert all(map(torch.equal, turned(position), expected))
    position.eval().prepare(21)
    where = 5 + torch.arange(16.0)
    expected = position.inner.on_queries_keys_at(Q, K, where, where)
    assert all(map(torch.equal, turned(position, 5), expected))


def test_training_does_not_read_cosines_of_inference_mode():
    position = build("rotary", SHAPE)
    with torch.inference_mode():
        turned(position)
    q = Q.clone().requires_grad_()
    turned_q, _ = position.on_queries_keys(q, K)
    turned_q.sum().backward()
    assert q.grad is not None
