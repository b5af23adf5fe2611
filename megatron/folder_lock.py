"""One owner at a time for a folder or a file that is written: a lock, and in it who holds it.

The kernel's lock (flock) decides. It ends with its process, however that ends, so a killed process
blocks nobody. The text in the lock's file names the owner in messages. It decides only where the
kernel's lock cannot: after an owner on another machine, or where the file system has no locks.
"""

import errno
import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from megatron.errors import UserError, cannot_write
from megatron.files import remove_stale_temp_files
from megatron.process import Process, this_process

logger = logging.getLogger(__name__)

ATTEMPTS = 3
PAUSE = 0.02  # seconds; who only looks at a lock holds it for much less
NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # of the file system
LONGEST = 4096  # bytes that say who owns something

# File systems of one machine: whoever held a lock on another start of the kernel is gone.
OF_ONE_MACHINE = {"bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs"}
OF_ONE_MACHINE |= {"xfs", "zfs"}
# File systems of several machines on which a lock holds on all of them, with the option that says
# so. NFS passes flock to its server since Linux 2.6.12, unless it is mounted with local_lock.
OF_ALL_MACHINES = {
    "nfs": "local_lock=none",
    "nfs4": "local_lock=none",
    "lustre": "flock",
    "ceph": "",
    "gpfs": "",
}


@contextmanager
def owned_folder(folder: Path, key: str) -> Iterator[None]:
    """Own a folder until the block ends; it is made where it does not exist.

    key: what the user calls the folder, for messages
    UserError where another process owns it or may own it, or where it cannot be written.
    """
    with _owned(_Lock(folder, folder / ".owner", key, kind="folder")):
        yield


@contextmanager
def owned_file(path: Path, key: str) -> Iterator[None]:
    """Own a file that is written until the block ends, as `owned_folder` does."""
    with _owned(_Lock(path, path.with_name(f".{path.name}.owner"), key, kind="file")):
        yield


@contextmanager
def _owned(lock: "_Lock") -> Iterator[None]:
    folder = lock.file.parent
    new_folders = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        lock.take()
        remove_stale_temp_files(folder)  # first, for the disk may be full
        lock.sign()
        yield
    finally:
        lock.release()
        for folder in new_folders:
            with suppress(OSError):  # not empty where all went well
                folder.rmdir()


class _Lock:
    """A lock on `file`, which says that this process owns `path`."""

    def __init__(self, path: Path, file: Path, key: str, *, kind: str) -> None:
        self.path = path
        self.file = file
        self.key = key
        self.kind = kind  # in words: folder, file
        self.descriptor: int | None = None

    def take(self) -> None:
        """Take the lock; UserError where that cannot be done."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as fault:
            raise cannot_write(f"{self.key}: {self.path}", fault) from None
        try:
            self.descriptor, locked = self._open()
        except OSError as fault:
            raise cannot_write(f"{self.key}: {self.path}", fault) from None
        # A forked process must not keep the lock when this one is killed.
        os.register_at_fork(after_in_child=self._forget)
        before = _read(self.descriptor)
        if locked is False:
            self._forget()
            raise UserError(self._in_use(before))
        if before is None:
            return
        if not _has_ended(before, self.file, locked is not None):
            self._forget()
            raise UserError(self._may_be_in_use(before))
        logger.warning(
            f"{self.path}: {_who(before)}, did not finish here and has ended - taking over"
        )

    def sign(self) -> None:
        """Write down who owns it. On a full disk the kernel's lock must do."""
        assert self.descriptor is not None
        text = json.dumps(asdict(this_process())) + "\n"
        with suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, text.encode(), 0)

    def release(self) -> None:
        """Give the lock back. Its file goes first: nobody can hold a lock that is not in place."""
        if self.descriptor is None:
            return
        with suppress(OSError):
            if _is_in_place(self.descriptor, self.file):
                self.file.unlink()
        self._forget()

    def _open(self) -> tuple[int, bool | None]:
        """A descriptor of the file, and what `lock` says of it."""
        while True:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            locked = lock(descriptor)
            # The owner before may have removed the file since it was opened.
            if locked is False or _is_in_place(descriptor, self.file):
                return descriptor, locked
            os.close(descriptor)

    def _forget(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _in_use(self, owner: Process | None) -> str:
        who = "another process" if owner is None else _who(owner)
        return (
            f"{self.key}: {self.path} is in use by {who}"
            f" - wait until it has ended, end it, or choose another {self.kind}"
        )

    def _may_be_in_use(self, owner: Process) -> str:
        return (
            f"{self.key}: {self.path} was taken by {_who(owner)};"
            " whether that still runs cannot be known from here"
            f" - if it has ended, remove {self.file}; else wait, or choose another {self.kind}"
        )


def lock(
    descriptor: int, operation: int = fcntl.LOCK_EX, *, attempts: int = ATTEMPTS
) -> bool | None:
    """Whether a file could be locked; None where its file system has no locks.

    A short look at the lock by others is waited for, work is not.
    """
    for attempt in range(attempts):
        if attempt:
            time.sleep(PAUSE)
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except OSError as fault:
            if fault.errno in NO_LOCKS:
                return None
            continue
        return True
    return False


def _has_ended(owner: Process, file: Path, locked: bool) -> bool:
    """Whether a process that signed a lock is known to have ended.

    locked: whether the kernel's lock on the file was free, and is ours now
    """
    if locked and (owner.kernel == this_process().kernel or _lock_reaches_all(file)):
        return True
    return owner.is_visible() and not owner.is_running()


def _lock_reaches_all(path: Path) -> bool:
    """Whether everybody who can write a file respects this kernel's locks on it."""
    kind, options = _mount_of(path)
    if kind in OF_ALL_MACHINES:
        needed = OF_ALL_MACHINES[kind]
        return not needed or needed in options
    return kind in OF_ONE_MACHINE


def _mount_of(path: Path) -> tuple[str, list[str]]:
    """Kind and options of the file system that holds a path; nothing where that is hidden."""
    resolved = path.resolve()
    found: tuple[str, list[str]] = ("", [])
    longest = 0
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        mount, _, system = line.partition(" - ")
        point = Path(mount.split()[4].replace("\\040", " "))
        kind, _, options = system.split(maxsplit=2)
        depth = len(point.parts)
        if depth >= longest and resolved.is_relative_to(point):  # a later mount hides an earlier
            longest = depth
            found = (kind, options.split(","))
    return found


def _is_in_place(descriptor: int, file: Path) -> bool:
    """Whether an open file is still the one of its name."""
    try:
        return os.path.samestat(os.fstat(descriptor), file.lstat())
    except OSError:
        return False


def _read(descriptor: int) -> Process | None:
    """Who signed a lock; None where nobody has, or the text is damaged."""
    try:
        owner = Process(**json.loads(os.pread(descriptor, LONGEST, 0)))
    except (OSError, ValueError, TypeError):
        return None
    numbers = (owner.pid, owner.ticks)
    words = (owner.host, owner.kernel, owner.namespace, owner.started)
    sound = all(isinstance(number, int) for number in numbers)
    sound = sound and all(isinstance(word, str) and word.isprintable() for word in words)
    return owner if sound else None


def _who(owner: Process) -> str:
    return f"process {owner.pid} on {owner.host}, started {owner.started}"
