"""Every backend gives what the definition gives, values and gradients; that is what a loop in float64 gives."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.attention import BACKENDS, attention, resolve
from megatron.errors import UserError

every_backend = pytest.mark.parametrize("backend", sorted(BACKENDS))


def inputs(batch, heads, queries, keys, head_dim, *, bias=True, weight=False, dtype=torch.float32, seed=0):
    draw = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, queries, head_dim, generator=draw, dtype=dtype)
    k, v = torch.randn(2, batch, heads, keys, head_dim, generator=draw, dtype=dtype)
    tables = {
        "bias": torch.randn(heads, keys + 3, generator=draw) if bias else None,
        "weight": torch.rand(heads, keys + 3, generator=draw) if weight else None,
    }
    return [q, k, v], tables


def by_loop(q, k, v, bias, weight, window, segments):
    """The contract, one query at a time in float64."""
    q, k, v = q.double(), k.double(), v.double()
    queries, keys = q.shape[2], k.shape[2]
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for row in range(queries):
                i = keys - queries + row
                seen = [
                    j
                    for j in range(i + 1)
                    if (window is None or i - j < window) and (segments is None or segments[b, i] == segments[b, j])
                ]
                scores = []
                for j in seen:
                    score = (q[b, h, row] @ k[b, h, j]).item() / math.sqrt(q.shape[-1])
                    score *= 1 if weight is None else weight[h, i - j].item()
                    scores.append(score + (0 if bias is None else bias[h, i - j].item()))
                share = torch.tensor(scores, dtype=torch.float64).softmax(dim=0)
                out[b, h, row] = share @ v[b, h, seen]
    return out


CASES = {
    "plain": {"bias": False},
    "bias": {},
    "weight": {"weight": True},
    "weight_alone": {"weight": True, "bias": False},
    "window": {"window": 7},
    "window_without_bias": {"window": 7, "bias": False},
    "segments": {"documents": True},
    "everything": {"weight": True, "window": 5, "documents": True},
}


@every_backend
@pytest.mark.parametrize("queries", [1, 5, 19])
@pytest.mark.parametrize("case", sorted(CASES))
def test_every_backend_keeps_the_contract(backend, queries, case):
    options = dict(CASES[case])
    window, documents = options.pop("window", None), options.pop("documents", False)
    (q, k, v), tables = inputs(2, 3, queries, 19, 4, **options)
    segments = torch.tensor([[0] * 4 + [1] * 15, [0] * 17 + [1] * 2]) if documents else None
    out = attention(q, k, v, tables["bias"], weight=tables["weight"], window=window, segments=segments, backend=backend)
    expected = by_loop(q, k, v, tables["bias"], tables["weight"], window, segments)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_backend_agrees_with_the_definition_in_values_and_gradients(data):
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    keys = data.draw(st.sampled_from([1, 2, 100, 255, 256, 257, 513, 600]))
    queries = data.draw(st.one_of(st.just(keys), st.integers(1, keys)))
    bias, weight = data.draw(st.booleans()), data.draw(st.booleans())
    window = data.draw(st.one_of(st.none(), st.integers(1, 700)))
    documents = data.draw(st.booleans())
    tensors, tables = inputs(batch, heads, queries, keys, 8, bias=bias, weight=weight)
    segments = torch.randint(0, 3, (batch, keys)).sort(dim=1).values if documents else None
    results = {}
    for backend in BACKENDS:
        leaves = [x.clone().requires_grad_() for x in [*tensors, *(t for t in tables.values() if t is not None)]]
        given_tables = iter(leaves[3:])
        named = {name: None if table is None else next(given_tables) for name, table in tables.items()}
        out = attention(
            *leaves[:3], named["bias"], weight=named["weight"], window=window, segments=segments, backend=backend
        )
        grads = torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum(), leaves)
        results[backend] = [out, *grads]
    for backend, found in results.items():
        for ours, defined in zip(found, results["eager"], strict=True):
            torch.testing.assert_close(ours, defined, rtol=1e-4, atol=3e-5, msg=lambda m, b=backend: f"{b}: {m}")


@every_backend
def test_a_learned_table_gets_an_exact_gradient(backend):
    tensors, tables = inputs(2, 3, 300, 300, 8)
    wide = [x.double().requires_grad_() for x in tensors]
    table = tables["bias"].double().requires_grad_()
    attention(*wide, table, backend="eager").square().sum().backward()
    ours = tables["bias"].clone().requires_grad_()
    attention(*tensors, ours, backend=backend).square().sum().backward()
    error = (ours.grad.double() - table.grad).norm() / table.grad.norm()
    assert error < 1e-5


@every_backend
def test_bfloat16_inputs_keep_a_float32_table(backend):
    tensors, tables = inputs(1, 2, 400, 400, 16)
    expected = attention(*[x.double() for x in tensors], tables["bias"].double(), backend="eager")
    out = attention(*[x.bfloat16() for x in tensors], tables["bias"], backend=backend)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-2)


@every_backend
def test_what_comes_later_is_not_seen_at_16384_under_the_steepest_slope(backend):
    length = 16384 if backend != "eager" else 2048
    (q, k, v), _ = inputs(1, 1, length, length, 8)
    bias = -0.7071 * torch.arange(length)[None]
    before = attention(q, k, v, bias, backend=backend)
    v[:, :, -1] += 1e4
    after = attention(q, k, v, bias, backend=backend)
    torch.testing.assert_close(after[:, :, :-1], before[:, :, :-1], rtol=0, atol=0)
    assert (after[:, :, -1] != before[:, :, -1]).all()


def test_auto_names_a_real_backend():
    assert resolve("auto") in BACKENDS
    with pytest.raises(UserError, match="attention_backend: 'flash' is not known; choose from auto, eager, sdpa"):
        resolve("flash")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(3, 18)}, r"bias \[3, 18\] must be \[3, at least 19\]"),
        ({"weight": torch.zeros(2, 19)}, r"weight \[2, 19\] must be \[3, at least 19\]"),
        ({"window": 0}, "window: 0 must be at least 1"),
        ({"segments": torch.zeros(2, 18)}, r"segments \[2, 18\] must be \[2, 19\]"),
        ({"q": torch.zeros(2, 3, 20, 4)}, r"q \[2, 3, 20, 4\], k .* do not fit together"),
    ],
)
def test_shapes_that_disagree_are_refused(change, message):
    (q, k, v), tables = inputs(2, 3, 19, 19, 4)
    arguments = {"q": q, "k": k, "v": v, "bias": tables["bias"], **change}
    with pytest.raises(ValueError, match=message):
        attention(**arguments)
