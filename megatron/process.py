"""Which process this is, so that a later one can tell whether it still runs."""

import os
import socket
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True)
class Process:
    """A process that no other one can be mistaken for, not even one that gets its number later.

    host: name of its machine, for people
    kernel: differs between machines, and between two starts of one
    namespace: of process numbers; a container has one of its own, in which 1 is somebody else
    pid: its number in that namespace
    ticks: of the kernel's clock when it started
    started: the same in words, UTC
    """

    host: str
    kernel: str
    namespace: str
    pid: int
    ticks: int
    started: str

    def is_visible(self) -> bool:
        """Whether this process could see that one, if it ran."""
        return (self.kernel, self.namespace) == (_kernel(), _namespace())

    def is_running(self) -> bool:
        """Whether a process that is visible still runs."""
        try:
            os.kill(self.pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:  # somebody else's
            pass
        start = _start_of(self.pid)
        return start is None or start == self.ticks


def this_process() -> Process:
    """The process that asks."""
    pid = os.getpid()
    ticks = _start_of(pid) or 0
    started = time.gmtime(time.time() - _age(ticks))
    return Process(
        host=socket.gethostname(),
        kernel=_kernel(),
        namespace=_namespace(),
        pid=pid,
        ticks=ticks,
        started=time.strftime("%Y-%m-%d %H:%M:%S UTC", started),
    )


def _start_of(pid: int) -> int | None:
    """The kernel's clock when a process started, 0 if it has ended; None where that is hidden."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The second field is the program's name in brackets, which may itself hold brackets.
    fields = text.rpartition(")")[2].split()
    state, start = fields[0], int(fields[19])
    ended = state in "ZX"  # its parent has not collected it
    return 0 if ended else start


def _age(ticks: int) -> float:
    """Seconds since a moment of the kernel's clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


@cache
def _kernel() -> str:
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # hidden in some sandboxes
        return f"host {socket.gethostname()}"


@cache
def _namespace() -> str:
    try:
        return os.readlink(PROC / "self/ns/pid")
    except OSError:
        return "unknown"
