"""Token files at an address, with a cache on this machine that several processes share.

    TOKEN_CACHE/<address>-NAME/<version>/    NAME.idx, NAME.json, NAME.bin or blocks of it

The version stands for size and ETag (or time) of the three files, so a changed file is never mixed
with an old one. Everything is written beside its place and renamed.
"""

import fcntl
import hashlib
import json
import logging
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from megatron.address import address_fault
from megatron.data.remote_file import RemoteFile, State
from megatron.data.token_index import LARGEST_CARD
from megatron.errors import UserError, cannot_write
from megatron.files import atomic_write, read_small
from megatron.strict_json import parse

log = logging.getLogger(__name__)
FOLDER = "TOKEN_CACHE"
BOUND = "TOKEN_CACHE_GB"
WHOLE = "TOKEN_CACHE_WHOLE"
DEFAULT_BOUND = 50.0  # GB of blocks
GB = 10**9
BLOCK = 1 << 22  # bytes of .bin that are read and kept at a time
SMALL = 1 << 24  # bytes of a .bin that is copied whole in any case
CHECK = 4  # bytes at the end of a block: its CRC-32
CLEARED = 256  # new blocks after which the size of all is looked at
ENDINGS = (".bin", ".idx", ".json")


class Copy(NamedTuple):
    """Token files at an address, as this machine has them.

    prefix: of the local .idx and .json, and of the .bin where it was copied whole
    version: 16 hex digits for the contents
    blocks: the .bin, where it is read by blocks
    """

    prefix: Path
    version: str
    blocks: "Blocks | None"


def local_copy(address: str, *, whole: bool = False) -> Copy:
    """Copy the .idx and .json of an address to the cache, and the .bin where it is small.

    whole: copy any .bin; so does the variable TOKEN_CACHE_WHOLE
    UserError where the files are missing or broken, and for an address with a password in it.
    """
    if fault := address_fault(address):
        raise UserError(f"data_path: {fault}")
    files = {ending: RemoteFile(address + ending) for ending in ENDINGS}
    states = {ending: file.state() for ending, file in files.items()}
    tokens, index = states[".bin"], states[".idx"]
    if tokens is None or index is None:
        missing = address + (".bin" if tokens is None else ".idx")
        raise UserError(
            f"data_path: there is no {missing} - give the address of both files without .bin and"
            " .idx"
        )
    if not tokens.version:
        log.warning(
            "%s.bin: its server sends neither ETag nor time: a change that keeps the size is not"
            " noticed",
            address,
        )
    version = _digest(json.dumps(states))[:16]
    name = address.rstrip("/").rpartition("/")[2]
    folder = _root() / f"{_digest(address)[:12]}-{name}" / version
    whole = whole or os.environ.get(WHOLE, "0") not in ("", "0")
    with _one_at_a_time(folder):
        _copy(folder / f"{name}.json", files[".json"], states[".json"], None)
        sums = _sums(folder / f"{name}.json")
        _copy(folder / f"{name}.idx", files[".idx"], states[".idx"], sums.get("idx"))
        if whole or tokens.size <= SMALL:
            _copy(folder / f"{name}.bin", files[".bin"], states[".bin"], sums.get("bin"))
    blocks = None
    if not (folder / f"{name}.bin").exists():
        blocks = Blocks(files[".bin"], tokens, folder / "blocks")
    return Copy(folder / name, version, blocks)


class Blocks:
    """A file at an address that is read by blocks, which stay on this machine up to a bound.

    After each block the file is asked for its state, so all are of one version.
    """

    def __init__(self, file: RemoteFile, state: State, folder: Path) -> None:
        self.path = file.address
        self.size = state.size
        self._file = file
        self._state = state
        self._folder = folder
        self._whole: set[int] = set()  # blocks whose sum was compared by this process
        self._new = 0

    def check(self) -> None:
        """Nothing: every block is checked when it comes."""

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes from `offset` on."""
        pieces: list[bytes] = []
        while count:
            number, first = divmod(offset, BLOCK)
            many = min(count, BLOCK - first)
            piece = self._kept(number, first, many)
            if piece is None:
                piece = self._fetched(number)[first : first + many]
            pieces.append(piece)
            offset += many
            count -= many
        return b"".join(pieces)

    def _place(self, number: int) -> Path:
        return self._folder / f"{number >> 8:04x}" / f"{number:08x}"

    def _kept(self, number: int, first: int, many: int) -> bytes | None:
        """A part of a block on this machine; None where it is not there, or damaged."""
        try:
            with self._place(number).open("rb") as file:
                if number in self._whole:
                    piece = os.pread(file.fileno(), many, first)
                    return piece if len(piece) == many else None
                content, check = _parted(file.read())
                os.utime(file.fileno())  # blocks that are used stay longest
        except OSError:
            return None
        if len(content) != self._length(number) or _check(content) != check:
            return None
        self._whole.add(number)
        return content[first : first + many]

    def _length(self, number: int) -> int:
        return min(BLOCK, self.size - number * BLOCK)

    def _fetched(self, number: int) -> bytes:
        start = number * BLOCK
        content = self._file.part(start, start + self._length(number))
        if self._file.state() != self._state:
            raise self._file.changed("was changed since it was opened")
        path = self._place(number)
        try:
            with atomic_write(path) as temporary:
                temporary.write_bytes(content + _check(content))
        except OSError as fault:
            raise cannot_write(f"{FOLDER}: {path.parent}", fault) from None
        self._whole.add(number)
        if self._new % CLEARED == 0:
            _keep_bound()
        self._new += 1
        return content


def _parted(content: bytes) -> tuple[bytes, bytes]:
    return content[:-CHECK], content[-CHECK:]


def _check(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(CHECK, "little")


def _keep_bound() -> None:
    """Remove the blocks that were not used for longest, where all have more than TOKEN_CACHE_GB."""
    found = []
    for path in _root().glob("*/*/blocks/*/*"):
        if path.name.startswith("."):  # another process is writing it
            continue
        with suppress(OSError):  # another process may remove it at the same time
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    excess = sum(size for _, size, _ in found) - _bound()
    for _, size, path in sorted(found):
        if excess <= 0:
            return
        with suppress(OSError):
            path.unlink()
        excess -= size


def _bound() -> float:
    """Bytes that all blocks together may have."""
    text = os.environ.get(BOUND, "")
    try:
        bound = float(text) if text else DEFAULT_BOUND
    except ValueError:
        bound = -1.0
    if not 0 <= bound < float("inf"):
        raise UserError(f"{BOUND}: '{text}' is no size - give a number of gigabytes, such as 50")
    return bound * GB


def _root() -> Path:
    """The folder of the cache."""
    given = os.environ.get(FOLDER)
    if given:
        return Path(given)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "megatron-positions" / "tokens"


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Let one process of this machine copy into a folder; the others wait and find the files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / ".lock").open("wb") as file:
            with suppress(OSError):  # some network disks have no locks: then each copies
                fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as fault:
        raise cannot_write(f"{FOLDER}: {folder}", fault) from None


def _copy(path: Path, file: RemoteFile, state: State | None, sha256: str | None) -> None:
    if state is None or _size(path) == state.size:
        return
    log.info("%s is copied to %s (%.1f MB)", file.address, path, state.size / 1e6)
    with atomic_write(path) as temporary:
        file.copy(temporary, state, sha256)


def _size(path: Path) -> int | None:
    """Bytes of a file; None where there is none."""
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return None


def _sums(card: Path) -> dict[str, str]:
    """The sha256 of .bin and .idx by a card; what is wrong with it is said when it is read."""
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        sums = parse(read_small(card, LARGEST_CARD))["sha256"]
        return {ending: text for ending, text in sums.items() if isinstance(text, str)}
    return {}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
