"""Ctrl-C and SIGTERM (a scheduler stops the job) end a run after its step, with a checkpoint."""

import logging
import signal
import threading
from types import FrameType
from typing import Self

import torch

from megatron.parallel.grid import Grid

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
EVERY = 10  # steps between two exchanges with the other ranks


class Stop:
    """Inside this block the first signal is only recorded; a second one acts as always."""

    def __init__(self, grid: Grid) -> None:
        self.grid, self.signal = grid, 0

    def __enter__(self) -> Self:
        self.before = {}
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._record) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def wanted(self, step: int) -> bool:
        """Whether any rank got a signal: all ranks get the same answer at the same step."""
        if self.grid.ranks == 1:
            return bool(self.signal)
        if step % EVERY:
            return False
        signal_number = torch.tensor(float(self.signal), device=self.grid.device)
        return bool(self.grid.mean(signal_number) > 0)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        logger.warning("%s: stopping after this step", signal.Signals(number).name)
        for known, handler in self.before.items():
            signal.signal(known, handler)
