"""A run whose processes wait for one that hangs ends, and names it.

Every process writes its step to the store through which torch.distributed met, from a thread: no
step waits for it, and no launcher is needed.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

import torch.distributed

from megatron.parallel.grid import Grid, give_up

BEAT = 5.0  # seconds between two exchanges
SUSPENDED = 20.0  # seconds that a pause took too long: this process itself was stopped
SLOW_PART = 3  # times `seconds`: how long all ranks may save or validate
HEAD_START = 5.0  # seconds in which the first process that answers may speak for all


class Watchdog:
    """Inside this block a run of several processes may not stand still for `seconds`; 0: it may.

    Saving or validating may take SLOW_PART times as long while every process answers: disks may be
    slow.
    """

    def __init__(self, grid: Grid, seconds: float) -> None:
        self.grid = grid
        self.seconds = seconds if grid.ranks > 1 else 0.0
        self.beat = min(BEAT, self.seconds / 5)
        self.step, self.moved_at = 0, time.monotonic()
        self.slow_part = False
        self.ended = threading.Event()

    def __enter__(self) -> Self:
        if self.seconds:
            self.moved_at = time.monotonic()
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()

    def advance(self, step: int) -> None:
        """A step has ended."""
        self.step, self.moved_at = step, time.monotonic()

    @contextmanager
    def slow(self) -> Iterator[None]:
        """A part without steps: a checkpoint or a validation."""
        self.slow_part, self.moved_at = True, time.monotonic()
        yield
        self.slow_part, self.moved_at = False, time.monotonic()

    def _watch(self) -> None:
        """Exchange steps with the other ranks, again and again, and look at the clock."""
        rank, ranks = self.grid.rank, self.grid.ranks
        keys = [f"megatron/step_of_rank_{one}" for one in range(ranks)]
        answers = [b""] * ranks  # step and time of each rank
        heard_at = [time.monotonic()] * ranks
        store = None
        before = time.monotonic()
        while not self.ended.wait(self.beat):
            now = time.monotonic()
            if now - before > self.beat + SUSPENDED:
                self.moved_at = now
                heard_at = [now] * ranks
            try:
                store = store or torch.distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                    os.environ["MASTER_ADDR"],
                    int(os.environ["MASTER_PORT"]),
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=max(1.0, self.seconds / 4)),
                )
                store.set(keys[rank], f"{self.step} {now}")
                for one, answer in enumerate(store.multi_get(keys)):
                    if answer != answers[one]:
                        answers[one], heard_at[one] = answer, time.monotonic()
            except RuntimeError:  # a lost connection, or the first rank has ended
                store = None
            before = now = time.monotonic()
            limit = max(self.seconds / 2, 2 * self.beat)
            silent = [one for one in range(ranks) if now - heard_at[one] > limit]
            if rank in silent:  # it hears not even itself: the store of the first is silent
                silent = [0]
            patience = self.seconds
            if self.slow_part and not silent:
                patience *= SLOW_PART
            if now - self.moved_at >= patience:
                first_answering = min(set(range(ranks)) - set(silent))
                if rank != first_answering:
                    time.sleep(HEAD_START)
                give_up(_message(answers, silent, patience))


def _message(answers: Sequence[bytes], silent: Sequence[int], waited: float) -> str:
    where = []
    for rank, answer in enumerate(answers):
        step = answer.decode().split(" ")[0] or "0"
        if rank in silent:
            where.append(f"rank {rank} does not answer (its last known step is {step})")
        else:
            where.append(f"rank {rank} is at step {step}")
    return (
        f"hang_timeout: no step has ended for {waited:g} seconds: {'; '.join(where)} -"
        " the checkpoints are whole: look at that process or its machine and start again;"
        " hang_timeout: 0 waits for ever"
    )
