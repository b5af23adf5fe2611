"""Token files in GPT-NeoX's mapped format: PREFIX.bin (ids), .idx (documents), .json (meta)."""

import json
import struct
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron.data.tokenizer import Tokenizer
from megatron.errors import UserError
from megatron.files import Together

MAGIC = b"MMIDIDX\x00\x00"
# magic, version, dtype code, documents, entries of the document index
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
REMAKE = "copy both files again, or make them anew with prepare_data.py"
PROBE = 1 << 22  # ids that are checked against the vocabulary, from the file's start


def dtype_for(vocab_size: int) -> np.dtype:
    """The number type GPT-NeoX stores a vocabulary in: uint16 below 65500 entries, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class TokenFile:
    """Documents of token ids, memory-mapped.

    sizes: tokens of each document, [documents] int32; tokens: their sum;
    meta: the contents of PREFIX.json, {} where there is none
    """

    def __init__(
        self,
        prefix: Path,
        dtype: np.dtype,
        sizes: NDArray,
        pointers: NDArray,
        ids: NDArray,
        meta: dict[str, Any],
    ):
        self.prefix = prefix
        self.dtype = dtype
        self.sizes = sizes
        self.meta = meta
        self.tokens = len(ids)
        self._pointers = pointers  # byte offset of each document
        self._ids = ids

    @classmethod
    def open(cls, prefix: str | Path) -> Self:
        """Map PREFIX.bin and PREFIX.idx.

        Raises UserError where they are missing, damaged or do not belong together.
        """
        prefix = _checked_prefix(prefix)
        dtype, sizes, pointers = _read_index(_with(prefix, ".idx"))
        path = _with(prefix, ".bin")
        _check_extent(path, dtype, sizes, pointers)
        ids = np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
        meta = _read_sidecar(prefix, len(sizes), len(ids))
        return cls(prefix, dtype, sizes, pointers, ids, meta)

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple:
        # A worker process maps the files itself: pickling a memmap would copy all of it.
        return type(self).open, (self.prefix,)

    def read(self, document: int, start: int = 0, count: int | None = None) -> NDArray:
        """Up to `count` ids of a document from `start` on: a view [count] in the file's dtype.

        It is shorter where the document ends before.
        """
        size = int(self.sizes[document])
        stop = size if count is None else min(size, start + count)
        first = int(self._pointers[document]) // self.dtype.itemsize
        return self._ids[first + start : first + stop]

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise UserError unless that tokenizer can have written these ids.

        With PREFIX.json the tokenizers' hashes must agree, else the ids must fit the vocabulary.
        """
        writer = self.meta.get("tokenizer")
        if writer and writer.get("hash") != tokenizer.hash:
            theirs = f"{writer.get('type')} {writer.get('hash')}"
            ours = f"{tokenizer.name} {tokenizer.hash}"
            raise UserError(
                f"{self.prefix}: was written by {theirs} with a vocabulary of "
                f"{writer.get('vocab_size')}, but the configuration has {ours} with "
                f"{tokenizer.vocab_size} - give the tokenizer_type, vocab_file and merge_file "
                "of the data"
            )
        highest = int(self._ids[:PROBE].max())
        if highest >= tokenizer.vocab_size:
            raise UserError(
                f"{self.prefix}: holds token {highest}, but the vocabulary of {tokenizer.name} "
                f"ends at {tokenizer.vocab_size - 1} - give the tokenizer that the data was "
                "prepared with"
            )


class TokenWriter:
    """Write PREFIX.bin, .idx and .json, which replace earlier ones when the `with` block ends well.

    meta: what PREFIX.json says beside the numbers of documents and tokens. It may be changed inside
    the block. Without it no .json is written.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: DTypeLike,
        *,
        meta: dict[str, Any] | None = None,
        overwrite: bool = False,
    ):
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        self.meta: dict[str, Any] = dict(meta or {})
        self.documents = 0
        self.tokens = 0
        self._code = self._dtype_code()
        self._sizes = array("i")  # four bytes a document: there may be many millions
        self._overwrite = overwrite
        self._refuse_to_replace()

    def _dtype_code(self) -> int:
        for code, dtype in DTYPES.items():
            if dtype == self.dtype:
                return code
        known = ", ".join(map(str, DTYPES.values()))
        raise UserError(
            f"{self.prefix}: tokens cannot be stored as {self.dtype} - use one of {known}"
        )

    def _refuse_to_replace(self) -> None:
        if self._overwrite:
            return
        for suffix in (".idx", ".bin"):
            path = _with(self.prefix, suffix)
            if path.exists():
                raise UserError(f"{path}: exists already - choose another name, or add --overwrite")

    def __enter__(self) -> Self:
        # The index comes last. Without it there is no token file: a crash cannot mix old and new.
        files = Together(*(_with(self.prefix, suffix) for suffix in (".bin", ".json", ".idx")))
        with ExitStack() as stack:
            self._paths = stack.enter_context(files)
            self._bin = stack.enter_context(self._paths[0].open("wb"))
            self._open = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._open.__exit__(kind, error, trace)
            return
        with self._open:
            self._finish()
            self._refuse_to_replace()  # a corpus may have appeared meanwhile

    def add(self, ids: Sequence[int] | NDArray) -> None:
        """Append one document: ids [tokens].

        Raises UserError for an id that the file's dtype cannot hold.
        """
        wide = np.asarray(ids, dtype=np.int64)
        if len(wide):
            self._check_range(int(wide.min()), int(wide.max()))
        self._bin.write(wide.astype(self.dtype).tobytes())
        self._sizes.append(len(wide))
        self.documents += 1
        self.tokens += len(wide)

    def _check_range(self, lowest: int, highest: int) -> None:
        limits = np.iinfo(self.dtype.name)
        if lowest >= limits.min and highest <= limits.max:
            return
        misfit = highest if highest > limits.max else lowest
        raise UserError(
            f"{self.prefix}: token {misfit} does not fit {self.dtype} ({limits.min} to "
            f"{limits.max}) - the vocabulary is too large for this file: int32 holds any"
        )

    def _finish(self) -> None:
        if not self.tokens:
            raise UserError(
                f"{self.prefix}: no tokens to write - the input has no documents with text in them"
            )
        _, sidecar, index = self._paths
        self._write_index(index)
        if self.meta:
            facts = self.meta | {"documents": self.documents, "tokens": self.tokens}
            sidecar.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def _write_index(self, path: Path) -> None:
        count = len(self._sizes)
        sizes = np.asarray(self._sizes, dtype=np.int32)
        byte_sizes = sizes * np.int64(self.dtype.itemsize)
        pointers = np.zeros(count, dtype=np.int64)
        np.cumsum(byte_sizes[:-1], out=pointers[1:])
        document_index = np.arange(count + 1, dtype=np.int64)
        with path.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, count, count + 1))
            file.write(sizes.tobytes())
            file.write(pointers.tobytes())
            file.write(document_index.tobytes())


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _checked_prefix(prefix: str | Path) -> Path:
    """The prefix, where both files exist; else a UserError that says what is wrong with it."""
    text = str(prefix)
    path = Path(prefix)
    missing = [path]
    if path.name:
        pair = (_with(path, ".idx"), _with(path, ".bin"))
        missing = [file for file in pair if not file.is_file()]
    if not missing:
        return path
    if "," in text:
        raise UserError(
            f"data_path: '{text}' is a list, but one prefix is expected - give one, mixtures are "
            "not supported"
        )
    if path.suffix in (".bin", ".idx"):
        raise UserError(
            f"data_path: '{text}' names one file of two - leave the suffix away: "
            f"{path.with_suffix('')}"
        )
    if len(missing) == 1 and path.name:
        raise UserError(f"data_path: {missing[0]} is missing, its partner exists - {REMAKE}")
    inside = sorted(path.glob("*.idx")) if path.is_dir() else []
    if inside:
        raise UserError(
            f"data_path: '{text}' is a folder - give the prefix in it, such as "
            f"{inside[0].with_suffix('')}"
        )
    raise UserError(
        f"data_path: there are no token files {text}.bin and {text}.idx (looked from {Path.cwd()}) "
        "- make them with prepare_data.py, for instance `python prepare_data.py stdlib`"
    )


def _read_index(path: Path) -> tuple[np.dtype, NDArray, NDArray]:
    """The file's dtype, sizes [documents] int32 and byte offsets [documents] int64, both mapped.

    The document index that follows is not used, as in GPT-NeoX.
    """
    length = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if not head.startswith(MAGIC):
        raise UserError(f"{path}: {_foreign(head)} - {REMAKE}")
    if len(head) < HEADER.size:
        raise UserError(f"{path}: is cut off after {length} bytes, inside its header - {REMAKE}")
    _, version, code, documents, entries = HEADER.unpack(head)
    if version != VERSION:
        raise UserError(
            f"{path}: has format version {version}, only version {VERSION} can be read - {REMAKE}"
        )
    if code not in DTYPES:
        known = ", ".join(map(str, DTYPES))
        raise UserError(
            f"{path}: dtype code {code} is not one of whole numbers ({known}) - {REMAKE}"
        )
    expected = HEADER.size + documents * 12 + entries * 8
    if length != expected:
        raise UserError(
            f"{path}: {_misfit(length, expected)}: {length} bytes instead of the {expected} of "
            f"{documents} documents - {REMAKE}"
        )
    if not documents:
        raise UserError(f"{path}: has no documents - make it anew from an input with text in it")
    after_sizes = HEADER.size + 4 * documents
    sizes = np.memmap(path, dtype=np.int32, mode="r", offset=HEADER.size, shape=(documents,))
    pointers = np.memmap(path, dtype=np.int64, mode="r", offset=after_sizes, shape=(documents,))
    return DTYPES[code], sizes.view(np.ndarray), pointers.view(np.ndarray)


def _foreign(head: bytes) -> str:
    if not head:
        return "is empty"
    if head.startswith(b"TNTIDX"):
        older = "is in the older TNTIDX format (data_impl: cached or lazy)"
        return f"{older}, only mmap files can be read"
    return f"is not a GPT-NeoX index file (it starts with {head[:9]!r} instead of {MAGIC!r})"


def _misfit(length: int, expected: int) -> str:
    return "is cut off" if length < expected else "is too long"


def _check_extent(path: Path, dtype: np.dtype, sizes: NDArray, pointers: NDArray) -> None:
    """Raise UserError unless PREFIX.bin is as long as its index says."""
    ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
    starts_where_the_last_ends = np.array_equal(pointers[1:], ends[:-1])
    if sizes.min() < 0 or pointers[0] != 0 or not starts_where_the_last_ends:
        raise UserError(
            f"{path.with_suffix('.idx')}: its sizes and offsets disagree, the file is damaged "
            f"- {REMAKE}"
        )
    length = path.stat().st_size
    expected = int(ends[-1])
    if not expected:
        raise UserError(f"{path}: has no tokens - make it anew from an input with text in it")
    if length != expected:
        raise UserError(
            f"{path}: {_misfit(length, expected)}: {length} bytes, but its .idx expects {expected} "
            f"- {REMAKE}"
        )


def _read_sidecar(prefix: Path, documents: int, tokens: int) -> dict[str, Any]:
    path = _with(prefix, ".json")
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        described = (meta["documents"], meta["tokens"])
    except (json.JSONDecodeError, KeyError, TypeError):
        raise UserError(
            f"{path}: does not describe a token file - remove it (the .bin and .idx work without), "
            f"or {REMAKE}"
        ) from None
    if described != (documents, tokens):
        raise UserError(
            f"{path}: describes {described[0]} documents and {described[1]} tokens, the .idx "
            f"{documents} and {tokens} - it belongs to another file: remove it, or {REMAKE}"
        )
    return meta
