"""Token files in GPT-NeoX's memory-mapped format: PREFIX.bin (ids), .idx (documents), .json (what they are)."""

import json
import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron.data.tokenizer import Tokenizer
from megatron.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct(
    "<9sQBQQ"
)  # magic, version, dtype code, documents, entries of the document index
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
PROBE = 1 << 22  # ids looked at when a file does not say which vocabulary it was written with


def dtype_for(vocab_size: int) -> np.dtype:
    """The number type GPT-NeoX stores a vocabulary in: uint16 below 65500 entries, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class TokenFile:
    """Documents of token ids, mapped: `sizes` [documents] int32, `tokens` their sum, `meta` the sidecar or {}."""

    def __init__(
        self,
        prefix: Path,
        dtype: np.dtype,
        sizes: NDArray,
        pointers: NDArray,
        ids: NDArray,
        meta: dict,
    ):
        self.prefix, self.dtype, self.sizes, self.meta = prefix, dtype, sizes, meta
        self._pointers, self._ids = pointers, ids
        self.tokens = len(ids)

    @classmethod
    def open(cls, prefix: str | Path) -> Self:
        """Map PREFIX.bin and PREFIX.idx; raises UserError where they are missing, damaged or do not belong together."""
        prefix = _checked_prefix(prefix)
        dtype, sizes, pointers = _read_index(_with(prefix, ".idx"))
        path = _with(prefix, ".bin")
        _check_extent(path, dtype, sizes, pointers)
        ids = np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)
        return cls(prefix, dtype, sizes, pointers, ids, _read_sidecar(prefix, len(sizes), len(ids)))

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple:
        # A worker process maps the files itself: pickling a memmap would copy all of it.
        return type(self).open, (self.prefix,)

    def read(self, document: int, start: int = 0, count: int | None = None) -> NDArray:
        """Up to `count` ids of a document from `start` on: [count] in the file's dtype, a view, fewer at its end."""
        size = int(self.sizes[document])
        stop = size if count is None else min(size, start + count)
        first = int(self._pointers[document]) // self.dtype.itemsize
        return self._ids[first + start : first + stop]

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise UserError unless that tokenizer wrote these ids or, where nothing is known, they fit its vocabulary."""
        written = self.meta.get("tokenizer")
        if written and written.get("hash") != tokenizer.hash:
            raise UserError(
                f"{self.prefix}: was written by {written.get('type')} {written.get('hash')} with a vocabulary of "
                f"{written.get('vocab_size')}, but the configuration has {tokenizer.name} {tokenizer.hash} with "
                f"{tokenizer.vocab_size} - give the tokenizer_type, vocab_file and merge_file of the data"
            )
        highest = int(self._ids[:PROBE].max())
        if highest >= tokenizer.vocab_size:
            raise UserError(
                f"{self.prefix}: holds token {highest}, but the vocabulary of {tokenizer.name} ends at "
                f"{tokenizer.vocab_size - 1} - give the tokenizer that the data was prepared with"
            )


class TokenWriter:
    """Write PREFIX.bin/.idx/.json: beside, and renamed when the `with` block ends well; `meta` is read then."""

    def __init__(
        self,
        prefix: str | Path,
        dtype: DTypeLike,
        *,
        meta: dict | None = None,
        overwrite: bool = False,
    ):
        self.prefix, self.dtype = Path(prefix), np.dtype(dtype)
        self.meta: dict[str, Any] = dict(meta or {})
        self.documents = self.tokens = 0
        self._code = next((code for code, known in DTYPES.items() if known == self.dtype), None)
        if self._code is None:
            raise UserError(
                f"{prefix}: tokens cannot be stored as {self.dtype} - use one of {', '.join(map(str, DTYPES.values()))}"
            )
        if not overwrite and (
            taken := [p for p in map(self._path, (".idx", ".bin")) if p.exists()]
        ):
            raise UserError(
                f"{taken[0]}: is there already - choose another name, or say --overwrite"
            )
        self._sizes = array("i")  # four bytes a document: there may be many millions

    def __enter__(self) -> Self:
        self._bin: BinaryIO = self._temporary(".bin").open("wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._bin.close()
            for suffix in (".bin", ".json", ".idx"):
                self._temporary(suffix).unlink(missing_ok=True)

    def add(self, ids: Sequence[int] | NDArray) -> None:
        """Append one document: ids [tokens]. Raises UserError for an id that the file's dtype cannot hold."""
        wide = np.asarray(ids, dtype=np.int64)
        limits = np.iinfo(self.dtype.name)
        if len(wide) and (wide.max() > limits.max or wide.min() < limits.min):
            worst = wide.max() if wide.max() > limits.max else wide.min()
            raise UserError(
                f"{self.prefix}: token {worst} does not fit {self.dtype} ({limits.min} to {limits.max}) "
                f"- the vocabulary is too large for this file: int32 holds any"
            )
        self._bin.write(wide.astype(self.dtype).tobytes())
        self._sizes.append(len(wide))
        self.documents += 1
        self.tokens += len(wide)

    def _finish(self) -> None:
        if not self.tokens:
            raise UserError(
                f"{self.prefix}: no tokens to write - the input has no documents with text in them"
            )
        _sync(self._bin)
        self._write_index()
        if self.meta:
            facts = self.meta | {"documents": self.documents, "tokens": self.tokens}
            self._temporary(".json").write_text(
                json.dumps(facts, indent=2) + "\n", encoding="utf-8"
            )
        # The index goes first and comes last: there is no token file without it, so a crash cannot mix old and new.
        self._path(".idx").unlink(missing_ok=True)
        self._path(".json").unlink(missing_ok=True)
        for suffix in (".bin", ".json", ".idx") if self.meta else (".bin", ".idx"):
            os.replace(self._temporary(suffix), self._path(suffix))

    def _write_index(self) -> None:
        sizes = np.asarray(self._sizes, dtype=np.int32)
        pointers = np.zeros(len(sizes), dtype=np.int64)
        np.cumsum(sizes[:-1] * np.int64(self.dtype.itemsize), out=pointers[1:])
        with self._temporary(".idx").open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(sizes) + 1))
            for part in (sizes, pointers, np.arange(len(sizes) + 1, dtype=np.int64)):
                file.write(part.tobytes())
            _sync(file)

    def _path(self, suffix: str) -> Path:
        return _with(self.prefix, suffix)

    def _temporary(self, suffix: str) -> Path:
        return _with(self.prefix, f"{suffix}.{os.getpid()}.tmp")


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _checked_prefix(prefix: str | Path) -> Path:
    text = str(prefix)
    path = Path(prefix)
    missing = (
        [p for p in (_with(path, ".idx"), _with(path, ".bin")) if not p.is_file()]
        if path.name
        else [path]
    )
    if not missing:
        return path
    if "," in text:
        raise UserError(
            f"data_path: '{text}' is a list, but one prefix is expected - give one, mixtures are not supported"
        )
    if path.suffix in (".bin", ".idx"):
        raise UserError(
            f"data_path: '{text}' names one file of two - leave the suffix away: {path.with_suffix('')}"
        )
    if len(missing) == 1 and path.name:
        raise UserError(f"data_path: {missing[0]} is missing, its partner is there - {REMAKE}")
    inside = sorted(path.glob("*.idx")) if path.is_dir() else []
    if inside:
        raise UserError(
            f"data_path: '{text}' is a folder - give the prefix in it, such as {inside[0].with_suffix('')}"
        )
    raise UserError(
        f"data_path: there are no token files {text}.bin and {text}.idx (looked from {Path.cwd()}) "
        f"- make them with prepare_data.py, for instance `python prepare_data.py stdlib`"
    )


def _read_index(path: Path) -> tuple[np.dtype, NDArray, NDArray]:
    """The file's dtype, sizes [documents] int32 and byte offsets [documents] int64, both mapped."""
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
        raise UserError(
            f"{path}: dtype code {code} is not one of whole numbers ({', '.join(map(str, DTYPES))}) - {REMAKE}"
        )
    expected = HEADER.size + documents * 12 + entries * 8
    if length != expected:
        how = "is cut off" if length < expected else "is too long"
        raise UserError(
            f"{path}: {how}: {length} bytes instead of the {expected} of {documents} documents - {REMAKE}"
        )
    if not documents:
        raise UserError(f"{path}: has no documents - make it anew from an input with text in it")
    sizes = np.memmap(path, dtype=np.int32, mode="r", offset=HEADER.size, shape=(documents,))
    pointers = np.memmap(
        path, dtype=np.int64, mode="r", offset=HEADER.size + 4 * documents, shape=(documents,)
    )
    return (
        DTYPES[code],
        sizes.view(np.ndarray),
        pointers.view(np.ndarray),
    )  # the document index that follows is not used, as in GPT-NeoX


def _foreign(head: bytes) -> str:
    if not head:
        return "is empty"
    if head.startswith(b"TNTIDX"):
        return (
            "is in the older TNTIDX format (data_impl: cached or lazy), only mmap files can be read"
        )
    return f"is not a GPT-NeoX index file (it starts with {head[:9]!r} instead of {MAGIC!r})"


def _check_extent(path: Path, dtype: np.dtype, sizes: NDArray, pointers: NDArray) -> None:
    ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
    if sizes.min() < 0 or pointers[0] != 0 or not np.array_equal(pointers[1:], ends[:-1]):
        raise UserError(
            f"{path.with_suffix('.idx')}: its sizes and offsets disagree, the file is damaged - {REMAKE}"
        )
    length, expected = path.stat().st_size, int(ends[-1])
    if not expected:
        raise UserError(f"{path}: has no tokens - make it anew from an input with text in it")
    if length != expected:
        how = "is cut off" if length < expected else "is too long"
        raise UserError(
            f"{path}: {how}: {length} bytes, but its .idx speaks of {expected} - {REMAKE}"
        )


def _read_sidecar(prefix: Path, documents: int, tokens: int) -> dict:
    path = _with(prefix, ".json")
    if not path.is_file():
        return {}
    try:
        meta = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        said = (meta["documents"], meta["tokens"])
    except (json.JSONDecodeError, KeyError, TypeError):
        raise UserError(
            f"{path}: does not describe a token file - remove it (the .bin and .idx work without), or {REMAKE}"
        ) from None
    if said != (documents, tokens):
        raise UserError(
            f"{path}: speaks of {said[0]} documents and {said[1]} tokens, the .idx of {documents} and {tokens} "
            f"- it belongs to another file: remove it, or {REMAKE}"
        )
    return meta
