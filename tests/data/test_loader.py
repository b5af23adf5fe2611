import logging

import numpy as np
import pytest
import torch

from megatron.data.loader import batches
from megatron.errors import UserError
from tests.support import run

SAMPLES = [np.arange(5) + 10 * i for i in range(11)]


def numbers(stream):
    """Which samples are in each batch."""
    return [(batch[:, 0] // 10).tolist() for batch in stream]


def test_each_rank_has_its_own_contiguous_share_of_a_step():
    batch = next(batches(SAMPLES, 2))
    assert batch.dtype == torch.int64
    assert batch.tolist() == [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]
    assert numbers(batches(SAMPLES, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # the last whole step
    shares = [numbers(batches(SAMPLES, 2, rank=rank, ranks=2)) for rank in range(2)]
    assert shares == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_resumed_run_sees_the_batches_that_an_uninterrupted_one_sees(rank):
    whole = batches(SAMPLES, 2, rank=rank, ranks=2, repeat=True)
    expected = [next(whole).tolist() for _ in range(9)]
    resumed = batches(SAMPLES, 2, rank=rank, ranks=2, repeat=True, start=5 * 4)
    assert [next(resumed).tolist() for _ in range(4)] == expected[5:]


def test_with_repeat_the_samples_start_over_and_it_is_said_once_per_round(caplog):
    stream = batches(SAMPLES, 4, repeat=True)
    with caplog.at_level(logging.WARNING):
        got = [next(stream) for _ in range(5)]
    assert numbers(got) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 0], [1, 2, 3, 4], [5, 6, 7, 8]]
    assert caplog.messages == ["all 11 samples have been used, starting over"]


@pytest.mark.parametrize("start", [0, 6])
def test_worker_processes_that_read_ahead_give_the_same_batches(start):
    alone, ahead = (
        batches(SAMPLES, 3, num_workers=workers, repeat=True, start=start) for workers in (0, 2)
    )
    assert [next(ahead).tolist() for _ in range(9)] == [next(alone).tolist() for _ in range(9)]


def test_the_random_numbers_of_the_run_are_left_alone():
    before = torch.get_rng_state()
    list(batches(SAMPLES, 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_too_few_samples_for_one_step_are_an_error():
    with pytest.raises(
        UserError,
        match="11 samples are not enough for one step of 4 on each of 3 ranks - prepare more text",
    ):
        batches(SAMPLES, 4, ranks=3)


def test_a_process_ends_although_its_iterator_is_still_held():
    program = """
import numpy
from megatron.data.loader import batches
held = batches([numpy.arange(5)] * 99, 2, num_workers=1)
next(held)
print("done")
"""
    done = run("-c", program, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")
