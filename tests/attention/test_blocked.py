"""Attention in blocks agrees with the definition in float64, on any path and twice the same."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from megatron.attention import attention

NAMES = ("q", "k", "v", "bias", "weight")
# Of tables' gradients; three times as much of q, k and v, where half precision rounds scores that
# nearly cancel.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def leaves(
    batch, heads, queries, keys, head_dim=8, *, bias=True, weight=False, dtype=torch.float32
):
    """Views q, k, v of one fused projection, as the model has them; tables in float32 or wider."""
    fused = torch.randn(batch, keys, heads, 3, head_dim).to(dtype)
    q, k, v = fused.permute(3, 0, 2, 1, 4)
    wide = torch.promote_types(dtype, torch.float32)
    tables = [torch.randn(heads, keys + 3, dtype=wide), torch.rand(heads, keys + 3, dtype=wide)]
    return [
        q[:, :, keys - queries :],
        k,
        v,
        tables[0] if bias else None,
        tables[1] if weight else None,
    ]


def towards(out, dtype):
    """The gradient of the output, the same numbers for every path: of `dtype`, in the output's."""
    return torch.linspace(-1, 1, out.numel()).view(out.shape).sin().to(dtype).to(out.dtype)


def run(tensors, learned, *, backend="sdpa", dtype=torch.float32, **more):
    """The output and the gradient of each tensor that is learned, by name."""
    given = {
        name: x if x is None else x.detach().requires_grad_(name in learned)
        for name, x in zip(NAMES, tensors, strict=True)
    }
    out = attention(**given, **more, backend=backend)
    wanted = {name: x for name, x in given.items() if x is not None and x.requires_grad}
    grads = torch.autograd.grad(out, list(wanted.values()), towards(out, dtype)) if wanted else []
    return {"out": out.detach(), **dict(zip(wanted, grads, strict=True))}


def agree(tensors, learned, **more):
    """Errors are relative to a value's norm, or to the output's where it nearly cancels."""
    dtype = tensors[0].dtype
    ours = run(tensors, learned, dtype=dtype, **more)
    truth = run(
        [x if x is None else x.double() for x in tensors],
        learned,
        backend="eager",
        dtype=dtype,
        **more,
    )
    assert ours.keys() == truth.keys()
    for name, value in ours.items():
        like = tensors[0] if name == "out" else tensors[NAMES.index(name)]
        assert value.dtype == like.dtype
        error, size = (
            (value.double() - truth[name]).norm(),
            max(truth[name].norm(), 0.1 * truth["out"].norm()),
        )
        tolerance = TOLERANCE[dtype] * (3 if name in ("q", "k", "v") else 1)
        assert error <= tolerance * size, f"{name}: {error / size:.2g}"


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_values_and_gradients_are_those_of_the_definition_in_float64(data):
    torch.manual_seed(data.draw(st.integers(0, 99)))
    batch, heads = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    keys = data.draw(st.sampled_from([1, 2, 127, 128, 129, 300, 513]))
    queries = data.draw(st.one_of(st.just(keys), st.just(1), st.integers(1, keys)))
    bias, weight = data.draw(st.booleans()), data.draw(st.booleans())
    dtype = data.draw(st.sampled_from(list(TOLERANCE)))
    more = {
        "window": data.draw(st.one_of(st.none(), st.integers(1, 600))),
        "chunk": data.draw(st.one_of(st.none(), st.sampled_from([1, 5, 64, 200, 300]))),
        "segments": torch.randint(0, 3, (batch, keys)).sort(dim=1).values
        if data.draw(st.booleans())
        else None,
    }
    learned = data.draw(st.sets(st.sampled_from(NAMES)))
    agree(
        leaves(batch, heads, queries, keys, bias=bias, weight=weight, dtype=dtype), learned, **more
    )


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("weight", [False, True])
def test_many_tiles_of_heads_and_blocks_of_queries_add_up(dtype, weight):
    agree(leaves(2, 5, 700, 700, 64, weight=weight, dtype=dtype), NAMES)


def test_where_a_head_is_blind_to_a_distance_its_bias_gets_no_gradient():
    q, k, v, bias, _ = leaves(1, 2, 300, 300)
    bias[1, 200:] = -torch.inf
    found = run([q, k, v, bias, None], NAMES)
    assert all(torch.isfinite(x).all() for x in found.values())
    assert (found["bias"][1, 200:] == 0).all()
    assert (found["bias"][0, 200:300] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_runs_give_the_same_bits(dtype):
    tensors = leaves(2, 3, 400, 400, weight=True, dtype=dtype)
    first, second = run(tensors, NAMES), run(tensors, NAMES)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_checkpointing_and_inference_change_nothing():
    tensors = leaves(2, 3, 300, 300)
    plain = run(tensors, NAMES)
    with torch.inference_mode():
        assert torch.equal(attention(*tensors[:4], backend="sdpa"), plain["out"])
    given = [x.detach().requires_grad_() for x in tensors[:4]]
    out = checkpoint(lambda *x: attention(*x, backend="sdpa"), *given, use_reentrant=False)
    for name, grad in zip(
        NAMES, torch.autograd.grad(out, given, towards(out, torch.float32)), strict=False
    ):
        assert torch.equal(grad, plain[name])
