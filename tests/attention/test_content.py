"""A bias by content, u·w: sdpa and Triton against the definition in float64, also for far sums."""

import importlib.util

import pytest
import torch

from megatron.attention import attention

HAS_TRITON = importlib.util.find_spec("triton") is not None and not torch.cuda.is_available()
# Batch, heads and keys. Triton is interpreted on the CPU, which is slow.
SIZES = {"eager": (2, 3, 300), "sdpa": (2, 3, 300), "triton": (1, 2, 70)}
BACKENDS = ["sdpa", *(["triton"] if HAS_TRITON else [])]
every_backend = pytest.mark.parametrize("backend", BACKENDS)


def inputs(backend, rank=0, *, ones, queries=None, dtype=torch.float32):
    torch.manual_seed(1)
    batch, heads, keys = SIZES[backend]
    queries = queries or keys
    last = (rank,) if rank else ()
    given = {
        "q": torch.randn(batch, heads, queries, 16).to(dtype),
        "k": torch.randn(batch, heads, keys, 16).to(dtype),
        "v": torch.randn(batch, heads, keys, 16).to(dtype),
        "bias": torch.randn(heads, keys).cumsum(1) * 0.1,
        "w": (torch.randn(batch, heads, keys, *last) * 0.5).cumsum(2),
    }
    if not ones:
        given["u"] = torch.randn(batch, heads, queries, *last)
    return given


def computed(given, backend, *, double=False, **more):
    """The output and the gradients of all inputs, by name."""
    leaves = {}
    for name, tensor in given.items():
        leaf = tensor.double() if double else tensor.clone()
        leaves[name] = leaf.requires_grad_()
    q, k, v, bias = (leaves[name] for name in ("q", "k", "v", "bias"))
    content = (leaves.get("u"), leaves["w"])
    out = attention(q, k, v, bias, score_bias=content, backend=backend, **more)
    torch.manual_seed(2)
    out.backward(torch.randn(out.shape).to(out.dtype))
    return {"out": out.detach()} | {name: leaf.grad for name, leaf in leaves.items()}


def check(ours, exact, tolerance):
    assert ours.keys() == exact.keys()
    for name, expected in exact.items():
        largest = max(1.0, expected.abs().max().item())
        difference = (ours[name].double() - expected).abs().max().item()
        assert difference <= tolerance * largest, (name, difference, largest)


@every_backend
def test_values_and_gradients_are_those_of_the_definition(backend):
    _, heads, keys = SIZES[backend]
    segments = (torch.arange(keys) // 35).expand(SIZES[backend][0], -1)
    weight = torch.linspace(0.5, 1.5, heads * keys).view(heads, keys)
    for rank, ones, queries, more in (
        (0, True, None, {}),
        (1, False, 5, {}),
        (0, False, None, {"window": 37}),
        (0, True, 5, {"chunk": 33}),
        (0, False, 1, {"segments": segments}),
        (0, False, None, {"window": 60, "chunk": 40, "segments": segments, "weight": weight}),
        (3, False, None, {"window": 70}),
        (3, False, 5, {}),
    ):
        if backend == "triton" and (rank > 1 or not more):
            continue  # interpreted, it is slow
        given = inputs(backend, rank, ones=ones, queries=queries)
        in_double = {**more, "weight": weight.double()} if "weight" in more else more
        exact = computed(given, "eager", double=True, **in_double)
        check(computed(given, backend, **more), exact, 2e-5)


@every_backend
def test_half_precision_rounds_inputs_and_not_the_bias(backend):
    for ones in (False, True):
        given = inputs(backend, ones=ones, dtype=torch.float16)
        given["w"] = given["w"] * 20
        ours = computed(given, backend)
        exact = computed(given, "eager", double=True)
        # Biases near 200 would be rounded by 0.5. Only values, probabilities and the output are.
        rounding = torch.finfo(torch.float16).eps * given["v"].abs().max()
        assert (ours["out"].double() - exact["out"]).abs().max() <= rounding
        check(ours, exact, 0.03)


@pytest.mark.parametrize("backend", ["eager", *BACKENDS])
def test_far_sums_lose_no_digits(backend):
    """Sums of 10^5 are exact to 0.008 in float32. What counts differs by a few from key to key."""
    for ones in (False, True):
        given = inputs(backend, ones=ones)
        steps = torch.rand(given["w"].shape, dtype=torch.float64)
        given["w"] = 1e5 + steps.cumsum(2)
        if not ones:
            given["u"] = given["u"].abs()
        ours = computed(given, backend)
        exact = computed({**given, "w": given["w"] - 1e5}, "eager", double=True)
        check(ours, exact, 3e-5)
