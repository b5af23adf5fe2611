"""What ends a run before its last step: signals, a set duration, and the end of a Slurm job."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

import psutil

from megatron.parallel.grid import Grid

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
APART = 2.0  # seconds between two exchanges with the other ranks
MOST = 100  # ticks between two exchanges, in case later ones take longer
ONE_SIGNAL = 1.0  # seconds in which a terminal and a launcher may both deliver one ctrl-C
RESERVE = 5.0  # seconds that a stop takes besides steps and saving
SLURM_END = "SLURM_JOB_END_TIME"  # set by Slurm: seconds since 1970


class Stop:
    """Inside this block signals are recorded, and all ranks agree when to stop.

    A second ctrl-C, a second after the first signal or later, interrupts at once. Other signals
    that follow the first change nothing: schedulers and launchers send several, and the checkpoint
    is being written.

    steps: whose multiples end the run; 0: none
    minutes: of the process's life after which it stops, or None for no limit
    saving: seconds that a checkpoint is expected to take, until one has been measured
    reason: why the run ends early, in words, and its exit status; or None
    """

    def __init__(
        self, grid: Grid, *, steps: int = 0, minutes: float | None = None, saving: float = 0.0
    ) -> None:
        self.grid, self.steps = grid, steps
        self.reason: tuple[str, int] | None = None
        self.signal, self.signalled_at = 0, 0.0
        self.minutes = minutes
        self.started = psutil.Process().create_time()
        self.job_end = _end_of_slurm_job()
        self.expected_save, self.longest_save = saving, 0.0
        self.ticks = self.last_tick = 0
        self.next_tick = 1
        self.moment = time.monotonic()

    def __enter__(self) -> Self:
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def wanted(self, step: int = 0) -> bool:
        """Whether any rank has a reason to stop; `reason` says it.

        step: the one that has ended, 0 within a validation
        All ranks call this equally often, after each step and each batch of a validation, and get
        the same answers. They exchange their reasons at a call on which they have agreed in the
        exchange before, about two seconds after it.
        """
        self.ticks += 1
        if self.reason is not None:
            return True
        if step and self.steps and step % self.steps == 0:
            self.reason = (f"exit_interval: {self.steps}", 0)
            return True
        alone = self.grid.ranks == 1
        if self.ticks < self.next_tick and not (alone and self.signal):
            return False
        now = time.monotonic()
        seconds = (now - self.moment) / (self.ticks - self.last_tick)
        everyone = self.grid.gather((self._own_reason(seconds), seconds))
        slowest = max(seconds for _, seconds in everyone)
        self.next_tick = self.ticks + min(MOST, max(1, int(APART / max(slowest, 1e-6))))
        self.last_tick, self.moment = self.ticks, now
        self.reason = next((reason for reason, _ in everyone if reason is not None), None)
        return self.reason is not None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """A checkpoint is written: measured for the next one, and no part of a step's time."""
        before = time.monotonic()
        yield
        seconds = time.monotonic() - before
        self.longest_save = max(self.longest_save, seconds)
        self.moment += seconds

    def _own_reason(self, seconds: float) -> tuple[str, int] | None:
        """This rank's reason; plain data, because ranks exchange it.

        seconds: of a step
        """
        if self.signal:
            return signal.Signals(self.signal).name, 128 + self.signal
        now = time.time()
        if self.minutes is not None and now - self.started > 60 * self.minutes:
            return f"exit_duration: {self.minutes:g}", 0
        if self.job_end is not None:
            saving = self.longest_save or self.expected_save
            margin = APART + 2 * seconds + 1.5 * saving + RESERVE
            if now + margin > self.job_end:
                # As if the signal had come that Slurm sends then: the run is not complete.
                return "the end of the Slurm job", 128 + signal.SIGTERM
        return None

    def _record(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        name = signal.Signals(number).name
        if not self.signal:
            self.signal, self.signalled_at = number, now
            logger.warning("%s: stopping after this step", name)
        elif number != signal.SIGINT:
            logger.warning("%s: already stopping; ctrl-C or SIGKILL ends without saving", name)
        elif now - self.signalled_at > ONE_SIGNAL:
            raise KeyboardInterrupt


def _end_of_slurm_job() -> float | None:
    """Seconds since 1970 at which Slurm ends this job, or None if that is unknown or past."""
    text = os.environ.get(SLURM_END)
    if not text:
        return None
    minutes = (float(text) - time.time()) / 60 if text.isdecimal() else 0
    if minutes <= 0:
        logger.warning("%s: %s is not a time to come and is ignored", SLURM_END, text)
        return None
    logger.info("Slurm ends this job in %.0f minutes: the run is saved and stops before", minutes)
    return float(text)
