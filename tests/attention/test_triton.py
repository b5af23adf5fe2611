"""Our Triton programs agree with the definition in float64: interpreted on CPU, compiled on GPU."""

import json

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.attention import attention, triton_passes
from megatron.attention.eager import eager
from megatron.attention.triton_kernel import refusal, triton_attention
from megatron.attention.triton_tiles import TILES
from megatron.errors import UserError
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


CASES = {
    "bias": ((2, 2, 100, 100, 16), {}),
    "weight": ((2, 2, 100, 100, 16), {"bias": False, "weight": True}),
    "both": ((2, 1, 130, 130, 40), {"weight": True}),
    "window": ((1, 2, 150, 150, 16), {"window": 37}),
    "window_alone": ((1, 1, 150, 150, 16), {"bias": False, "window": 2}),
    "chunk": ((1, 2, 150, 150, 16), {"weight": True, "chunk": 33}),
    "documents": ((2, 1, 170, 170, 16), {"documents": 6, "weight": True}),
    "some_queries": ((2, 1, 70, 163, 16), {"weight": True}),
    "some_queries_of_all": (
        (2, 1, 90, 230, 24),
        {"weight": True, "window": 150, "chunk": 60, "documents": 4},
    ),
    "one_query": ((2, 2, 1, 130, 64), {"weight": True}),
    "one_token": ((2, 2, 1, 1, 16), {}),
    "large_heads": ((1, 1, 140, 140, 128), {"weight": True}),
}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *((case, torch.float32) for case in CASES),
        *((case, torch.float16) for case in ("both", "one_query")),
    ],
)
def test_values_and_all_gradients_are_those_of_the_definition(case, dtype):
    shape, options = CASES[case]
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


@pytest.mark.parametrize(("head_dim", "in_place"), [(64, True), (80, True), (40, False)])
def test_rows_begin_where_many_numbers_can_be_loaded_at_once(head_dim, in_place):
    by_length = torch.randn(2, 9, 3, head_dim).transpose(1, 2)
    rows = triton_passes.aligned(by_length)
    assert (rows is by_length) == in_place
    assert torch.equal(rows, by_length)
    assert rows.stride(-1) == 1
    assert all(stride % 16 == 0 for stride in rows.stride()[:-1])
    columns_apart = by_length.transpose(2, 3).contiguous().transpose(2, 3)
    assert triton_passes.aligned(columns_apart).stride(-1) == 1


def test_biases_that_underflowed_to_minus_infinity_leave_gradients_finite():
    tensors, _ = inputs(1, 1, 130, 130, 16)
    tensors[3][:, 40:] = -torch.inf
    out, *gradients = values_and_gradients(triton_attention, tensors)
    cut, *exact = values_and_gradients(triton_attention, tensors, window=40)
    for ours, expected in zip([out, *gradients], [cut, *exact], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def test_tables_in_half_precision_are_not_rounded_once_more():
    (q, k, v, bias, weight), _ = inputs(1, 2, 50, 50, 16, weight=True)
    tables = [x.bfloat16() for x in (bias, weight)]
    half, full = (
        triton_attention(q, k, v, bias, weight=weight, **NARROW)
        for bias, weight in (tables, [x.float() for x in tables])
    )
    assert torch.equal(half, full)


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


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "it knows float16, bfloat16 and float32, not float64"),
        ({"head_dim": 136}, "head_dim 136 is more than 128"),
        ({"batch": 65536}, "batch 65536 times heads 1 is more than 65535"),
        (
            {"index_bias": lambda *_: None},
            "it reads biases from a table by distance, not by indices",
        ),
        ({"device": "meta"}, "it runs on CUDA devices, not on meta"),
    ],
)
def test_what_it_cannot_compute_is_refused_with_the_reason(change, reason):
    options = {
        "batch": 1,
        "head_dim": 16,
        "dtype": torch.float32,
        "device": DEVICE,
        "index_bias": None,
        **change,
    }
    q = torch.zeros(
        options["batch"],
        1,
        4,
        options["head_dim"],
        dtype=options["dtype"],
        device=options["device"],
    )
    assert refusal(q, index_bias=options["index_bias"] is not None) == reason
    with pytest.raises(
        ValueError, match=f"attention_backend: triton cannot compute this: {reason}"
    ):
        triton_attention(
            q, q, q, None, weight=None, **{**NARROW, "index_bias": options["index_bias"]}
        )


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is for CPUs")
def test_cpus_are_refused_without_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert refusal(torch.zeros(1, 1, 4, 16)) == "it runs on CUDA devices, not on cpu"


def all_tiles(program=None):
    for programs in TILES.values():
        for name in programs if program is None else [program]:
            for sizes in programs[name].values():
                yield from sizes


def test_tables_are_padded_by_more_than_any_tile_or_the_one_after_it_reaches_over():
    from megatron.attention.triton_programs import PAD

    assert all(2 * (tiles.queries + tiles.keys) <= PAD for tiles in all_tiles())


def test_tiles_whose_diagonals_are_summed_are_square():
    assert all(tiles.queries == tiles.keys for tiles in all_tiles("query_and_table_gradients"))


def test_tables_that_are_summed_in_pieces_get_the_same_gradients(monkeypatch):
    tensors, _ = inputs(3, 2, 100, 100, 16, weight=True)
    whole = values_and_gradients(triton_attention, tensors)
    monkeypatch.setattr(triton_passes, "MOST_SUMS", 1)  # one pair of batch and head at a time
    pieces = values_and_gradients(triton_attention, tensors)
    assert all(torch.equal(one, other) for one, other in zip(whole, pieces, strict=True))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ATTENTION_TABLE_READS", "direct or pipelined"),
        ("ATTENTION_FLOAT32", "ieee or tf32x3"),
    ],
)
def test_unknown_values_of_the_switches_are_refused(monkeypatch, name, values):
    tensors, _ = inputs(1, 1, 4, 4, 16)
    monkeypatch.setenv(name, "fast")
    with pytest.raises(UserError, match=f"^{name}: 'fast' is unknown - set it to {values}"):
        attention(*tensors[:4], backend="triton")


def test_programs_compile_for_gpus_and_fit_their_memory_and_registers(tmp_path):
    env = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "."}
    done = run("tests/attention/compiled_programs.py", env=env)
    assert done.returncode == 0, done.stderr
    builds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(builds) == 9
    shared = {}
    for built in builds:
        most = {80: 163, 90: 227}[built["arch"]]  # KiB
        assert built["shared"] <= most * 1024, built
        assert built["spilled"] == 0, built
        shared[built["program"], built["arch"]] = built["shared"]
    tile_of_biases = 128 * 64 * 4  # bytes, which direct reads do not need
    assert shared["pipelined", 90] - shared["forward", 90] == tile_of_biases


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


@pytest.mark.gpu
def test_both_ways_of_reading_tables_give_the_definition(monkeypatch):
    tensors, _ = inputs(2, 4, 700, 700, 64, weight=True, dtype=torch.bfloat16)
    for reads in ("direct", "pipelined"):
        monkeypatch.setenv("ATTENTION_TABLE_READS", reads)
        assert_like_the_definition(tensors)


@pytest.mark.gpu
def test_three_tf32_products_are_close_to_float32(monkeypatch):
    monkeypatch.setenv("ATTENTION_FLOAT32", "tf32x3")
    tensors, _ = inputs(1, 2, 700, 700, 64, weight=True)
    assert_like_the_definition(tensors)
