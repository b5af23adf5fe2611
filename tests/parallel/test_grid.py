"""Who a process is, as launchers and schedulers say it, and what all ranks learn from one."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Barrier

import pytest
import torch

from megatron.errors import UserError
from megatron.parallel import grid, threads
from megatron.parallel.grid import Grid, here, learn_place, set_matmul_precision
from tests.support import ROOT, unlaunched
from tests.training.conftest import tiny


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """A copy of the environment without a launcher."""
    schedulers = ("SLURM", "OMPI")
    clean = {name: value for name, value in unlaunched().items() if name[:5] not in schedulers}
    monkeypatch.setattr(os, "environ", clean)
    return clean


def fault_of(act) -> str:
    with pytest.raises(UserError) as fault:
        act()
    return str(fault.value)


BATCH = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "MASTER_ADDR": "node1"}
STEP = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}
OPEN_MPI = {"RANK": "3", "SIZE": "7", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}


def test_only_a_gpus_float32_model_is_multiplied_less_exactly():
    """torch's medium would be bf16 on the CPU, and a bf16 model's tables are float32."""
    cases = {("fp32", "cuda"): "medium", ("fp32", "cpu"): "highest", ("bf16", "cuda"): "highest"}
    try:
        for (dtype, device), expected in cases.items():
            set_matmul_precision("medium", dtype, torch.device(device))
            assert torch.get_float32_matmul_precision() == expected
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        (BATCH, None),  # the script of sbatch, before srun
        (BATCH | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # a shell of salloc
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "node1"}, None),  # what a script exports for torchrun
        (BATCH | STEP | {"SLURM_STEP_NUM_TASKS": "7", "WORLD_SIZE": "16"}, ("3", "7", "1", "2")),
        ({f"OMPI_COMM_WORLD_{name}": OPEN_MPI[name] for name in OPEN_MPI}, ("3", "7", "1", "2")),
    ],
)
def test_a_process_learns_its_place_from_srun_and_mpirun(variables, place, environment):
    environment |= variables
    for _ in range(2):
        learn_place()
    if place is None:
        assert (here().ranks, threads.local_processes()) == (1, 1)
    else:
        assert tuple(environment[name] for name in grid.PLACE) == place
        assert (grid.process_count(), threads.local_processes()) == (7, 2)


CANNOT_MEET = {
    "Unable to find address for: missing": {"GLOO_SOCKET_IFNAME": "missing"},
    "MASTER_ADDR expected": {"RANK": "0", "WORLD_SIZE": "2"},
}


@pytest.mark.parametrize("reason", CANNOT_MEET)
def test_processes_that_cannot_meet_are_one_message(forks, corpus, tmp_path, reason):
    words = tiny(f"data_path={corpus}", "train_iters=1", f"save={tmp_path / 'run'}")
    done = forks.run(ROOT / "train.py", *words, env=CANNOT_MEET[reason], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("ranks: rank 0 of ")
    assert reason in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_ends_or_is_silent_is_one_message(monkeypatch):
    monkeypatch.setattr(grid, "HEAD_START", 0)
    monkeypatch.setattr(grid.torch.distributed, "is_initialized", lambda: True)
    for words in ("Connection closed by peer", "Timed out waiting 1800000ms for recv"):
        with pytest.raises(UserError, match=r"does not answer; .* start"), grid.left_at_the_end():
            raise RuntimeError(words)


@dataclass(frozen=True)
class Thread(Grid):
    """A rank that is a thread; one that is left alone raises BrokenBarrierError."""

    ranks: int = 2
    barrier: Barrier = field(default_factory=lambda: Barrier(2, timeout=5))
    values: dict = field(default_factory=dict)

    def gather(self, value):
        self.values[self.rank] = value
        self.barrier.wait()
        return [self.values[rank] for rank in range(self.ranks)]


def messages(act) -> list[str]:
    """What `act(grid)` raises on each of two ranks."""
    first = Thread(0)
    second = Thread(1, barrier=first.barrier, values=first.values)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: fault_of(lambda: act(rank)), (first, second)))


def test_a_fault_of_one_rank_ends_all_with_its_message():
    left = []

    @contextmanager
    def full():
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a")
        yield

    @contextmanager
    def before():
        yield
        left.append("given back")

    def own(grid):
        with grid_owned(grid, before(), full()):
            left.append("never")

    def check(grid):
        with shared(grid):
            if grid.rank == 1:
                raise UserError("memory: too small - take more")

    grid_owned, shared = grid.owned_by_first, grid.shared_faults
    message = (
        "runs/a: cannot be written (No space left on device) - free some space, or choose another"
        " disk"
    )
    assert messages(own) == [message, message]
    assert "never" not in left
    assert messages(check) == ["memory: too small - take more"] * 2
