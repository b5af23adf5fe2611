"""How far a measurement is: bars on a terminal, lines in a log."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from megatron.results.row import Row

LINE_EVERY = 30.0  # seconds between two lines about one length
RECENT = 120.0  # seconds that the speed is taken from

logger = logging.getLogger(__name__)


class Display(Protocol):
    """What shows the progress of one protocol."""

    def advance(self, length: int, finished: int, count: int) -> None:
        """`finished` of `count` windows of this length are done."""

    def done(self, row: Row, *, kept: bool) -> None:
        """A length has its row; kept: an earlier call had measured it."""


@contextmanager
def progress(protocol: str, *, shown: bool = True) -> Iterator[Display]:
    """The display of one protocol on stderr: bars on a terminal, lines of the log elsewhere.

    shown: whether this process displays anything
    """
    console = Console(stderr=True)
    if not shown:
        yield Nothing()
    elif console.is_terminal:
        with bars_on(console) as bars:
            yield Bars(protocol, bars)
    else:
        yield Lines(protocol)


def bars_on(console: Console) -> Progress:
    """A bar, a count and the time left for each length; they disappear at the end."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        speed_estimate_period=RECENT,
    )


class Nothing:
    """The display of the processes that are not the first."""

    def advance(self, length: int, finished: int, count: int) -> None:
        pass

    def done(self, row: Row, *, kept: bool) -> None:
        pass


class Bars:
    """A bar for each length."""

    def __init__(self, protocol: str, bars: Progress) -> None:
        self.protocol = protocol
        self.bars = bars
        self.tasks: dict[int, TaskID] = {}

    def advance(self, length: int, finished: int, count: int) -> None:
        if length not in self.tasks:
            self.tasks[length] = self.bars.add_task(f"{self.protocol} {length}", total=count)
        self.bars.update(self.tasks[length], completed=finished)

    def done(self, row: Row, *, kept: bool) -> None:
        pass  # the table at the end has the number


class Lines:
    """A line for each finished length, and for a long one a line from time to time."""

    def __init__(self, protocol: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.protocol = protocol
        self.clock = clock
        self.length: int | None = None
        self.last_line = 0.0
        self.history: deque[tuple[float, int]] = deque()  # (time, finished windows), recent ones

    def advance(self, length: int, finished: int, count: int) -> None:
        now = self.clock()
        if length != self.length:
            self.length = length
            self.last_line = now
            self.history.clear()
        self.history.append((now, finished))
        while len(self.history) > 2 and now - self.history[1][0] >= RECENT:
            self.history.popleft()
        if finished < count and now - self.last_line >= LINE_EVERY:
            self.last_line = now
            left = duration(self._seconds_left(count))
            logger.info(
                "%s %d: %d of %d windows, about %s left",
                self.protocol,
                length,
                finished,
                count,
                left,
            )

    def done(self, row: Row, *, kept: bool) -> None:
        if row["perplexity"] is None:
            result = f"no perplexity ({row.get('reason')})"
        else:
            result = f"perplexity {row['perplexity']:.2f}"
        spent = "kept from an earlier call" if kept else duration(row.get("seconds", 0.0))
        logger.info(
            "%s %d: %s, %d windows, %s", self.protocol, row["length"], result, row["windows"], spent
        )

    def _seconds_left(self, count: int) -> float:
        """From the speed of the last minutes: the first window is often slower than all others."""
        (start, before), (now, finished) = self.history[0], self.history[-1]
        seconds_per_window = (now - start) / max(finished - before, 1)
        return (count - finished) * seconds_per_window


def duration(seconds: float) -> str:
    """A time for people: 0.4 s, 45 s, 12 min, 3 h 05 min."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02} min"
