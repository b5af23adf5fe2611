"""Who a process is, as launchers and schedulers say it, and what all ranks learn from one."""

import errno
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Barrier, Timer

import pytest

from megatron.errors import UserError
from megatron.parallel import grid
from megatron.parallel.grid import SCHEDULERS, Grid, connect, free_port
from tests.support import unlaunched

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
    schedulers = [name for names in SCHEDULERS for name in names]
    kept = {name: value for name, value in unlaunched().items() if name not in schedulers}
    monkeypatch.setattr(os, "environ", kept)
    monkeypatch.setattr(grid, "MEETING", 0.5)
    return kept


def fault_of(act) -> str:
    with pytest.raises(UserError) as fault:
        act()
    return str(fault.value)


def test_a_process_of_a_scheduler_knows_its_place(environment):
    assert grid._environment_of_scheduler() == {}
    for names in SCHEDULERS:
        environment |= dict(zip(names, ("3", "8", "1"), strict=True))
        message = f"{names[1]}: 8 processes were started, but no MASTER_ADDR and MASTER_PORT"
        assert fault_of(grid._environment_of_scheduler).startswith(message)
        meeting = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
        environment |= meeting
        place = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
        assert grid._environment_of_scheduler() == place
        environment[names[1]] = "1"
        assert grid._environment_of_scheduler() == {}
        for name in meeting:
            del environment[name]


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
        return list(pool.map(lambda one: fault_of(lambda: act(one)), (first, second)))


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
