"""PREFIX.idx: the place of each document in PREFIX.bin, in GPT-NeoX's and Megatron-Core's format.

    magic, version, dtype code, sequences, entries of the document index    (34 bytes)
    lengths [sequences] int32, pointers [sequences] int64 in bytes, document index [entries] int64

Entry d of the document index is the first sequence of document d, and the last entry is the number
of sequences. Files are checked and written piece by piece, so memory doesn't grow with their size.

Files are memory-mapped: if one is truncated while it is in use, SIGBUS kills the process.
"""

import struct
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.errors import UserError

REMAKE = "copy both files again, or make new ones with prepare_data.py"

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


class Index(NamedTuple):
    """The documents of a token file.

    dtype: of its ids
    sizes: tokens of each document, [documents] int32, or int64 if a document has more than 2^31 - 1
    pointers: byte offset of each document, [documents] int64
    extent: bytes of PREFIX.bin
    """

    dtype: np.dtype
    sizes: NDArray
    pointers: NDArray
    extent: int


def read_index(path: Path) -> Index:
    """Read an index file. Raises UserError if it is damaged or of another kind."""

    def damaged(what: str) -> UserError:
        return UserError(f"{path}: {what} - {REMAKE}")

    with path.open("rb") as file:
        head = file.read(HEADER.size)
    size = path.stat().st_size
    if not head.startswith(MAGIC) or len(head) < HEADER.size:
        raise damaged(f"is not a complete GPT-NeoX index file (it starts with {head[:9]!r})")
    _, version, code, sequences, entries = HEADER.unpack(head)
    if version != VERSION or code not in DTYPES:
        raise damaged(
            f"has format version {version} and dtype code {code}, but only version {VERSION} and"
            f" codes of whole numbers ({', '.join(map(str, DTYPES))}) can be read"
        )
    pointers_at = HEADER.size + LENGTH.itemsize * sequences
    documents_at = pointers_at + POINTER.itemsize * sequences
    end = documents_at + POINTER.itemsize * entries
    if size != end or not sequences or not entries:
        raise damaged(f"has {size} bytes instead of the {end} of {sequences} documents")

    dtype = DTYPES[code]
    lengths, pointers, firsts = (
        np.memmap(path, number_type, "r", offset, (count,)).view(np.ndarray)
        for number_type, offset, count in (
            (LENGTH, HEADER.size, sequences),
            (POINTER, pointers_at, sequences),
            (POINTER, documents_at, entries),
        )
    )
    # If GPT-NeoX merged files without document ends, the index is only a 0.
    each_is_one = entries == 1 or (entries == sequences + 1 and firsts[-1] == sequences)
    extent = 0  # each pointer is the sum of the lengths before it
    for first in range(0, sequences, PIECE):
        sizes = lengths[first : first + PIECE]
        ends = extent + np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
        starts = np.append(extent, ends[:-1])
        if sizes.min() < 0 or not np.array_equal(pointers[first : first + PIECE], starts):
            raise damaged("has lengths and pointers that disagree")
        extent = int(ends[-1])
        numbers = firsts[first : first + PIECE]
        each_is_one = each_is_one and np.array_equal(numbers, first + np.arange(len(numbers)))
    if each_is_one:
        return Index(dtype, lengths, pointers, extent)
    if firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
        raise damaged("has a document index that does not rise from 0 to the number of sequences")
    bounds = np.append(pointers, extent)[firsts]
    sizes = np.diff(bounds) // dtype.itemsize
    if sizes.max() <= np.iinfo(LENGTH).max:
        sizes = sizes.astype(LENGTH)
    return Index(dtype, sizes, bounds[:-1], extent)


def write_index(path: Path, dtype: np.dtype, lengths: array) -> None:
    """Write an index with one sequence per document; lengths: tokens of each, array("i").

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
