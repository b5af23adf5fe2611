"""Who a process is, as launchers and schedulers say it, and what all ranks learn from one."""

import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Barrier, Timer

import psutil
import pytest
import torch

from megatron.errors import UserError
from megatron.parallel import grid
from megatron.parallel.grid import OPEN_MPI, SLURM, Grid, connect, free_port, here, learn_place
from tests.support import ROOT, unlaunched
from tests.training.conftest import tiny

PLACE = {
    "WORLD_SIZE": "2",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """A copy of the environment without a launcher; nobody is waited for long."""
    schedulers = (*SLURM, *OPEN_MPI, "SLURM_STEP_ID", "SLURM_NTASKS")
    clean = {name: value for name, value in unlaunched().items() if name not in schedulers}
    monkeypatch.setattr(os, "environ", clean)
    monkeypatch.setattr(grid, "MEETING", 0.5)
    return clean


def fault_of(act) -> str:
    with pytest.raises(UserError) as fault:
        act()
    return str(fault.value)


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
SCRIPT = {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
BY_MPI = dict(zip(OPEN_MPI, ("3", "8", "1"), strict=True))
MEETING = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
ELASTIC = PLACE | MEETING | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
THIRD_OF_EIGHT = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("variables", "below_mpirun", "place"),
    [
        ({}, False, {}),
        (STEP | {"SLURM_STEP_NUM_TASKS": "8"}, False, THIRD_OF_EIGHT),
        (STEP | {"SLURM_NTASKS": "8", "WORLD_SIZE": "16"} | MEETING, False, THIRD_OF_EIGHT),
        (SCRIPT, False, {}),
        (SCRIPT | MEETING, False, {}),
        # A shell of salloc is a step of one process in a job of several.
        (SCRIPT | {"SLURM_STEP_ID": "9", "SLURM_STEP_NUM_TASKS": "1"} | MEETING, False, {}),
        (BY_MPI, True, THIRD_OF_EIGHT),
        (BY_MPI | MEETING, False, {}),
        ({"WORLD_SIZE": "8"} | MEETING, False, {}),
        ({"RANK": "0", "WORLD_SIZE": "8"}, False, {}),
        (ELASTIC, False, {}),
        (PLACE, False, {name: PLACE[name] for name in grid.PLACE}),
    ],
)
def test_a_process_that_no_launcher_started_is_alone(
    variables, below_mpirun, place, environment, monkeypatch
):
    # An earlier test of this process may have left its group open.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(grid, "MPIRUN", {psutil.Process().parent().name()} if below_mpirun else {})
    environment |= variables
    for _ in range(2):
        learn_place()
        assert {name: environment[name] for name in grid.PLACE if name in environment} == place
    if not place:
        assert here().ranks == 1


WRONG = {
    "WORLD_SIZE=abc": "WORLD_SIZE: 'abc' is not a whole number of at least 1 - launchers",
    "RANK=-1": "RANK: '-1' is not a whole number of at least 0 - launchers set it",
    "RANK=": "RANK: '' is not a whole number of at least 0 - launchers set it",
    "RANK=2": "RANK: 2 is not below WORLD_SIZE = 2 - ranks begin at 0",
    "MASTER_ADDR=": "MASTER_ADDR: it and MASTER_PORT, a number below 65536, must name the place",
    "MASTER_PORT=70000": "MASTER_ADDR: it and MASTER_PORT, a number below 65536, must name the",
}


def test_a_wrong_environment_is_one_message(environment):
    for setting, message in WRONG.items():
        name, value = setting.split("=")
        environment |= PLACE | {name: value}
        assert fault_of(connect).startswith(message)


def test_a_meeting_place_that_cannot_be_used_is_named(environment):
    port = free_port()
    environment |= PLACE | {"MASTER_PORT": str(port)}
    start = f"MASTER_ADDR: the processes cannot meet at 127.0.0.1:{port} ("
    assert fault_of(lambda: grid._meet(1, 2)).startswith(start)  # nobody is there
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        message = fault_of(lambda: grid._meet(0, 2))
    assert message.startswith(f"{start}Address already in use")
    assert message.endswith(" - start rank 0 there, with a port that no other program uses")


def test_an_interface_that_does_not_exist_is_named(forks, corpus, tmp_path):
    words = tiny(f"data_path={corpus}", "train_iters=1", f"save={tmp_path / 'run'}")
    done = forks.run(ROOT / "train.py", *words, env={"GLOO_SOCKET_IFNAME": "missing"}, cwd=tmp_path)
    message = "ranks: this process cannot open connections to the others ("
    assert (done.returncode, done.stderr[: len(message)]) == (1, message)
    assert "Unable to find address for: missing) - see whether another has ended" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_first_process_says_who_is_missing_and_the_others_end_with_it(environment):
    port = free_port()
    environment |= PLACE | {"MASTER_PORT": str(port)}
    assert fault_of(lambda: grid._meet(0, 3)) == (
        f"ranks: 1, 2 of 3 have not come to 127.0.0.1:{port} within 0.5 seconds - start all of them"
        " with this address and port, or let WORLD_SIZE be the number that you start"
    )
    place = grid.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    environment["MASTER_PORT"] = str(place.port)
    ended = Timer(0.2, lambda: places.clear())
    places = [place]
    del place
    ended.start()
    message = fault_of(lambda: grid._meet(1, 2))
    assert message.startswith("ranks: rank 0 has ended, or cannot use the port ")


def test_a_rank_that_ends_or_is_silent_is_one_message(monkeypatch):
    monkeypatch.setattr(grid, "HEAD_START", 0)
    monkeypatch.setattr(grid.torch.distributed, "is_initialized", lambda: True)
    for words in ("Connection closed by peer", "Timed out waiting 1800000ms for recv"):
        with pytest.raises(UserError, match=r"does not answer, .* start"), grid.left_at_the_end():
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
