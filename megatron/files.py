"""Files that appear whole or not at all: written next to their place, synced to disk, renamed."""

import errno
import glob
import hashlib
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.errors import UserError

ROOT = Path(__file__).resolve().parents[1]  # the project's folder: entry scripts, configs, tools
VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)", re.ASCII)  # as os.path.expandvars reads it
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MARKED = 1 << 26  # bytes at the start of an output that include its mark


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A temporary file in the same folder; it replaces `path` when the `with` block ends well.

    with atomic_write(path) as temporary:
        numpy.save(temporary, array)
    """
    temporary = _temporary(path)
    try:
        yield temporary
        sync(temporary)
        os.replace(temporary, path)
    except OSError as fault:
        if fault.errno in FULL and fault.filename is None:
            fault.filename = str(path)  # the system doesn't name the file if the disk is full
        raise
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_write_all(*paths: Path) -> Iterator[list[Path]]:
    """Temporary files, one for each path, that replace the paths when the `with` block succeeds.

    The last path shows that the set is complete: it is removed first and written last, so a reader
    that needs it never sees a mixture of old and new files. A path for which the block wrote
    nothing is removed.
    """
    temporaries = [_temporary(path) for path in paths]
    try:
        yield temporaries
        for temporary in temporaries:
            if temporary.exists():
                sync(temporary)
        paths[-1].unlink(missing_ok=True)
        for temporary, path in zip(temporaries, paths, strict=True):
            if temporary.exists():
                os.replace(temporary, path)
            else:
                path.unlink(missing_ok=True)
    finally:
        for temporary in temporaries:
            temporary.unlink(missing_ok=True)


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `path` when the block ends well.

    Raises OSError if another process has put a folder there meanwhile, which is kept.
    """
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


# --- Paths that a user names ---


def expanded(path: str) -> str:
    """A user's path with `~` and `$NAME` expanded as in a shell.

    Raises UserError if there is no such user or variable.
    """
    for match in VARIABLE.finditer(path):
        if match[1] not in os.environ:
            raise UserError(
                f"{path}: the variable {match[1]} is not set - set it, or write the path"
            )
    text = os.path.expanduser(path)
    if path.startswith("~") and text == path:
        home, _, _ = path.partition("/")
        raise UserError(
            f"{path}: there is no user {home[1:]} - for a file with this name write ./{path}"
        )
    return os.path.expandvars(text)


def check_output(path: Path, mark: bytes | None = None) -> None:
    """Raises UserError or OSError if an output cannot be written or must not be replaced.

    mark: text that every output of this kind contains; without it, no file is replaced
    """
    if is_device(path):
        return
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(place.parent, os.W_OK):
        raise UserError(f"--output: {path} cannot be written - choose another place")
    if not place.exists():
        return
    with place.open("rb") as file:
        content = file.read(MARKED)
    if content and (mark is None or mark not in content):
        raise UserError(
            f"--output: {path} exists and is not an earlier output of this command - choose another"
            " name, or remove it"
        )


def write_output(path: Path, content: bytes | Iterable[bytes], mark: bytes | None = None) -> None:
    """Write an output to a user's path: a new file, or it replaces a file with the mark.

    content: whole, or in pieces, each of which is written before the next is requested. A device or
        a pipe is written directly. Raises the same errors as `check_output`.
    """
    check_output(path, mark)
    pieces = [content] if isinstance(content, bytes) else content
    if is_device(path):
        with path.open("wb") as output:
            output.writelines(pieces)
        return
    with atomic_write(Path(os.path.realpath(path))) as temporary, temporary.open("wb") as output:
        output.writelines(pieces)


def is_device(path: Path) -> bool:
    """Whether an output is a device or a pipe, which must not be replaced by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


# --- Reading, and cleaning up ---


def read_small(path: Path, most: int) -> bytes:
    """The contents of a regular file from an untrusted source.

    Raises OSError if it cannot be read, is a pipe or a device, which may never end, or has more
    than `most` bytes.
    """
    check_regular(path)
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


def check_regular(path: Path) -> None:
    """Raises OSError for a pipe or a device, which may never end, and for a folder."""
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


def sync(path: Path) -> None:
    """Wait until a file is on disk, because a rename must not come before the contents."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def place_of(prefix: str) -> str:
    """The real path of a token file prefix, the same for different spellings and links."""
    return os.path.realpath(f"{prefix}.bin")


def sha256_of(path: Path) -> str:
    """The sha256 of a file, read piece by piece. Raises UserError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as fault:
        raise UserError(
            f"{path}: cannot be read ({fault.strerror}) - check its permissions and its disk"
        ) from None


def umask() -> int:
    """The permissions that new files of this process don't get."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def remove_stale_temp_files(folder: Path, name: str = "*") -> None:
    """Remove temporary files of dead processes of this machine from a folder.

    name: only those that were to become this file or folder
    """
    import psutil  # benchmarks write where it is missing

    for path in folder.glob(f".{name}.*.{_host()}.tmp"):
        process = path.name.split(".")[-3]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            with suppress(OSError):  # another process may remove it at the same time
                remove(path)


def remove(path: Path) -> None:
    """Delete a file, or a folder with its contents; of a link only the link is deleted."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    """The temporary path next to `path` for this process, after removing leftovers of dead
    processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale_temp_files(path.parent, glob.escape(path.name))
    return path.with_name(f".{path.name}.{os.getpid()}.{_host()}.tmp")


def _host() -> str:
    return socket.gethostname().replace(".", "-")


def in_bytes(count: float) -> str:
    """A readable number of bytes: 1.5 GB, in powers of 1000."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if count < 999.5 or unit == "TB":
            break
        count /= 1000
    return f"{count:.3g} {unit}"
