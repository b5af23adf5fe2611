"""A bias by content in our Triton programs: the definition in float64, also for sums of 10^5."""

import pytest
import torch

from megatron.attention import attention
from megatron.attention.content import ScoreBias
from megatron.attention.self_check import check as self_check
from megatron.attention.triton_kernel import triton_attention
from megatron.errors import UserError
from tests.attention.test_content import check, computed
from tests.attention.test_content import inputs as large_inputs

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="inputs lie on the CPU")


def inputs(*sizes, **options):
    """One text and two heads: the interpreter is slow."""
    given = large_inputs(*sizes, **options)
    small = {name: tensor for name, tensor in given.items() if tensor is not None}
    small = {name: x[:2] if name == "bias" else x[:1, :2] for name, x in small.items()}
    return {name: small.get(name) for name in given}


MASKS = {
    "causal": {},
    "window": {"window": 37},
    "chunk": {"chunk": 33},
    "segments": {"segments": (torch.arange(90) // 35).expand(1, -1)},
    "all": {
        "window": 60,
        "chunk": 40,
        "segments": (torch.arange(90) // 35).expand(1, -1),
        "weight": torch.linspace(0.5, 1.5, 180).view(2, 90),
    },
}


CASES = [("causal", True, 90), ("causal", False, 5), ("window", False, 90), ("chunk", True, 5)]


@pytest.mark.parametrize(
    ("masks", "ones", "queries"), [*CASES, ("segments", False, 90), ("all", False, 90)]
)
def test_values_and_gradients_are_those_of_the_definition(masks, ones, queries):
    given, masks = inputs(queries, 90, 0, ones=ones), MASKS[masks]
    ours = computed(given, "triton", **masks)
    in_double = dict(masks)
    if "weight" in masks:
        in_double["weight"] = masks["weight"].double()
    exact = computed(given, "eager", double=True, **in_double)
    check(ours, exact, 1e-5)


def test_frozen_tables_leave_its_gradients_as_they_are():
    given = inputs(60, 60, 1, ones=False)
    ours = computed(given, "triton", learned_bias=False)
    exact = computed(given, "eager", double=True, learned_bias=False)
    check(ours, exact, 1e-5)


def test_half_precision_rounds_inputs_and_not_the_bias():
    given = inputs(60, 60, 0, ones=False, dtype=torch.float16)
    given["w"] = given["w"] * 20
    ours = computed(given, "triton")
    exact = computed(given, "eager", double=True)
    rounding = torch.finfo(torch.float16).eps * given["v"].abs().max()
    assert (ours["out"].double() - exact["out"]).abs().max() <= rounding
    check(ours, exact, 0.01)


@pytest.mark.parametrize("ones", [False, True], ids=["u", "ones"])
def test_far_sums_lose_no_digits(ones):
    """Sums of 10^5 are exact to 0.008 in float32. What counts differs by a few from key to key."""
    given = inputs(90, 90, 0, ones=ones)
    steps = torch.rand(1, 2, 90, dtype=torch.float64)
    given["w"] = 1e5 + steps.cumsum(2)
    if not ones:
        given["u"] = given["u"].abs()
    ours = computed(given, "triton")
    exact = computed({**given, "w": given["w"] - 1e5}, "eager", double=True)
    check(ours, exact, 1e-5)


def test_two_runs_give_the_same_bits():
    given = inputs(20, 70, 0, ones=False)
    first, second = (computed(given, "triton") for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_compiled_code_has_no_break_and_the_same_bits():
    given = inputs(40, 40, 0, ones=False)
    given["w"] = given["w"].double()
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}

    def layer(q, k, v, bias, u, w):
        return attention(q * 1.5, k, v, bias, score_bias=(u, w), backend="triton").sin().sum()

    plain = layer(**leaves)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)(**leaves)
    assert torch.equal(compiled, plain)
    expected = torch.autograd.grad(plain, list(leaves.values()))
    found = torch.autograd.grad(compiled, list(leaves.values()))
    assert all(map(torch.equal, found, expected))


def test_a_rank_above_one_is_refused():
    given = inputs(20, 20, 3, ones=False)
    with pytest.raises(UserError, match="biases by content of rank one, not 3"):
        computed(given, "triton")


@pytest.mark.parametrize("quantity", ["u", "w"])
def test_the_self_check_finds_a_wrong_gradient(quantity):
    given = inputs(64, 64, 0, ones=False)
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}

    def wrong(q, k, v, bias, *, score_bias, **options):
        u, w = score_bias.u, score_bias.w
        if quantity == "u":
            u = u.detach() + 0 * u
        else:
            w = w.detach() + 0 * w
        return triton_attention(q, k, v, bias, score_bias=ScoreBias(u, w), **options)

    tensors = [leaves[name] for name in ("q", "k", "v", "bias")]
    content = ScoreBias.of((leaves["u"], leaves["w"]))
    options = {"weight": None, "window": None, "chunk": None, "segments": None}
    with pytest.raises(UserError, match=f"its gradient of {quantity} differs"):
        self_check("triton", wrong, *tensors, **options, score_bias=content)
