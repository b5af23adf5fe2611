"""The lock of a cell: who works on the cell holds it, down to the last process that was started."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.folder_lock import lock


@contextmanager
def held(folder: Path) -> Iterator[int | None]:
    """The lock of a cell as a file descriptor, or None while another process has it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as file:
        yield None if lock(file.fileno()) is False else file.fileno()


def at_work(folder: Path) -> bool:
    """Whether a process holds the lock of a cell."""
    try:
        file = (folder / "lock").open()
    except OSError:  # nobody has ever worked on it
        return False
    with file:
        return lock(file.fileno(), fcntl.LOCK_SH, attempts=1) is False
