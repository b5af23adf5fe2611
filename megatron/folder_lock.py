"""One owner at a time for a folder or a file that is written: a lock, and in it who holds it.

The kernel's lock decides. It ends with its process, however that ends, so a killed process blocks
nobody. The text in the lock's file only names the owner in messages.
"""

import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from megatron.errors import UserError, cannot_write
from megatron.files import read_small, remove_stale_temp_files, stream

logger = logging.getLogger(__name__)

LONGEST = 1000  # bytes that say who owns something


def owned_folder(folder: Path, key: str) -> AbstractContextManager[None]:
    """Own a folder until the block ends; it is made if it does not exist.

    key: what the user calls the folder, for messages
    Raises UserError if another process owns it, or if it cannot be written.
    """
    return _owned(folder, folder / ".owner", key)


def owned_file(path: Path, key: str) -> AbstractContextManager[None]:
    """Own a file that is written until the block ends, as `owned_folder` does.

    A device or a pipe has no owner.
    """
    if stream(path):
        return nullcontext()
    return _owned(path, path.with_name(f".{path.name}.owner"), key)


@contextmanager
def _owned(path: Path, file: Path, key: str) -> Iterator[None]:
    folder = file.parent
    new_folders = [place for place in (folder, *folder.parents) if not place.exists()]
    lock = FileLock(file, timeout=0, mode=0o666)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            kind = "file" if path.parent == folder else "folder"
            raise UserError(
                f"{key}: {path} is in use by {_owner_in(file) or 'another process'}"
                f" - wait until it has ended, end it, or choose another {kind}"
            ) from None
        except OSError as fault:
            raise cannot_write(f"{key}: {path}", fault) from None
        owner_before = _owner_in(file)
        if owner_before:
            logger.warning(
                f"{path}: {owner_before}, did not finish here and has ended - taking over"
            )
        remove_stale_temp_files(folder)  # first, for the disk may be full
        started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        with suppress(OSError):
            file.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {started}\n")
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                file.unlink()  # first: who locks it now notices that it is not in place
            lock.release()
        for folder in new_folders:
            with suppress(OSError):  # not empty if all went well
                folder.rmdir()


def _owner_in(file: Path) -> str:
    """The text of the owner in a lock; empty if there is none, or if it cannot be read."""
    with suppress(OSError):
        return read_small(file, LONGEST).decode(errors="replace").strip()
    return ""
