"""This machine: memory with its container's limit, free disk."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

CGROUP_LIMITS = (  # version 2, version 1
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB", "EB")


def total_memory() -> int:
    """Bytes of memory that processes here may use together: the machine's or the container's."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # without the file, or without a limit (`max`)
            total = min(total, int(path.read_text()) or total)
    return total


def free_disk(folder: Path) -> int | None:
    """Free bytes where a folder is or will be, or None if that is not known."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        usage = shutil.disk_usage(existing)
    except (OSError, ValueError):
        return None
    return usage.free if usage.total else None  # some network file systems do not tell


def in_bytes(count: float) -> str:
    """A number of bytes for people: 1.5 GB, in powers of 1000."""
    power = 0
    while count >= 999.5 and power < len(UNITS) - 1:
        count /= 1000
        power += 1
    return f"{count:.3g} {UNITS[power]}"
