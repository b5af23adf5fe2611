"""The lock of a cell: who works on the cell holds it, down to the last process that was started."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ATTEMPTS = 3
PAUSE = 0.02  # seconds; who only looks at a lock holds it for much less


@contextmanager
def held(folder: Path) -> Iterator[int | None]:
    """The lock of a cell as a file descriptor, or None while another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        yield file.fileno() if _locked(file.fileno(), fcntl.LOCK_EX) else None


def at_work(folder: Path) -> bool:
    """Whether a process holds the lock of a cell."""
    try:
        file = (folder / "lock").open()
    except OSError:  # nobody has ever worked on it
        return False
    with file:
        return not _locked(file.fileno(), fcntl.LOCK_SH, attempts=1)


def _locked(descriptor: int, kind: int, attempts: int = ATTEMPTS) -> bool:
    """Whether a file could be locked. A short look at the lock by others is waited for."""
    for attempt in range(attempts):
        if attempt:
            time.sleep(PAUSE)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        return True
    return False
