"""PREFIX.idx: where each document lies in PREFIX.bin, in the format of GPT-NeoX and Megatron-Core.

    magic, version, dtype code, sequences, entries of the document index    (34 bytes)
    lengths [sequences] int32, pointers [sequences] int64 in bytes, document index [entries] int64

Entry d of the document index is the first sequence of document d, and the last entry is the number
of sequences. Files are checked and written piece by piece, so memory does not grow with them.

Token ids are read with pread, so that a .bin that is cut while it is in use is an error. Large
indexes are mapped as they are: cutting one while it is in use ends the process by SIGBUS.
"""

import os
import struct
import weakref
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.errors import UserError

REMAKE = "copy both files again, or make them anew with prepare_data.py"
AGAIN = "copy the files again, and start again: training resumes from its last checkpoint"

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
VERSION = 1
DTYPES: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.int8),
    3: np.dtype(np.int16),
    4: np.dtype(np.int32),
    5: np.dtype(np.int64),
    8: np.dtype(np.uint16),
}
LENGTH, POINTER = np.dtype(np.int32), np.dtype(np.int64)
LARGEST_CARD = 1 << 28  # bytes of PREFIX.json; a list of a million sources has 200 MB
PIECE = 1 << 20  # entries that are checked or written at a time


class Stored:
    """An open file of a known size. Raises UserError if it cannot be read, or is cut meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as fault:
            raise self._unreadable(fault) from None
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes from `offset` on."""
        content = b""
        while len(content) < count:  # once, but for more than 2 GiB
            try:
                piece = os.pread(self._descriptor, count - len(content), offset + len(content))
            except OSError as fault:
                raise self._unreadable(fault) from None
            if not piece:
                size = os.fstat(self._descriptor).st_size
                raise UserError(
                    f"{self.path}: was changed while it was read: it has {size} bytes, it had"
                    f" {self.size} - {AGAIN}"
                )
            content = content + piece if content else piece
        return content

    def _unreadable(self, fault: OSError) -> UserError:
        return UserError(
            f"{self.path}: cannot be read ({fault.strerror}) - check its permissions and its disk"
        )


class Index(NamedTuple):
    """The documents of a token file.

    dtype: of its ids
    sizes: tokens of each document, [documents] int32, or int64 if one has more than 2^31 - 1
    pointers: byte offset of each document, [documents] int64
    extent: bytes of PREFIX.bin
    """

    dtype: np.dtype
    sizes: NDArray
    pointers: NDArray
    extent: int


def read_index(path: Path) -> Index:
    """The index in a file. Raises UserError if it is damaged or of another kind."""
    index = Stored(path)
    length = index.size
    head = index.read(0, min(length, HEADER.size))
    if not head.startswith(MAGIC) or len(head) < HEADER.size:
        raise UserError(
            f"{path}: is not a whole GPT-NeoX index file (it starts with {head[:9]!r} and has"
            f" {length} bytes) - {REMAKE}"
        )
    _, version, code, sequences, entries = HEADER.unpack(head)
    if version != VERSION or code not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise UserError(
            f"{path}: has format version {version} and dtype code {code}, but only version"
            f" {VERSION} and codes of whole numbers ({known}) can be read - {REMAKE}"
        )
    end = HEADER.size + (LENGTH.itemsize + POINTER.itemsize) * sequences
    end += POINTER.itemsize * entries
    if length != end:
        raise UserError(
            f"{path}: is {'cut off' if length < end else 'too long'}: {length} bytes instead of the"
            f" {end} of {sequences} documents - {REMAKE}"
        )
    if not sequences or not entries:
        raise UserError(f"{path}: has no documents - make it anew from an input with text in it")

    dtype = DTYPES[code]
    width = dtype.itemsize
    pointers_at = HEADER.size + LENGTH.itemsize * sequences
    documents_at = pointers_at + POINTER.itemsize * sequences
    lengths = _mapped(path, LENGTH, HEADER.size, sequences)
    pointers = _mapped(path, POINTER, pointers_at, sequences)
    firsts = _mapped(path, POINTER, documents_at, entries)

    extent = 0  # each pointer is the sum of the lengths before it
    for first in range(0, sequences, PIECE):
        some = lengths[first : first + PIECE]
        starts = extent + (np.cumsum(some, dtype=np.int64) - some) * width
        at = pointers[first : first + PIECE]
        wrong = np.flatnonzero((some < 0) | (at != starts))
        if len(wrong):
            which = int(wrong[0])
            raise UserError(
                f"{path}: its lengths and pointers disagree: sequence {first + which} begins"
                f" at byte {at[which]} and has a length of {some[which]}, those before it"
                f" end at {starts[which]}; the file is damaged - {REMAKE}"
            )
        extent = int(starts[-1]) + int(some[-1]) * width

    # GPT-NeoX merges files without ending a document: the index is 0 alone.
    if entries in (1, sequences + 1) and _counts_up(firsts):
        return Index(dtype, lengths, pointers, extent)
    if firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        raise UserError(
            f"{path}: its document index does not rise from 0 to the number of sequences,"
            f" {sequences}, the file is damaged - {REMAKE}"
        )
    of_documents = np.append(pointers, extent)[firsts]
    sizes = np.diff(of_documents) // width
    if sizes.max() <= np.iinfo(LENGTH).max:
        sizes = sizes.astype(LENGTH)
    return Index(dtype, sizes, of_documents[:-1], extent)


def _mapped(path: Path, dtype: np.dtype, offset: int, count: int) -> NDArray:
    return np.memmap(path, dtype, "r", offset, (count,)).view(np.ndarray)


def _counts_up(firsts: NDArray) -> bool:
    """Whether the entries are 0, 1, 2 and so on: each document has one sequence."""
    for at in range(0, len(firsts), PIECE):
        some = firsts[at : at + PIECE]
        if not np.array_equal(some, np.arange(at, at + len(some))):
            return False
    return True


def write_index(path: Path, dtype: np.dtype, lengths: array) -> None:
    """Write the index of documents that are one sequence each; lengths: tokens of each, array("i").

    dtype: of the ids, one of DTYPES
    """
    [code] = [code for code, known in DTYPES.items() if known == dtype]
    sizes = np.frombuffer(lengths, dtype=LENGTH)
    count = len(sizes)
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, count, count + 1))
        file.write(sizes.data)
        end = 0
        for first in range(0, count, PIECE):
            some = sizes[first : first + PIECE]
            ends = end + np.cumsum(some, dtype=POINTER) * dtype.itemsize
            file.write((ends - some.astype(POINTER) * dtype.itemsize).tobytes())
            end = int(ends[-1])
        for first in range(0, count + 1, PIECE):
            stop = min(first + PIECE, count + 1)
            file.write(np.arange(first, stop, dtype=POINTER).tobytes())
