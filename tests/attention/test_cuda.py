"""Every backend on CUDA, compiled, at real sizes, against the definition in float64."""

from itertools import product

import pytest
import torch
from torch._dynamo.utils import counters

from megatron.attention import BACKENDS, attention

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
# FlexAttention takes many seconds to compile for each length and dtype.
CASES = [
    case
    for case in product(sorted(BACKENDS.keys() - {"eager"}), TOLERANCE, (512, 2048, 4096))
    if case[0] != "flex" or case[1:] in ((torch.float32, 512), (torch.bfloat16, 2048))
]


def inputs(dtype, length, *, batch=2, queries=None, weighted=False):
    """q, k, v, bias and weight (or None) on the device; biases fall with distance, not smoothly."""
    draw = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(3, batch, 4, length, 64, generator=draw).to(dtype).cuda()
    bias = (
        torch.randn(4, length, generator=draw)
        - torch.rand(4, 1, generator=draw) * torch.arange(length) / 50
    )
    weight = [torch.rand(4, length, generator=draw).cuda()] if weighted else []
    return [q[:, :, length - (queries or length) :], k, v, bias.cuda(), *weight]


def results(backend, given, *, precise=False, **more):
    """Output and all gradients."""
    leaves = [
        x.detach().clone().to(torch.float64 if precise else x.dtype).requires_grad_() for x in given
    ]
    out = attention(
        *leaves[:4], weight=leaves[4] if len(leaves) > 4 else None, backend=backend, **more
    )
    onto = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, onto)]


def errors(found, exact):
    return [
        float((ours.double() - true.double()).norm() / true.double().norm())
        for ours, true in zip(found, exact, strict=True)
    ]


@pytest.mark.parametrize(("backend", "dtype", "length"), CASES)
def test_values_and_gradients_at_real_lengths_are_those_of_the_definition_in_float64(
    backend, dtype, length
):
    given = inputs(dtype, length)
    found = errors(results(backend, given), results("eager", given, precise=True))
    assert max(found) < TOLERANCE[dtype], found


@pytest.mark.parametrize("backend", ["sdpa", "flex", "triton"])
@pytest.mark.parametrize("queries", [1, 333, 700])
def test_everything_at_once_at_lengths_that_fill_no_block(backend, queries):
    given = inputs(torch.float32, 700, queries=queries, weighted=True)
    segments = (torch.arange(700, device="cuda") // 450).expand(2, -1)
    more = {"window": 300, "chunk": 200, "segments": segments}
    found = errors(results(backend, given, **more), results("eager", given, precise=True, **more))
    assert max(found) < TOLERANCE[torch.float32], found


def test_flex_and_triton_agree_although_nothing_in_them_is_shared():
    given = inputs(torch.bfloat16, 4096)
    found = errors(results("triton", given, window=1000), results("flex", given, window=1000))
    assert max(found) < TOLERANCE[torch.bfloat16], found


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_two_runs_of_triton_give_the_same_bits(dtype):
    given = inputs(dtype, 2048, weighted=True)
    for first, second in zip(*(results("triton", given) for _ in range(2)), strict=True):
        assert torch.equal(first, second)


def test_auto_is_triton_with_a_table_and_flash_without(monkeypatch):
    acted = []
    for name in ("sdpa", "triton"):
        function = BACKENDS[name]
        monkeypatch.setitem(
            BACKENDS,
            name,
            lambda *x, n=name, f=function, **more: (acted.append(n), f(*x, **more))[1],
        )
    q, k, v, bias = inputs(torch.bfloat16, 512)
    attention(q, k, v, bias)
    assert set(acted) == {"triton"}
    acted.clear()
    attention(q, k, v)
    assert acted == ["sdpa"]


@torch.no_grad()
def test_flex_compiles_once_for_a_text_that_grows_token_by_token():
    q, k, v, bias = inputs(torch.bfloat16, 640)
    compiled = []
    for length in range(513, 640):
        attention(q[:, :, :1], k[:, :, :length], v[:, :, :length], bias, backend="flex")
        compiled.append(counters["stats"]["unique_graphs"])
    assert compiled[0] == compiled[-1]
