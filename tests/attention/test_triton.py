"""What our Triton programs promise beside values: bits, layouts, refusals, compiled programs.

test_random.py compares their values with the definition.
"""

import json

import pytest
import torch

from megatron.attention import triton_passes
from megatron.attention.terms import Terms
from megatron.attention.triton_kernel import refusal, triton_attention
from tests.attention.random_cases import (
    Case,
    error_of,
    inputs_of,
    largest_error,
    values_and_gradients,
)
from tests.support import run

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRECISION = {torch.bfloat16: 2e-2, torch.float32: 3e-6, torch.float16: 2e-3}
"""Largest error relative to the norm."""


def results(case: Case):
    inputs = inputs_of(case, device=DEVICE)
    return list(values_and_gradients(triton_attention, inputs).values())


def test_two_runs_and_sums_in_pieces_give_the_same_bits(monkeypatch):
    case = Case(queries=70, keys=70, weight=True)  # several tiles of queries and keys
    first = results(case)
    monkeypatch.setattr(triton_passes, "MOST_SUMS", 1)  # one pair of batch and head at a time
    assert all(map(torch.equal, results(case), first))


def test_gradients_of_a_sum_are_read():
    """The gradient of a sum is one number with strides of zero."""
    inputs = inputs_of(Case(batch=1, keys=40, queries=40, lse=False), device=DEVICE)
    inputs.dout = torch.ones((), device=DEVICE).expand(inputs.dout.shape)
    assert largest_error(triton_attention, inputs, learned=False) < PRECISION[torch.float32]


def test_what_it_cannot_compute_is_refused_with_the_reason(monkeypatch):
    for shape, dtype, reason in (
        ((1, 1, 4, 16), torch.float64, "it knows float16, bfloat16 and float32, not float64"),
        ((1, 1, 4, 136), torch.float32, "head_dim 136 is more than 128"),
        ((65536, 1, 4, 16), torch.float32, "batch 65536 times heads 1 is more than 65535"),
    ):
        q = torch.zeros(shape, dtype=dtype, device=DEVICE)
        assert refusal(q, Terms()) == reason
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert refusal(q[:1].cpu(), Terms()) == "it runs on CUDA devices, not on cpu"


def test_tiles_fit_the_padding_of_tables_and_those_whose_diagonals_are_summed_are_square():
    from megatron.attention.triton_programs import PAD

    for (_, program, _, _), by_need in triton_passes.all_tiles().items():
        for tiles in by_need:
            assert 2 * (tiles.queries + tiles.keys) <= PAD
            assert tiles.queries == tiles.keys or program != "query_and_table_gradients"


@pytest.mark.campaign
@pytest.mark.parametrize("arch", [90, 80])
def test_programs_compile_for_gpus_and_fit_their_memory(tmp_path, arch):
    env = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "."}
    done = run("tests/attention/compiled_programs.py", arch, env=env)
    assert done.returncode == 0, done.stderr
    builds = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(builds) == 4
    for built in builds:
        most = {80: 163, 90: 227}[arch]  # KiB
        assert built["shared"] <= most * 1024, built


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", PRECISION, ids=str)
def test_gpus_give_the_definition_at_8192_and_the_same_bits_twice(dtype):
    case = Case(batch=1, heads=2, queries=8192, keys=8192, head_dim=64, weight=True)
    assert error_of(case, triton_attention, dtype, "cuda") < PRECISION[dtype]
    assert all(map(torch.equal, results(case), results(case)))
