"""A run whose processes wait for one that hangs ends, and names it.

Every process writes its step to the store through which torch.distributed met, from a thread: no
step waits for it, and no launcher is needed.
"""

import os
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Self

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron.parallel.grid import Grid, give_up

BEAT = 5.0  # seconds between two exchanges
SUSPENDED = 20.0  # seconds that a pause took too long: this process itself was stopped
ALL_ANSWER = 3  # times `seconds`: how long a step, a checkpoint or a validation may take then
HEAD_START = 5.0  # seconds in which the first process that answers may speak for all


class Watchdog:
    """Inside this block a rank may be silent for `seconds`; 0: it may for ever.

    A step, a checkpoint or a validation may take ALL_ANSWER times as long: disks may be slow.
    """

    def __init__(self, grid: Grid, seconds: float) -> None:
        self.grid = grid
        self.seconds = seconds if grid.ranks > 1 else 0.0
        self.step, self.moved_at = 0, time.monotonic()
        self.ended = threading.Event()

    def __enter__(self) -> Self:
        if self.seconds:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()

    def advance(self, step: int) -> None:
        """A step has ended."""
        self.step, self.moved_at = step, time.monotonic()

    def _watch(self) -> None:
        """Exchange steps with the other ranks, again and again, and look at the clock."""
        rank, ranks = self.grid.rank, range(self.grid.ranks)
        keys = [f"megatron/step_of_rank_{one}" for one in ranks]
        beat = min(BEAT, self.seconds / 5)
        answers = [b""] * self.grid.ranks  # step and time of each rank
        now = before = time.monotonic()
        heard_at = [now for _ in ranks]
        store = None
        while not self.ended.wait(beat):
            now = time.monotonic()
            if now - before > beat + SUSPENDED:
                self.moved_at = now
                heard_at = [now for _ in ranks]
            try:
                store = store or TCPStore(
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
            limit = max(self.seconds / 2, 2 * beat)
            silent = [one for one in ranks if now - heard_at[one] > limit]
            if rank in silent:  # it hears not even itself: the store of the first is silent
                silent = [0]
            patience = self.seconds if silent else ALL_ANSWER * self.seconds
            if now - self.moved_at >= patience:
                if rank != min(set(ranks) - set(silent)):
                    time.sleep(HEAD_START)
                give_up(_message(answers, silent, patience))


def _message(answers: Sequence[bytes], silent: Sequence[int], waited: float) -> str:
    where = []
    for rank, answer in enumerate(answers):
        what = "does not answer and was" if rank in silent else "is"
        where.append(f"rank {rank} {what} at step {answer.decode().split(' ')[0] or 0}")
    return (
        f"hang_timeout: no step has ended for {waited:g} seconds: {'; '.join(where)} -"
        " the checkpoints are whole: look at that process or its machine and start again;"
        " hang_timeout: 0 waits for ever"
    )
