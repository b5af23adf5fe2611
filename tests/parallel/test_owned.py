"""A fault of one rank ends all ranks with one message; none waits for another.

The ranks are threads of this process, which meet where processes would.
"""

import errno
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Barrier, get_ident

from megatron.config import load
from megatron.errors import UserError
from megatron.parallel.grid import Grid
from megatron.parallel.owned import owned_by_first, shared_faults
from megatron.training import fits
from megatron.training.loop import train
from tests.training.conftest import tiny

PATIENCE = 5  # seconds; a rank that is left alone raises BrokenBarrierError then


@dataclass(frozen=True)
class Thread(Grid):
    ranks: int = 2
    barrier: Barrier = field(default_factory=lambda: Barrier(2, timeout=PATIENCE))
    values: dict = field(default_factory=dict)

    def gather(self, value):
        self.values[self.rank] = value
        self.barrier.wait()
        return [self.values[rank] for rank in range(self.ranks)]


def messages(act):
    """What `act(grid)` raises on each of two ranks; None where it raises nothing."""
    barrier, values = Barrier(2, timeout=PATIENCE), {}
    grids = [Thread(rank, barrier=barrier, values=values) for rank in range(2)]

    def one(grid):
        try:
            act(grid)
        except UserError as fault:
            return str(fault)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, grids))


def test_the_first_ranks_fault_of_a_disk_ends_all_before_the_block():
    left = []

    @contextmanager
    def owned():
        yield
        left.append("no")

    @contextmanager
    def full():
        raise OSError(errno.ENOSPC, "No space left on device", "runs/a")
        yield

    @contextmanager
    def before():
        try:
            yield
        finally:
            left.append("given back")

    def act(grid):
        with owned_by_first(grid, before(), full(), owned()):
            left.append("never")

    message = (
        "runs/a: cannot be written (No space left on device) - free some space, or choose another"
        " disk"
    )
    assert messages(act) == [message, message]
    assert left == ["given back"]


def test_the_message_of_the_first_rank_with_a_fault_is_everybodys():
    def act(grid):
        with shared_faults(grid):
            if grid.rank == 1:
                raise UserError("memory: too small - take more")

    assert messages(act) == ["memory: too small - take more"] * 2


def test_a_machine_that_is_too_small_ends_the_ranks_of_all_machines(corpus, monkeypatch):
    small = []
    monkeypatch.setattr(
        fits, "device_memory", lambda device: 1000 if get_ident() in small else 10**11
    )
    config = load([], tiny(f"data_path={corpus}", "train_iters=1"))

    def act(grid):
        if grid.rank == 1:
            small.append(get_ident())
        train(config, grid)

    first, second = messages(act)
    assert first == second
    assert str(first).startswith("num_layers = 2, ")
