"""A run whose processes wait for one that hangs ends, and says which one and where the others are.

Every process writes its step to the store through which torch.distributed met, from a thread: no
step waits for it, and no launcher is needed.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch.distributed

from megatron.parallel.grid import Grid, give_up

BEAT = 5.0  # seconds between two exchanges
SUSPENDED = 20.0  # seconds that a pause took too long: this process itself was stopped
SLOW_PART = 3  # times `seconds`: how long all ranks may save or validate
HEAD_START = 5.0  # seconds in which the first process that answers may speak for all
PACKAGE = Path(__file__).resolve().parents[1]


class Watchdog:
    """Inside this block a run of several processes may not stand still for `seconds`; 0: it may.

    Saving or validating may take SLOW_PART times as long while every process answers: disks may be
    slow.
    """

    def __init__(self, grid: Grid, seconds: float) -> None:
        self.grid = grid
        self.seconds = seconds if grid.ranks > 1 else 0.0
        self.beat = min(BEAT, self.seconds / 5)
        self.step = 0
        self.slow_part = False
        self.moved_at = self.exchanged_at = 0.0
        self.last: list[dict[str, Any]] = [{"step": 0, "place": ""} for _ in range(grid.ranks)]
        self.heard_at = [0.0] * grid.ranks
        self.ended = threading.Event()

    def __enter__(self) -> Self:
        if self.seconds:
            self.ended.clear()
            self.moved_at = self.exchanged_at = time.monotonic()
            self.main_thread = threading.get_ident()
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
        keys = [f"megatron/step_of_rank_{rank}" for rank in range(self.grid.ranks)]
        store = None
        while True:
            begin = time.monotonic()
            if self.ended.wait(self.beat):
                return
            now = time.monotonic()
            if now - begin > self.beat + SUSPENDED:
                self.moved_at = self.exchanged_at = now
            try:
                store = store or torch.distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                    os.environ["MASTER_ADDR"],
                    int(os.environ["MASTER_PORT"]),
                    is_master=False,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=max(1.0, self.seconds / 4)),
                )
                own = {"time": now, "step": self.step, "place": self._place()}
                store.set(keys[self.grid.rank], json.dumps(own))
                for rank, text in enumerate(store.multi_get(keys)):
                    record = json.loads(text)
                    if record != self.last[rank]:
                        self.last[rank], self.heard_at[rank] = record, time.monotonic()
                self.exchanged_at = time.monotonic()
            except RuntimeError:  # a lost connection, or the first rank has ended
                store = None
            now = time.monotonic()
            silent = self._silent(now)
            patience = self.seconds * (SLOW_PART if self.slow_part and not silent else 1)
            if now - self.moved_at >= patience:
                answering = [rank for rank in range(self.grid.ranks) if rank not in silent]
                if self.grid.rank != answering[0]:
                    time.sleep(HEAD_START)
                give_up(self._message(silent, patience))

    def _silent(self, now: float) -> list[int]:
        """The ranks that do not answer; the first alone if its store does not answer."""
        limit = max(self.seconds / 2, 2 * self.beat)
        if now - self.exchanged_at > limit:
            return [0]
        return [rank for rank, heard_at in enumerate(self.heard_at) if now - heard_at > limit]

    def _message(self, silent: list[int], waited: float) -> str:
        where = []
        for rank, last in enumerate(self.last):
            if rank in silent:
                where.append(f"rank {rank} does not answer (its last known step is {last['step']})")
            elif last["place"]:
                where.append(f"rank {rank} is at step {last['step']} in {last['place']}")
        return (
            f"hang_timeout: no step has ended for {waited:g} seconds: {'; '.join(where)} -"
            " the checkpoints are whole: look at that process or its machine and start again;"
            " hang_timeout: 0 waits for ever"
        )

    def _place(self) -> str:
        """Where the main thread is in this package: `training/trainer.py:86 (train_step)`."""
        frame = sys._current_frames().get(self.main_thread)
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                name = path.relative_to(PACKAGE)
                return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return ""
