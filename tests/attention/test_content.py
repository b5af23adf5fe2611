"""A bias by content, u·w: every backend against the definition in float64, also for far sums."""

import pytest
import torch

from megatron.attention import attention
from megatron.errors import UserError

LEARNED = ("q", "k", "v", "bias", "u", "w")


def inputs(queries, keys, rank, *, ones, head_dim=16, dtype=torch.float32):
    torch.manual_seed(1)
    last = (rank,) if rank else ()
    given = {
        "q": torch.randn(2, 3, queries, head_dim),
        "k": torch.randn(2, 3, keys, head_dim),
        "v": torch.randn(2, 3, keys, head_dim),
        "bias": torch.randn(3, keys).cumsum(1) * 0.1,
        "u": None if ones else torch.randn(2, 3, queries, *last),
        "w": (torch.randn(2, 3, keys, *last) * 0.5).cumsum(2),
    }
    if dtype != torch.float32:
        for name in ("q", "k", "v"):
            given[name] = given[name].to(dtype)
    return given


def computed(given, backend, *, double=False, learned_bias=True, **masks):
    """The output and the gradients of all inputs, by name."""
    leaves = {}
    for name, tensor in given.items():
        if tensor is not None:
            leaf = tensor.double() if double else tensor.clone()
            leaves[name] = leaf.requires_grad_(name != "bias" or learned_bias)
    out = attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        leaves["bias"],
        score_bias=(leaves.get("u"), leaves["w"]),
        backend=backend,
        **masks,
    )
    torch.manual_seed(2)
    out.backward(torch.randn(out.shape).to(out.dtype))
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"out": out.detach()} | gradients


def check(ours, exact, tolerance):
    assert ours.keys() == exact.keys()
    for name, expected in exact.items():
        largest = max(1.0, expected.abs().max().item())
        difference = (ours[name].double() - expected).abs().max().item()
        assert difference <= tolerance * largest, (name, difference, largest)


@pytest.mark.parametrize(
    ("rank", "ones"),
    [(0, True), (0, False), (1, False), (3, False)],
    ids=["ones", "plain", "one", "three"],
)
@pytest.mark.parametrize(
    "masks",
    [{}, {"window": 70}, {"chunk": 50}, {"segments": True}],
    ids=["causal", "window", "chunk", "segments"],
)
def test_values_and_gradients_are_those_of_the_definition(rank, ones, masks):
    if masks.get("segments"):
        masks = {"segments": (torch.arange(300) // 110).expand(2, -1)}
    for queries in (300, 5, 1):
        given = inputs(queries, 300, rank, ones=ones)
        ours = computed(given, "sdpa", **masks)
        exact = computed(given, "eager", double=True, **masks)
        check(ours, exact, 2e-5)


def test_a_weight_by_distance_does_not_multiply_it():
    given = inputs(200, 200, 0, ones=False)
    weight = torch.rand(3, 200)
    ours = computed(given, "sdpa", weight=weight)
    exact = computed(given, "eager", double=True, weight=weight.double())
    check(ours, exact, 2e-5)


@pytest.mark.parametrize("ones", [False, True], ids=["u", "ones"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_rounds_inputs_and_not_the_bias(ones, dtype):
    given = inputs(600, 600, 0, ones=ones, dtype=dtype)
    given["w"] = given["w"] * 20
    ours = computed(given, "sdpa")
    exact = computed(given, "eager", double=True)
    # Biases near 200 would be rounded by 0.5. Only values, probabilities and the output are.
    rounding = torch.finfo(dtype).eps * given["v"].abs().max()
    assert (ours["out"].double() - exact["out"]).abs().max() <= rounding
    check(ours, exact, 0.03)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("ones", [False, True], ids=["u", "ones"])
def test_far_sums_lose_no_digits(backend, ones):
    """Sums of 10^5 are exact to 0.008 in float32. What counts differs by a few from key to key."""
    given = inputs(700, 700, 0, ones=ones)
    steps = torch.rand(2, 3, 700, dtype=torch.float64)
    given["w"] = 1e5 + steps.cumsum(2)
    if not ones:
        given["u"] = given["u"].abs()
    ours = computed(given, backend)
    exact = computed({**given, "w": given["w"] - 1e5}, "eager", double=True)
    check(ours, exact, 3e-5)


def test_flex_refuses_it_and_auto_does_not_choose_it():
    given = inputs(20, 20, 0, ones=True)
    tensors = [given[name] for name in ("q", "k", "v")]
    with pytest.raises(UserError, match="a bias depends on content"):
        attention(*tensors, score_bias=(None, given["w"]), backend="flex")
    out = attention(*tensors, score_bias=(None, given["w"]))
    expected = attention(*tensors, score_bias=(None, given["w"]), backend="eager")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("u", "w"),
    [
        (None, (2, 3, 19)),
        (None, (2, 1, 20)),
        ((2, 3, 19), (2, 3, 20)),
        ((2, 3, 20), (2, 3, 20, 2)),
        (None, (20,)),
    ],
)
def test_shapes_that_do_not_fit_are_one_message(u, w):
    given = inputs(20, 20, 0, ones=True)
    tensors = [given[name] for name in ("q", "k", "v")]
    with pytest.raises(ValueError, match=r"score_bias u .* and w .* must be"):
        attention(*tensors, score_bias=(None if u is None else torch.zeros(u), torch.zeros(w)))
