"""Every backend on CUDA, compiled, at real sizes, against the definition in float64."""

from functools import partial

import pytest
import torch

from megatron.attention import BACKENDS, attention
from tests.attention.random_cases import errors

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
every_backend = pytest.mark.parametrize("backend", ["sdpa", "triton"])


def inputs(dtype, length, *, queries=None, weighted=False):
    """q, k, v, bias and weight (or None) on the device; biases fall with distance, not smoothly."""
    draw = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(3, 2, 4, length, 64, generator=draw).to(dtype).cuda()
    slope = torch.rand(4, 1, generator=draw) / 50
    bias = torch.randn(4, length, generator=draw) - slope * torch.arange(length)
    given = {"q": q[:, :, length - (queries or length) :], "k": k, "v": v, "bias": bias.cuda()}
    if weighted:
        given["weight"] = torch.rand(4, length, generator=draw).cuda()
    return given


def results(backend, given, *, precise=False, **more):
    """Output and all gradients, by name."""
    leaves = {}
    for name, x in given.items():
        leaves[name] = x.to(torch.float64 if precise else x.dtype).detach().clone()
        leaves[name].requires_grad_()
    out = attention(**leaves, backend=backend, **more)
    onto = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    gradients = torch.autograd.grad(out, list(leaves.values()), onto)
    return {"out": out.detach(), **dict(zip(leaves, gradients, strict=True))}


def largest_error(backend, given, **more):
    exact = results("eager", given, precise=True, **more)
    found = errors(results(backend, given, **more), exact, dict.fromkeys(exact, 0.0))
    return max(found.values())


@every_backend
@pytest.mark.parametrize("length", [512, 2048, 4096])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_values_and_gradients_at_real_lengths_are_those_of_the_definition(backend, dtype, length):
    assert largest_error(backend, inputs(dtype, length)) < TOLERANCE[dtype]


@every_backend
@pytest.mark.parametrize("queries", [1, 333, 700])
def test_everything_at_once_at_lengths_that_fill_no_block(backend, queries):
    given = inputs(torch.float32, 700, queries=queries, weighted=True)
    segments = (torch.arange(700, device="cuda") // 450).expand(2, -1)
    masks = {"window": 300, "chunk": 200, "segments": segments}
    assert largest_error(backend, given, **masks) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_two_runs_of_triton_give_the_same_bits(dtype):
    given = inputs(dtype, 2048, weighted=True)
    first, second = (results("triton", given) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_auto_is_triton_with_a_table_and_flash_without(monkeypatch):
    acted = []

    def noted(name, function, *tensors, **more):
        acted.append(name)
        return function(*tensors, **more)

    for name in ("sdpa", "triton"):
        monkeypatch.setitem(BACKENDS, name, partial(noted, name, BACKENDS[name]))
    given = inputs(torch.bfloat16, 512)
    attention(**given)
    assert set(acted) == {"triton"}
    acted.clear()
    del given["bias"]
    attention(**given)
    assert acted == ["sdpa"]
