"""Our Triton programs agree with the definition in float64: interpreted on CPU, compiled on GPU."""

import json

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.attention import triton_passes
from megatron.attention.eager import eager
from megatron.attention.triton_kernel import refusal, triton_attention
from tests.support import run

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NARROW = {"window": None, "chunk": None, "segments": None, "index_bias": None}
PRECISION = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Largest error relative to the norm, at least 1; the interpreter does not know bfloat16."""


def inputs(
    batch,
    heads,
    queries,
    keys,
    head_dim,
    *,
    bias=True,
    weight=False,
    dtype=torch.float32,
    documents=0,
):
    """q, k, v, both tables, and segments that come back after others."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(batch, heads, n, head_dim, generator=draw) for n in (queries, keys, keys)
    )
    tables = [
        torch.randn(heads, keys + 3, generator=draw) if given else None for given in (bias, weight)
    ]
    segments = (
        torch.randint(documents, (batch, keys), generator=draw).sort(dim=1).values
        if documents
        else None
    )
    if documents > 2:
        segments[segments == documents - 1] = 0
    floats = [x.to(DEVICE, dtype) for x in (q, k, v)] + [
        None if x is None else x.to(DEVICE) for x in tables
    ]
    return floats, None if segments is None else segments.to(DEVICE)


def values_and_gradients(function, tensors, *, double=False, **more):
    """The output and the gradients of all tensors that are not None, from a dout that varies."""
    leaves = [None if x is None else x.detach().clone() for x in tensors]
    leaves = [x if x is None else (x.double() if double else x).requires_grad_() for x in leaves]
    out = function(*leaves[:4], weight=leaves[4], **{**NARROW, **more})
    numbers = torch.linspace(-1, 1, out.numel(), device=out.device).sin()
    dout = numbers.view_as(out).to(tensors[0].dtype).to(out.dtype)
    present = [x for x in leaves if x is not None]
    return [out, *torch.autograd.grad(out, present, dout)]


def assert_like_the_definition(tensors, **more):
    ours = values_and_gradients(triton_attention, tensors, **more)
    exact = values_and_gradients(eager, tensors, double=True, **more)
    assert ours[0].dtype == tensors[0].dtype
    for value, expected in zip(ours, exact, strict=True):
        error = (value.double() - expected).norm() / expected.norm().clamp(min=1)
        assert error < PRECISION[tensors[0].dtype]


CASES = [
    ((2, 1, 130, 130, 40), {"weight": True}),
    ((1, 1, 150, 150, 16), {"bias": False, "window": 2}),
    ((2, 1, 90, 230, 24), {"weight": True, "window": 150, "chunk": 60, "documents": 4}),
    ((2, 2, 1, 130, 64), {"weight": True}),
    ((2, 2, 1, 1, 16), {}),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_token_and_other_cases_are_those_of_the_definition(dtype):
    for shape, options in CASES if dtype == torch.float32 else CASES[:1]:
        more = {name: options[name] for name in ("window", "chunk") if name in options}
        drawn = {name: value for name, value in options.items() if name not in more}
        tensors, segments = inputs(*shape, **drawn, dtype=dtype)
        assert_like_the_definition(tensors, segments=segments, **more)


def test_two_runs_give_the_same_bits():
    tensors, _ = inputs(2, 1, 100, 100, 16, weight=True)  # several tiles of queries, keys and batch
    first, second = (values_and_gradients(triton_attention, tensors) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_views_are_read_in_place_and_broadcast_gradients_too():
    (q, k, v, bias, _), _ = inputs(2, 2, 70, 70, 16)
    # As a model's projection: heads and length swapped.
    fused = torch.stack([q, k, v], dim=3).permute(0, 2, 1, 4, 3)
    views = torch.stack([q, k, v]).transpose(2, 3).contiguous().transpose(2, 3).unbind(0)
    expected = triton_attention(q, k, v, bias, weight=None, **NARROW)
    for given in (views, fused.transpose(1, 2).unbind(-1)):
        assert not any(x.is_contiguous() for x in given)
        leaves = [x.detach().requires_grad_() for x in given]
        out = triton_attention(*leaves, bias, weight=None, **NARROW)
        assert torch.equal(out, expected)
        # The gradient of a sum is one number with strides of zero.
        gradients = torch.autograd.grad(out.sum(), leaves)
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_frozen_tables_checkpoints_and_inference_work():
    (q, k, v, bias, _), _ = inputs(1, 2, 70, 70, 16)
    q.requires_grad_()

    def attend(q):
        return triton_attention(q, k, v, bias, weight=None, **NARROW)

    (plain,) = torch.autograd.grad(attend(q).square().sum(), q)
    (recomputed,) = torch.autograd.grad(
        checkpoint(attend, q, use_reentrant=False).square().sum(), q
    )
    assert torch.equal(plain, recomputed)
    with torch.inference_mode():
        assert torch.equal(attend(q.detach()), attend(q).detach())


def test_what_it_cannot_compute_is_refused_with_the_reason():
    for shape, dtype, reason in (
        ((1, 1, 4, 16), torch.float64, "it knows float16, bfloat16 and float32, not float64"),
        ((1, 1, 4, 136), torch.float32, "head_dim 136 is more than 128"),
        ((65536, 1, 4, 16), torch.float32, "batch 65536 times heads 1 is more than 65535"),
    ):
        q = torch.zeros(shape, dtype=dtype, device=DEVICE)
        assert refusal(q) == reason
        with pytest.raises(ValueError, match=f"triton cannot compute this: {reason}"):
            triton_attention(q, q, q, None, weight=None, **NARROW)
    q = torch.zeros(1, 1, 4, 16, device="meta")
    assert refusal(q) == "it runs on CUDA devices, not on meta"


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is for CPUs")
def test_cpus_are_refused_without_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert refusal(torch.zeros(1, 1, 4, 16)) == "it runs on CUDA devices, not on cpu"


def test_tiles_fit_the_padding_of_tables_and_those_whose_diagonals_are_summed_are_square():
    from megatron.attention.triton_programs import PAD

    for (_, program, _, _), by_need in triton_passes.all_tiles().items():
        for tiles in by_need:
            assert 2 * (tiles.queries + tiles.keys) <= PAD
            assert tiles.queries == tiles.keys or program != "query_and_table_gradients"


def test_tables_that_are_summed_in_pieces_get_the_same_gradients(monkeypatch):
    tensors, _ = inputs(3, 2, 100, 100, 16, weight=True)
    whole = values_and_gradients(triton_attention, tensors)
    monkeypatch.setattr(triton_passes, "MOST_SUMS", 1)  # one pair of batch and head at a time
    pieces = values_and_gradients(triton_attention, tensors)
    assert all(torch.equal(one, other) for one, other in zip(whole, pieces, strict=True))


def test_programs_compile_for_gpus_and_fit_their_memory_and_registers(tmp_path):
    env = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "."}
    done = run("tests/attention/compiled_programs.py", env=env)
    assert done.returncode == 0, done.stderr
    builds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(builds) == 8
    for built in builds:
        most = {80: 163, 90: 227}[built["arch"]]  # KiB
        assert built["shared"] <= most * 1024, built
        assert built["spilled"] == 0, built


@pytest.mark.gpu  # what is trained most comes first
@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 32, 80])
def test_gpus_give_the_definition_at_the_lengths_of_training(length, head_dim, dtype):
    for more in ({}, {"weight": True}, {"window": 300}, {"chunk": 200}, {"documents": 5}):
        drawn = {name: value for name, value in more.items() if name not in ("window", "chunk")}
        tensors, segments = inputs(2, 4, length, length, head_dim, **drawn, dtype=dtype)
        narrow = {name: value for name, value in more.items() if name in ("window", "chunk")}
        assert_like_the_definition(tensors, segments=segments, **narrow)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(PRECISION))
def test_gpus_give_the_definition_at_8192_and_the_same_bits_twice(dtype):
    tensors, _ = inputs(1, 2, 8192, 8192, 64, weight=True, dtype=dtype)
    assert_like_the_definition(tensors)
    first, second = (values_and_gradients(triton_attention, tensors) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
