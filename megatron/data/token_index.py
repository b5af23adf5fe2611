"""PREFIX.idx: where each document lies in PREFIX.bin, in the format of GPT-NeoX and Megatron-Core.

    magic, version, dtype code, sequences, entries of the document index    (34 bytes)
    lengths [sequences] int32, pointers [sequences] int64 in bytes, document index [entries] int64

Entry d of the document index is the first sequence of document d, and the last entry is the number
of sequences. Files are checked and written piece by piece, so memory does not grow with them.

A mapped file that is cut while it is in use ends the process with SIGBUS, which Python cannot
catch. So token ids are read with pread, which returns less, and small files are read into memory.
Larger ones, of which only .idx and index maps are mapped, are asked for their size before each
access. Between that question and the access a cut is still fatal.
"""

import os
import struct
import weakref
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron.errors import UserError

REMAKE = "copy both files again, or make them anew with prepare_data.py"
AGAIN = "copy the files again, and start again: training resumes from its last checkpoint"
SMALL = 1 << 26  # bytes of a file that is read into memory: an .idx of 5 million documents

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


class Source(Protocol):
    """A file of a known size that is read by parts."""

    @property
    def path(self) -> Path | str: ...
    @property
    def size(self) -> int: ...
    def check(self) -> None: ...
    def read(self, offset: int, count: int) -> bytes: ...


class Stored:
    """An open file. Raises UserError if it is unreadable, or has another size than `size`.

    size: bytes that it must have; None: those that it has now
    """

    def __init__(self, path: Path, size: int | None = None) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as fault:
            raise self._unreadable(fault) from None
        weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size if size is None else size
        self.check()

    def __reduce__(self) -> tuple:
        return type(self), (self.path, self.size)

    def check(self) -> None:
        """Raise UserError unless the file has the size that it had when it was opened."""
        size = os.fstat(self._descriptor).st_size
        if size != self.size:
            raise UserError(
                f"{self.path}: was changed while it was read: it has {size} bytes, it had"
                f" {self.size} - {AGAIN}"
            )

    def read(self, offset: int, count: int) -> bytes:
        """Exactly `count` bytes from `offset` on."""
        pieces: list[bytes] = []
        missing = count
        while missing:  # once, but for more than 2 GiB
            try:
                piece = os.pread(self._descriptor, missing, offset + count - missing)
            except OSError as fault:
                raise self._unreadable(fault) from None
            if not piece:
                self.check()
                raise self._unreadable(OSError(0, "it ends too early"))
            pieces.append(piece)
            missing -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

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


def read_index(index: Stored) -> Index:
    """The index in a file. Raises UserError if it is damaged or of another kind."""
    dtype, sequences, entries = _header(index)
    pointers_at = HEADER.size + LENGTH.itemsize * sequences
    documents_at = pointers_at + POINTER.itemsize * sequences

    extent = 0  # each pointer is the sum of the lengths before it
    for first, count in _pieces(sequences):
        lengths = _numbers(index, LENGTH, HEADER.size, first, count)
        pointers = _numbers(index, POINTER, pointers_at, first, count)
        starts = extent + (np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize
        wrong = np.flatnonzero((lengths < 0) | (pointers != starts))
        if len(wrong):
            which = int(wrong[0])
            raise UserError(
                f"{index.path}: its lengths and pointers disagree: sequence {first + which} begins"
                f" at byte {pointers[which]} and has a length of {lengths[which]}, those before it"
                f" end at {starts[which]}; the file is damaged - {REMAKE}"
            )
        extent = int(starts[-1]) + int(lengths[-1]) * dtype.itemsize

    is_small = index.size <= SMALL  # what is in memory cannot end the process when the file is cut
    numbers = _numbers if is_small else _mapped
    lengths = numbers(index, LENGTH, HEADER.size, 0, sequences)
    pointers = numbers(index, POINTER, pointers_at, 0, sequences)
    if _one_sequence_each(index, documents_at, sequences, entries):
        return Index(dtype, lengths, pointers, extent)

    firsts = _numbers(index, POINTER, documents_at, 0, entries)
    if firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        raise UserError(
            f"{index.path}: its document index does not rise from 0 to the number of sequences,"
            f" {sequences}, the file is damaged - {REMAKE}"
        )
    of_documents = np.full(len(firsts), extent, dtype=POINTER)
    has_sequences = firsts < sequences
    of_documents[has_sequences] = pointers[firsts[has_sequences]]
    sizes = np.diff(of_documents) // dtype.itemsize
    if sizes.max() <= np.iinfo(LENGTH).max:
        sizes = sizes.astype(LENGTH)
    return Index(dtype, sizes, of_documents[:-1], extent)


def _header(index: Stored) -> tuple[np.dtype, int, int]:
    """dtype, sequences and entries of the document index; the file is as long as they say."""
    path, length = index.path, index.size
    head = index.read(0, min(length, HEADER.size))
    if not head.startswith(MAGIC):
        what = f"is not a GPT-NeoX index file (it starts with {head[:9]!r} instead of {MAGIC!r})"
        if head.startswith(b"TNTIDX"):
            what = "is in the older TNTIDX format (data_impl: cached or lazy), which is not read"
        raise UserError(f"{path}: {what} - {REMAKE}")
    if len(head) < HEADER.size:
        raise UserError(f"{path}: is cut off after {length} bytes, inside its header - {REMAKE}")
    _, version, code, sequences, entries = HEADER.unpack(head)
    if version != VERSION or code not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise UserError(
            f"{path}: has format version {version} and dtype code {code}, but only version"
            f" {VERSION} and codes of whole numbers ({known}) can be read - {REMAKE}"
        )
    end = HEADER.size + (LENGTH.itemsize + POINTER.itemsize) * sequences
    end += POINTER.itemsize * entries
    if sequences and length == end + sequences:
        raise UserError(
            f"{path}: has a mode for each sequence, as multimodal files of Megatron-Core have"
            " - prepare the text alone, without modes"
        )
    if length != end:
        raise UserError(
            f"{path}: is {'cut off' if length < end else 'too long'}: {length} bytes instead of the"
            f" {end} of {sequences} documents - {REMAKE}"
        )
    if not sequences or not entries:
        raise UserError(f"{path}: has no documents - make it anew from an input with text in it")
    return DTYPES[code], sequences, entries


def _one_sequence_each(index: Stored, documents_at: int, sequences: int, entries: int) -> bool:
    """Whether every sequence is a document, as in files of GPT-NeoX.

    That is also meant by an index of 0 alone: whoever wrote it never ended a document. GPT-NeoX's
    merging of files does so.
    """
    if entries == 1:
        return _numbers(index, POINTER, documents_at, 0, 1)[0] == 0
    if entries != sequences + 1:
        return False
    return all(
        np.array_equal(
            _numbers(index, POINTER, documents_at, first, count), np.arange(first, first + count)
        )
        for first, count in _pieces(entries)
    )


def _numbers(index: Stored, dtype: np.dtype, offset: int, first: int, count: int) -> NDArray:
    """[count] numbers from the first on of those that begin at an offset of the file."""
    width = dtype.itemsize
    return np.frombuffer(index.read(offset + first * width, count * width), dtype=dtype)


def _mapped(index: Stored, dtype: np.dtype, offset: int, _: int, count: int) -> NDArray:
    mapped = np.memmap(index.path, dtype=dtype, mode="r", offset=offset, shape=(count,))
    return mapped.view(np.ndarray)


def _pieces(total: int) -> Iterator[tuple[int, int]]:
    """The first entry and the number of entries of each piece."""
    for first in range(0, total, PIECE):
        yield first, min(PIECE, total - first)


def write_index(path: Path, dtype: np.dtype, lengths: array) -> None:
    """Write the index of documents that are one sequence each; lengths: tokens of each, array("i").

    dtype: of the ids, one of DTYPES
    """
    (code,) = (code for code, known in DTYPES.items() if known == dtype)
    count = len(lengths)
    sizes = np.frombuffer(lengths, dtype=LENGTH)
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, code, count, count + 1))
        file.write(sizes.data)
        end = 0
        for first, many in _pieces(count):
            ends = end + np.cumsum(sizes[first : first + many], dtype=POINTER) * dtype.itemsize
            file.write(np.concatenate(([end], ends[:-1])).astype(POINTER).tobytes())
            end = int(ends[-1])
        for first, many in _pieces(count + 1):
            file.write(np.arange(first, first + many, dtype=POINTER).tobytes())
