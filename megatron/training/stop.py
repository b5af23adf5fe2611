"""Reasons to end a run before its last step: signals, and a time limit."""

import logging
import signal
import threading
import time
from types import FrameType
from typing import Self

import psutil

from megatron.parallel.grid import Grid

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
APART = 2.0  # seconds between two exchanges with the other ranks
MOST = 100  # calls between two exchanges, in case later ones take longer
ONE_SIGNAL = 1.0  # within this time (s) a terminal and a launcher may both deliver the same ctrl-C


class Stop:
    """Inside this block signals are recorded, and all ranks agree on when to stop.

    A second ctrl-C, at least a second after the first signal, interrupts at once. Other later
    signals are ignored, because schedulers and launchers send several while the checkpoint is being
    written.

    steps: stop at multiples of this number; 0: never
    minutes: stop when the process is this old, or None for no limit
    reason: in words why the run ends early, and its exit status; or None
    """

    def __init__(self, grid: Grid, *, steps: int = 0, minutes: float | None = None) -> None:
        self.grid, self.steps, self.minutes = grid, steps, minutes
        self.reason: tuple[str, int] | None = None
        self.signal, self.signalled_at = 0, 0.0
        self.started = psutil.Process().create_time()
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

    def due(self, step: int = 0) -> bool:
        """Whether any rank has a reason to stop, which `reason` then says.

        step: the step that has ended, 0 during a validation
        All ranks call this equally often, after each step and each batch of a validation, and get
        the same answers. They exchange their reasons at a call that they agreed on in the previous
        exchange, about two seconds later.
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
        moment = time.monotonic()
        seconds = (moment - self.moment) / (self.ticks - self.last_tick)
        reason = None  # plain data, because ranks exchange this
        if self.signal:
            reason = signal.Signals(self.signal).name, 128 + self.signal
        elif self.minutes is not None and time.time() - self.started > 60 * self.minutes:
            reason = f"exit_duration: {self.minutes:g}", 0
        answers = self.grid.gather((reason, seconds))
        slowest = max(seconds for _, seconds in answers)
        self.next_tick = self.ticks + min(MOST, max(1, int(APART / max(slowest, 1e-6))))
        self.last_tick, self.moment = self.ticks, moment
        self.reason = next((reason for reason, _ in answers if reason is not None), None)
        return self.reason is not None

    def _record(self, number: int, frame: FrameType | None) -> None:
        moment = time.monotonic()
        name = signal.Signals(number).name
        if not self.signal:
            self.signal, self.signalled_at = number, moment
            logger.warning("%s: stopping after this step", name)
        elif number != signal.SIGINT:
            logger.warning(
                "%s: already stopping; press ctrl-C again (or send SIGKILL) to end without saving",
                name,
            )
        elif moment - self.signalled_at > ONE_SIGNAL:
            raise KeyboardInterrupt
