"""Every backend agrees with the definition, in values and gradients; the definition with a loop."""

import math

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.attention import BACKENDS, attention
from tests.attention.random_cases import errors_of, random_case

every_backend = pytest.mark.parametrize("backend", ["eager", "sdpa"])
CASES = {
    "plain": {"bias": False},
    "bias": {},
    "weight": {"weight": True},
    "weight alone": {"weight": True, "bias": False},
    "window": {"window": 7},
    "window without bias": {"window": 7, "bias": False},
    "chunk": {"chunk": 4},
    "segments": {"documents": True},
    "everything": {"weight": True, "window": 5, "chunk": 3, "documents": True},
}


def inputs(batch, heads, queries, keys, head_dim, *, bias=True, weight=False):
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(batch, heads, queries, head_dim, generator=draw)
    k, v = torch.randn(2, batch, heads, keys, head_dim, generator=draw)
    table = torch.randn(heads, keys + 3, generator=draw) if bias else None
    factor = torch.rand(heads, keys + 3, generator=draw) if weight else None
    return q, k, v, table, factor


def by_loop(q, k, v, bias, weight, window, chunk, segments):
    """The contract, one query at a time in float64."""
    q, k, v = q.double(), k.double(), v.double()
    queries, keys = q.shape[2], k.shape[2]
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for row in range(queries):
                i = keys - queries + row
                visible = [
                    j
                    for j in range(i + 1)
                    if (window is None or i - j < window)
                    and (chunk is None or i // chunk - j // chunk <= 1)
                    and (segments is None or segments[b, i] == segments[b, j])
                ]
                scores = []
                for j in visible:
                    score = (q[b, h, row] @ k[b, h, j]).item() / math.sqrt(q.shape[-1])
                    score *= 1 if weight is None else weight[h, i - j].item()
                    scores.append(score + (0 if bias is None else bias[h, i - j].item()))
                probabilities = torch.tensor(scores, dtype=torch.float64).softmax(dim=0)
                out[b, h, row] = probabilities @ v[b, h, visible]
    return out


@every_backend
def test_every_backend_keeps_the_contract(backend):
    of_documents = torch.tensor([[0] * 4 + [1] * 15, [0] * 17 + [1] * 2])
    for name, case in CASES.items():
        options = dict(case)
        masks = {name: options.pop(name, None) for name in ("window", "chunk")}
        segments = of_documents if options.pop("documents", False) else None
        for queries in (1, 5, 19):
            q, k, v, bias, weight = inputs(2, 3, queries, 19, 4, **options)
            more = {"weight": weight, **masks, "segments": segments}
            out = attention(q, k, v, bias, **more, backend=backend, self_check=False)
            expected = by_loop(q, k, v, bias, **more)
            torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6, msg=name)


def test_sdpa_is_the_definition_on_random_cases_in_every_precision():
    tolerance = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 3e-2}
    for number in range(60):
        dtype = list(tolerance)[number % 3]
        case = random_case(number, 600, head_dims=(8, 16, 64))
        found = errors_of(case, BACKENDS["sdpa"], dtype, "cpu")
        assert max(found.values()) < tolerance[dtype], (case, dtype, found)


def towards(out):
    """A gradient of the output."""
    return torch.linspace(-1, 1, out.numel()).view(out.shape).sin().to(out.dtype)


def computed(tensors, backend="sdpa", **more):
    """The output, and the gradients of q, k, v, bias and weight."""
    leaves = [x if x is None else x.detach().clone().requires_grad_() for x in tensors]
    q, k, v, bias, weight = leaves
    out = attention(q, k, v, bias, weight=weight, backend=backend, **more)
    present = [x for x in leaves if x is not None]
    return [out.detach(), *torch.autograd.grad(out, present, towards(out))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_many_tiles_of_heads_and_blocks_of_queries_add_up_and_twice_to_the_same_bits(dtype):
    for weighted in (False, True):
        *qkv, bias, weight = inputs(2, 5, 700, 700, 64, weight=weighted)
        tensors = [*(x.to(dtype) for x in qkv), bias, weight]
        first, second = computed(tensors), computed(tensors)
        assert all(map(torch.equal, first, second))
        exact = computed([x if x is None else x.double() for x in tensors], "eager")
        for ours, expected in zip(first, exact, strict=True):
            error = (ours.double() - expected).norm() / expected.norm()
            assert error < (1e-5 if dtype == torch.float32 else 3e-2)


def test_what_comes_later_is_not_seen_far_out_under_the_steepest_slope():
    q, k, v, _, _ = inputs(1, 1, 16384, 16384, 8)
    bias = -0.7071 * torch.arange(16384)[None]
    before = attention(q, k, v, bias)
    v[:, :, -1] += 1e4
    after = attention(q, k, v, bias)
    assert torch.equal(after[:, :, :-1], before[:, :, :-1])
    assert (after[:, :, -1] != before[:, :, -1]).all()


def test_where_a_head_is_blind_to_a_distance_its_bias_gets_no_gradient():
    q, k, v, bias, _ = inputs(1, 2, 300, 300, 8)
    bias[1, 200:] = -torch.inf
    *others, of_bias = computed([q, k, v, bias, None])
    assert all(torch.isfinite(x).all() for x in [*others, of_bias])
    assert (of_bias[1, 200:] == 0).all()
    assert (of_bias[0, 200:300] != 0).all()


def test_checkpointing_and_inference_change_nothing():
    tensors = inputs(2, 3, 300, 300, 8)
    out, *gradients = computed(tensors)
    with torch.inference_mode():
        assert torch.equal(attention(*tensors[:4], backend="sdpa"), out)
    given = [x.detach().requires_grad_() for x in tensors[:4]]
    again = checkpoint(lambda *x: attention(*x, backend="sdpa"), *given, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(again, given, towards(again)), gradients))


def test_shapes_that_disagree_are_refused():
    q, k, v, bias, _ = inputs(2, 3, 19, 19, 4)
    for change, message in (
        ({"bias": torch.zeros(3, 18)}, r"bias \[3, 18\] must be \[3, at least 19\]"),
        ({"weight": torch.zeros(2, 19)}, r"weight \[2, 19\] must be \[3, at least 19\]"),
        ({"window": 0}, "window: 0 must be at least 1"),
        ({"segments": torch.zeros(2, 18)}, r"segments \[2, 18\] must be \[2, 19\]"),
        ({"q": torch.zeros(2, 3, 20, 4)}, r"q \[2, 3, 20, 4\], k .* do not fit together"),
        ({"score_bias": (None, torch.zeros(2, 1, 20))}, r"score_bias u none and w .* must be"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(**{"q": q, "k": k, "v": v, "bias": bias, **change})
