"""Every backend agrees with the definition, in values and gradients; the definition with a loop."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.attention import BACKENDS, attention
from tests.attention.random_cases import (
    Case,
    error_of,
    inputs_of,
    random_case,
    values_and_gradients,
)

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 3e-2}
CASES = (
    {"bias": None},
    {},
    {"weight": True},
    {"weight": True, "bias": None},
    {"window": 7},
    {"documents": 2},
    {"content": 2},
    {"content": 1, "ones": True, "weight": True, "window": 5, "documents": 5},
)


def by_loop(q, k, v, terms):
    """The contract, one query at a time in float64."""
    q, k, v = q.double(), k.double(), v.double()
    keys, segments = k.shape[2], terms.segments
    out, lse = torch.zeros_like(q), torch.zeros_like(q[..., 0])
    for b, h, row in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        i = keys - q.shape[2] + row
        visible = [
            j
            for j in range(i + 1)
            if (terms.window is None or i - j < terms.window)
            and (segments is None or segments[b, i] == segments[b, j])
        ]
        scores = []
        for j in visible:
            score = (q[b, h, row] @ k[b, h, j]).item() / math.sqrt(q.shape[-1])
            score *= 1 if terms.weight is None else terms.weight[h, i - j].item()
            score += 0 if terms.bias is None else terms.bias[h, i - j].item()
            if terms.content is not None:
                w = terms.content.w[b, h, j] - terms.content.w[b, h, i]
                u = terms.content.u
                score += (w if u is None else u[b, h, row].double() * w).sum().item()
            scores.append(score)
        scores = torch.tensor(scores, dtype=torch.float64)
        out[b, h, row] = scores.softmax(dim=0) @ v[b, h, visible]
        lse[b, h, row] = scores.logsumexp(dim=0)
    return out, lse


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_every_backend_keeps_the_contract(backend):
    for options in CASES:
        for queries in (1, 5, 19):
            inputs = inputs_of(Case(heads=3, queries=queries, keys=19, head_dim=4, **options))
            results = inputs.attend(BACKENDS[backend], inputs.tensors)
            for ours, expected in zip(results, inputs.attend(by_loop, inputs.tensors), strict=True):
                torch.testing.assert_close(ours.double(), expected, rtol=0, atol=4e-6, msg=options)


def test_sdpa_is_the_definition_on_random_cases_in_every_precision():
    for number in range(60):
        dtype = list(TOLERANCE)[number % 3]
        case = random_case(number, 600, head_dims=(8, 16, 64), most_rank=3)
        case = replace(case, value_dim=(0, 6, 40)[number % 7 % 3])
        assert error_of(case, BACKENDS["sdpa"], dtype, "cpu") < TOLERANCE[dtype], (case, dtype)


def test_many_tiles_of_heads_and_blocks_of_queries_add_up_and_twice_to_the_same_bits():
    case = Case(heads=5, queries=600, keys=600, head_dim=64, weight=True)
    assert error_of(case, BACKENDS["sdpa"], torch.float32, "cpu") < TOLERANCE[torch.float32]
    first, second = (values_and_gradients(BACKENDS["sdpa"], inputs_of(case)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_checkpointing_and_inference_change_nothing():
    tensors = inputs_of(Case(heads=3, queries=300, keys=300)).tensors.values()
    leaves = [x.requires_grad_() for x in tensors]
    out = attention(*leaves, backend="sdpa")
    with torch.inference_mode():
        assert torch.equal(attention(*leaves, backend="sdpa"), out)
    again = checkpoint(attention, *leaves, backend="sdpa", use_reentrant=False)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    assert all(map(torch.equal, torch.autograd.grad(again.square().sum(), leaves), gradients))


def test_shapes_that_disagree_are_refused():
    q, k, v = torch.zeros(3, 2, 3, 19, 4)
    for change, message in (
        ({"bias": torch.zeros(3, 18)}, r"shape of bias does not fit: .* bias \[3, 18\]"),
        ({"weight": torch.zeros(2, 19)}, r"shape of weight does not fit: .* weight \[2, 19\]"),
        ({"window": 0}, "window: 0 must be at least 1"),
        (
            {"segments": torch.zeros(2, 18)},
            r"shape of segments does not fit: .* segments \[2, 18\]",
        ),
        (
            {"q": torch.zeros(2, 3, 20, 4)},
            r"shape of q, k and v does not fit: q \[2, 3, 20, 4\], k",
        ),
        ({"score_bias": (None, torch.zeros(2, 1, 20))}, r"shape of score_bias does not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            attention(**{"q": q, "k": k, "v": v, **change})
