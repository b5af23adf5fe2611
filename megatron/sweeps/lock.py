"""The lock of a cell: who works on the cell holds it, down to the last process that was started."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

ATTEMPTS = 3
PAUSE = 0.02  # seconds; `at_work` holds its own lock for much less


@contextmanager
def held(folder: Path) -> Iterator[int | None]:
    """The lock of a cell as a file descriptor, or None while another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        yield file.fileno() if _locked(file) else None


def at_work(folder: Path) -> bool:
    """Whether a process holds the lock of a cell."""
    try:
        file = (folder / "lock").open()
    except OSError:  # nobody has ever worked on it
        return False
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _locked(file: IO[str]) -> bool:
    """Take the lock. A look of `at_work` is waited for, work is not."""
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        return True
    return False
