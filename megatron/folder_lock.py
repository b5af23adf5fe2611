"""A lock: a folder or file that is written has one owner at a time.

The kernel releases the lock when the process ends, so a killed process blocks nobody.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from megatron.errors import UserError, cannot_write
from megatron.files import is_device, remove_stale_temp_files


def owned_folder(folder: Path, key: str) -> AbstractContextManager[None]:
    """Own a folder until the block ends; it is created if it doesn't exist.

    key: the user's name for the folder, for messages
    Raises UserError if another process owns it, or if it cannot be written.
    """
    return _owned(folder, folder / ".owner", key)


def owned_file(path: Path, key: str) -> AbstractContextManager[None]:
    """Own a file until the block ends, like `owned_folder`.

    Devices and pipes are not locked.
    """
    if is_device(path):
        return nullcontext()
    return _owned(path, path.with_name(f".{path.name}.owner"), key)


@contextmanager
def _owned(path: Path, file: Path, key: str) -> Iterator[None]:
    folder = file.parent
    new_folders = [place for place in (folder, *folder.parents) if not place.exists()]
    # A child of a killed owner, such as git, may keep a copy of the lock for a moment.
    lock = FileLock(file, timeout=0.5, mode=0o666)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{key}: {path} is in use by another process - wait until it ends, end it, or choose"
            " another place"
        ) from None
    except OSError as fault:
        raise cannot_write(f"{key}: {path}", fault) from None
    try:
        remove_stale_temp_files(folder)
        yield
    finally:
        file.unlink(missing_ok=True)  # first: who locks it now notices that it is gone
        lock.release()
        for folder in new_folders:
            with suppress(OSError):  # not empty if all went well
                folder.rmdir()
