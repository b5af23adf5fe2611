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
        pieces = []
        while count:  # once, but for more than 2 GiB
            try:
                piece = os.pread(self._descriptor, count, offset)
            except OSError as fault:
                raise self._unreadable(fault) from None
            if not piece:
                size = os.fstat(self._descriptor).st_size
                raise UserError(
                    f"{self.path}: was changed while it was read: it has {size} bytes, it had"
                    f" {self.size} - {AGAIN}"
                )
            pieces.append(piece)
            offset += len(piece)
            count -= len(piece)
        return b"".join(pieces)

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
    head = index.read(0, min(index.size, HEADER.size))
    if not head.startswith(MAGIC) or len(head) < HEADER.size:
        raise UserError(
            f"{path}: is not a whole GPT-NeoX index file (it starts with {head[:9]!r} and has"
            f" {index.size} bytes) - {REMAKE}"
        )
    _, version, code, sequences, entries = HEADER.unpack(head)
    if version != VERSION or code not in DTYPES:
        raise UserError(
            f"{path}: has format version {version} and dtype code {code}, but only version"
            f" {VERSION} and codes of whole numbers ({', '.join(map(str, DTYPES))}) can be read -"
            f" {REMAKE}"
        )
    pointers_at = HEADER.size + LENGTH.itemsize * sequences
    documents_at = pointers_at + POINTER.itemsize * sequences
    end = documents_at + POINTER.itemsize * entries
    if index.size != end:
        raise UserError(
            f"{path}: is {'cut off' if index.size < end else 'too long'}: {index.size} bytes"
            f" instead of the {end} of {sequences} documents - {REMAKE}"
        )
    if not sequences or not entries:
        raise UserError(f"{path}: has no documents - make it anew from an input with text in it")

    dtype = DTYPES[code]
    lengths, pointers, firsts = (
        np.memmap(path, number_type, "r", offset, (count,)).view(np.ndarray)
        for number_type, offset, count in (
            (LENGTH, HEADER.size, sequences),
            (POINTER, pointers_at, sequences),
            (POINTER, documents_at, entries),
        )
    )
    # GPT-NeoX merges files without ending a document: the index is 0 alone.
    each_is_one = entries == 1 or (entries == sequences + 1 and firsts[-1] == sequences)
    extent = 0  # each pointer is the sum of the lengths before it
    for first in range(0, sequences, PIECE):
        sizes = lengths[first : first + PIECE]
        starts = extent + (np.cumsum(sizes, dtype=np.int64) - sizes) * dtype.itemsize
        offsets = pointers[first : first + PIECE]
        wrong = np.flatnonzero((sizes < 0) | (offsets != starts))
        if len(wrong):
            place = wrong[0]
            raise UserError(
                f"{path}: its lengths and pointers disagree: sequence {first + place} begins"
                f" at byte {offsets[place]} and has a length of {sizes[place]}, those before it"
                f" end at {starts[place]}; the file is damaged - {REMAKE}"
            )
        extent = int(starts[-1]) + int(sizes[-1]) * dtype.itemsize
        numbers = firsts[first : first + PIECE]
        each_is_one = each_is_one and np.array_equal(numbers, first + np.arange(len(numbers)))
    if each_is_one:
        return Index(dtype, lengths, pointers, extent)
    if firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        raise UserError(
            f"{path}: its document index does not rise from 0 to the number of sequences,"
            f" {sequences}, the file is damaged - {REMAKE}"
        )
    bounds = np.append(pointers, extent)[firsts]
    sizes = np.diff(bounds) // dtype.itemsize
    if sizes.max() <= np.iinfo(LENGTH).max:
        sizes = sizes.astype(LENGTH)
    return Index(dtype, sizes, bounds[:-1], extent)


def write_index(path: Path, dtype: np.dtype, lengths: array) -> None:
    """Write the index of documents that are one sequence each; lengths: tokens of each, array("i").

    dtype: of the ids, one of DTYPES
    """
    codes = {number_type: code for code, number_type in DTYPES.items()}
    count = len(lengths)
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, codes[dtype], count, count + 1))
        file.write(lengths)
        extent = np.zeros(1, POINTER)
        for first in range(0, count, PIECE):
            sizes = np.array(lengths[first : first + PIECE], POINTER) * dtype.itemsize
            ends = np.cumsum(np.append(extent, sizes))
            file.write(ends[:-1].data)
            extent = ends[-1:]
        for first in range(0, count + 1, PIECE):
            file.write(np.arange(first, min(first + PIECE, count + 1), dtype=POINTER).data)
