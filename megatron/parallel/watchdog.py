"""A run whose processes wait for one that hangs ends, and says which one and where the others are.

Every process writes its step to the store through which torch.distributed met, from a thread: no
step waits for it, and no launcher is needed.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Self

import torch.distributed

from megatron.parallel.grid import Grid, give_up

logger = logging.getLogger(__name__)

BEAT = 5.0  # seconds between two exchanges
LOOK = 1.0  # seconds between two looks at the clock
SUSPENDED = 20.0  # seconds without a look: this process itself was stopped
SLOW_PART = 3  # times `seconds`: how long all ranks may save or validate
HEAD_START = 5.0  # seconds in which the first process that answers may speak for all
PACKAGE = Path(__file__).resolve().parents[1]


@dataclass
class Seen:
    """What a rank last wrote: its step and the place in the code; and when that was new here."""

    text: str = ""
    step: int = 0
    place: str = ""
    at: float = 0.0


class Watchdog:
    """Inside this block a run of several processes may not stand still for `seconds`; 0: it may.

    Saving or validating may take SLOW_PART times as long while every process answers: disks may be
    slow.
    """

    def __init__(self, grid: Grid, seconds: float) -> None:
        self.grid = grid
        self.seconds = seconds if grid.ranks > 1 else 0.0
        self.beat = min(BEAT, self.seconds / 5)
        self.step = self.beats = 0
        self.slow_part = False
        self.moved_at = self.exchanged_at = 0.0
        self.seen = [Seen() for _ in range(grid.ranks)]
        self.ended = threading.Event()

    def __enter__(self) -> Self:
        if self.seconds:
            self.ended.clear()
            self.moved_at = self.exchanged_at = time.monotonic()
            self.main_thread = threading.get_ident()
            for work in (self._exchange, self._look):
                threading.Thread(target=work, daemon=True).start()
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

    def _exchange(self) -> None:
        """Write this rank's step and read those of the others, again and again."""
        while not self.ended.is_set():
            try:
                self._exchange_until_the_end()
            except RuntimeError as fault:  # a lost connection, or the first rank has ended
                logger.debug("watchdog: %s", fault)
                self.ended.wait(self.beat)

    def _exchange_until_the_end(self) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        patience = timedelta(seconds=max(1.0, self.seconds))
        keys = [f"megatron/step_of_rank_{rank}" for rank in range(self.grid.ranks)]
        store = torch.distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host, port, is_master=False, wait_for_workers=False, timeout=patience
        )
        while not self.ended.wait(self.beat):
            self.beats += 1
            own = {"beat": self.beats, "step": self.step, "place": self._place()}
            store.set(keys[self.grid.rank], json.dumps(own))
            texts = store.multi_get(keys)
            self.exchanged_at = time.monotonic()
            for seen, text in zip(self.seen, texts, strict=True):
                _note(seen, text.decode(), self.exchanged_at)

    def _look(self) -> None:
        looked_at = time.monotonic()
        while not self.ended.wait(min(LOOK, self.beat)):
            now = time.monotonic()
            if now - looked_at > SUSPENDED:
                self.moved_at = self.exchanged_at = now
            looked_at = now
            if now - self.moved_at < self.seconds:
                continue
            silent = self._silent(now)
            patience = self.seconds * (SLOW_PART if self.slow_part else 1)
            if silent or now - self.moved_at >= patience:
                self._end(silent, self.seconds if silent else patience)

    def _silent(self, now: float) -> list[int]:
        """The ranks that do not answer; the first alone where its store does not answer."""
        limit = max(self.seconds / 2, 2 * self.beat)
        if now - self.exchanged_at > limit:
            return [0]
        return [rank for rank, seen in enumerate(self.seen) if now - seen.at > limit]

    def _end(self, silent: list[int], waited: float) -> None:
        answering = [rank for rank in range(self.grid.ranks) if rank not in silent]
        if self.grid.rank != answering[0]:
            time.sleep(HEAD_START)
        give_up(self._message(silent, waited))

    def _message(self, silent: list[int], waited: float) -> str:
        self.seen[self.grid.rank].step = self.step
        self.seen[self.grid.rank].place = self._place()
        where = []
        for rank, seen in enumerate(self.seen):
            if rank in silent:
                where.append(f"rank {rank} does not answer (its last known step is {seen.step})")
            elif seen.place:
                where.append(f"rank {rank} is at step {seen.step} in {seen.place}")
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


def _note(seen: Seen, text: str, now: float) -> None:
    if text != seen.text:
        record = json.loads(text)
        seen.text, seen.step, seen.place, seen.at = text, record["step"], record["place"], now
