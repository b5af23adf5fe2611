"""Files that appear whole or not at all: written beside their place, synced to disk, renamed."""

import errno
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from megatron.errors import UserError
from megatron.process import Process, this_process

ROOT = Path(__file__).resolve().parents[1]  # the project's folder: entry scripts, configs, tools
# What a process writes before it gets its name: .NAME.PID.TICKS.PLACE.tmp
TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<pid>\d+)\.(?P<ticks>\d+)\.(?P<place>[0-9a-f]{8})\.tmp")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
DAY = 24 * 3600  # seconds; no file is written for so long without a change


class atomic_write:
    """A temporary file in the same folder; it replaces `path` when the `with` block ends well.

    with atomic_write(path) as temporary:
        numpy.save(temporary, array)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = _temporary(path)

    def __enter__(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_temp_files(self.path.parent, self.path.name)
        return self.temporary

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, *_: object
    ) -> None:
        if isinstance(fault, OSError) and fault.errno in FULL and fault.filename is None:
            fault.filename = str(self.path)  # the system does not name the file of a full disk
        try:
            if kind is None:
                sync(self.temporary)
                os.replace(self.temporary, self.path)
        finally:
            self.temporary.unlink(missing_ok=True)


class Together:
    """Temporary files, one for each path, that take their places when the `with` block ends well.

    The last path says that the set is whole: it is removed first and comes back at the end, so a
    reader that needs it never meets old and new files mixed. A path for which the block wrote
    nothing is removed.
    """

    def __init__(self, *paths: Path) -> None:
        self.paths = paths
        self.temporaries = [_temporary(path) for path in paths]

    def __enter__(self) -> list[Path]:
        for path in self.paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_stale_temp_files(path.parent, path.name)
        return self.temporaries

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._replace()
        finally:
            for temporary in self.temporaries:
                temporary.unlink(missing_ok=True)

    def _replace(self) -> None:
        for temporary in self.temporaries:
            if temporary.exists():
                sync(temporary)
        self.paths[-1].unlink(missing_ok=True)
        for temporary, path in zip(self.temporaries, self.paths, strict=True):
            if temporary.exists():
                os.replace(temporary, path)
            else:
                path.unlink(missing_ok=True)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `path` when the block ends well.

    Raises OSError where another process has put a folder there meanwhile; that one stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale_temp_files(path.parent, path.name)
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        temporary.chmod(path.parent.stat().st_mode & 0o777)
        yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write the whole file in UTF-8: readers see the old text or the new one, never a part."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="")


def read_small(path: Path, most: int) -> bytes:
    """The contents of a regular file that may come from anywhere.

    OSError where it cannot be read, is a pipe or a device, which may never end, or has more than
    `most` bytes.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def sync(path: Path) -> None:
    """Wait until a file is on the disk: a rename must not overtake the contents."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sha256_of(path: Path) -> str:
    """The sha256 of a file, read piece by piece; UserError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as fault:
        raise UserError(
            f"{path}: cannot be read ({fault.strerror}) - check its permissions and its disk"
        ) from None


def umask() -> int:
    """The rights that new files of this process do not get."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def remove_stale_temp_files(folder: Path, name: str = "") -> None:
    """Remove from a folder what dead processes were writing there, before it got its name.

    name: only what was to become this file or folder
    What a process of another machine or container was writing stays for a day. It cannot be known
    whether that process still runs.
    """
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = TEMPORARY.fullmatch(entry.name)
            if match is None or name not in ("", match["name"]):
                continue
            path = Path(entry.path)
            with suppress(OSError):  # another process may remove it at the same time
                if _is_dead(path, match):
                    remove(path)


def _is_dead(path: Path, match: re.Match[str]) -> bool:
    """Whether the process that a temporary file is named after has ended."""
    here = this_process()
    if match["place"] != _place(here):
        return time.time() - path.lstat().st_mtime > DAY
    return not replace(here, pid=int(match["pid"]), ticks=int(match["ticks"])).is_running()


def remove(path: Path) -> None:
    """Delete a file, or a folder with all that is in it; a link is deleted, not what it names."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    here = this_process()
    return path.with_name(f".{path.name}.{here.pid}.{here.ticks}.{_place(here)}.tmp")


def _place(process: Process) -> str:
    """Eight digits for the machine, its start and the container: there a number is one process."""
    return hashlib.sha256(f"{process.kernel} {process.namespace}".encode()).hexdigest()[:8]
