"""Token files in GPT-NeoX's mapped format: PREFIX.bin (ids), .idx (documents), .json (the card)."""

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray
from pydantic import BaseModel, Field

from megatron.data.token_index import LARGEST_CARD, REMAKE, read_index, write_index
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.errors import UserError, in_words
from megatron.files import (
    ROOT,
    atomic_write_all,
    check_output,
    place_of,
    read_small,
    sha256_of,
)
from megatron.strict_json import parse

QUICK = 1 << 24  # bytes of a file that is compared with its sha256 whenever it is opened
EDGE = 1 << 16  # bytes at each end of PREFIX.bin that tell a text from another


def dtype_for(vocab_size: int) -> np.dtype:
    """The number type in which GPT-NeoX stores ids: uint16 below 65500 entries, else int32."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class TokenFile:
    """Documents of token ids, which are read from the disk when they are needed.

    sizes: tokens of each document, [documents] int32, mapped; int64 where a document of several
        sequences has more than 2^31 - 1
    tokens: their sum; meta: the contents of PREFIX.json, {} if there is none
    vocab: reading an id from here on is an error; None: use the value in PREFIX.json

    Raises UserError if PREFIX.bin and PREFIX.idx are missing, damaged or don't belong together.
    Small files are compared with the sha256 in PREFIX.json; `verify` compares any file.
    """

    def __init__(self, prefix: str | Path, vocab: int | None = None) -> None:
        place = str(prefix)
        # os.path.isfile, because it is also False for names that are too long.
        missing = [file for file in (f"{place}.bin", f"{place}.idx") if not os.path.isfile(file)]
        if missing:
            raise UserError(
                f"data_path: there are no token files {' and '.join(missing)} (looked from"
                f" {Path.cwd()}) - make them: {preparing(place)}; copy files from elsewhere to this"
                " machine first"
            )
        self.prefix = Path(prefix)
        suffixes = (".bin", ".idx", ".json")
        self._file, index_file, card = (_with(self.prefix, suffix) for suffix in suffixes)
        # pointers: byte offset of each document; extent: bytes of PREFIX.bin
        self.dtype, self.sizes, self._pointers, extent = read_index(index_file)
        size = self._file.stat().st_size
        if size != extent or not size:
            raise UserError(
                f"{self._file}: has {size} bytes, but its .idx expects {extent} - {REMAKE}"
            )
        self._ids = np.memmap(self._file, self.dtype, "r").view(np.ndarray)
        self.tokens = len(self._ids)
        self.meta = read_card(card)
        documents, tokens = self.meta.get("documents"), self.meta.get("tokens")
        if self.meta and (documents, tokens) != (len(self), self.tokens):
            raise UserError(
                f"{card}: describes {documents} documents and {tokens} tokens, but the .idx has"
                f" {len(self)} and {self.tokens} - it belongs to another file: remove it, or"
                f" {REMAKE}"
            )
        for file in (self._file, index_file):
            if file.stat().st_size <= QUICK:
                _check_sha256(file, self.sums)
        # Ids are compared as unsigned numbers, so a negative id is too large.
        self._unsigned = np.dtype(f"u{self.dtype.itemsize}")
        self._vocab = min(np.iinfo(self.dtype).max + 1, vocab or self.vocab_size or 2**63)

    @property
    def vocab_size(self) -> int | None:
        """Entries of the vocabulary, or None if PREFIX.json has no number."""
        return self.meta.get("tokenizer", {}).get("vocab_size")

    @property
    def text_bytes(self) -> int | None:
        """UTF-8 bytes of the text, or None if PREFIX.json has no number."""
        size = self.meta.get("text_bytes")
        return size if type(size) is int and size > 0 else None

    def identity(self) -> dict:
        """What distinguishes this text from any other, without reading all of it; and its path.

        digest: of the documents' lengths and both ends of PREFIX.bin; sha256: of the whole file,
            from its card, "" without a card
        """
        content = self._ids.view(np.uint8)
        digest = hashlib.sha256(np.ascontiguousarray(self.sizes).data)
        digest.update(content[:EDGE].data)
        digest.update(content[-EDGE:].data)
        return {
            "path": place_of(str(self.prefix)),
            "documents": len(self.sizes),
            "tokens": self.tokens,
            "digest": digest.hexdigest()[:16],
            "sha256": self.sums.get("bin", "")[:16],
        }

    @property
    def sums(self) -> dict[str, str]:
        """The sha256 of `bin` and `idx`, if PREFIX.json has them."""
        return self.meta.get("sha256", {})

    def __len__(self) -> int:
        return len(self.sizes)

    def __reduce__(self) -> tuple:
        # A worker process opens the files itself: pickling a memmap would copy all of it.
        return type(self), (self.prefix, self._vocab)

    def read(self, document: int, start: int = 0, count: int | None = None) -> NDArray:
        """Up to `count` ids of a document from `start` on: [count] in the file's dtype.

        It is shorter if the document ends earlier. Raises UserError for an id beyond the
        vocabulary.
        """
        size = int(self.sizes[document])
        stop = size if count is None else min(size, start + count)
        place = int(self._pointers[document]) // self.dtype.itemsize
        ids = self._ids[place + start : place + max(start, stop)]
        unsigned = ids.view(self._unsigned)
        if len(ids) and int(unsigned.max()) >= self._vocab:
            misfit = ids[unsigned.argmax()]
            raise UserError(
                f"{self._file}: document {document} has token {misfit}, but the vocabulary"
                f" ends at {self._vocab - 1} - the file is damaged or was prepared with another"
                f" tokenizer: {REMAKE}"
            )
        return ids

    def end_of_documents(self) -> int | None:
        """The id that ends every document, or None if they end differently.

        If the card names such an id, the result is that id or None. Without a card, one document is
        not enough to know. We look at up to 1000 documents with text.
        """
        with_text = np.flatnonzero(np.asarray(self.sizes) > 0)
        places = np.linspace(0, len(with_text) - 1, min(len(with_text), 1000)).astype(np.int64)
        last = [
            int(self.read(document, int(self.sizes[document]) - 1)[0])
            for document in with_text[places].tolist()
        ]
        declared = self.meta.get("tokenizer", {}).get("eod")
        if len({*last}) > 1 or (declared is None and len(last) == 1):
            return None
        return last[0] if declared in (None, last[0]) else None

    def check_ends(self, key: str, end: int | None) -> None:
        """Raise UserError unless all documents end with the tokenizer's end-of-document token.

        key: the configuration key that needs it; end: that token, None if unknown
        """
        if end is None:
            raise UserError(
                f"{key}: we don't know which token ends a document of {self.prefix} - set"
                " tokenizer_type and vocab_file to the tokenizer of the data, or prepare the data"
                f" again; or set {key}: false"
            )
        if self.end_of_documents() != end:
            raise UserError(
                f"{key}: the documents of {self.prefix} do not end with token {end}, the"
                " tokenizer's end of a document, so we don't know where they end - prepare the"
                f" text again with prepare_data.py, which ends each one; or set {key}: false"
            )

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise UserError unless this tokenizer can have written these ids.

        With PREFIX.json the tokenizers' hashes must agree. Otherwise ids are checked against the
        vocabulary when they are read.
        """
        writer = self.meta.get("tokenizer")
        if writer and writer.get("hash") != tokenizer.hash:
            raise UserError(
                f"{self.prefix}: was written by {writer.get('type')} {writer.get('hash')} with a"
                f" vocabulary of {writer.get('vocab_size')}, but the configuration has"
                f" {tokenizer.name} {tokenizer.hash} with {tokenizer.vocab_size} - set"
                " tokenizer_type, vocab_file and merge_file to the tokenizer of the data"
            )
        self._vocab = min(self._vocab, tokenizer.vocab_size)


def preparing(prefix: str) -> str:
    """The command that makes the token files of a prefix."""
    path = Path(prefix)
    name = path.name.removesuffix("_text_document")
    corpus = f"--input FILES --name {name}"
    if os.path.exists(ROOT / "configs" / "data" / f"{name}.yml"):
        corpus = f"{name} (sizes: --list)"
    folder = path.parent.parent if path.parent.name == name else "data"
    return f"python prepare_data.py -d {folder} {corpus}"


def verify(prefix: str | Path) -> str:
    """Compare both files with PREFIX.json and every id with the vocabulary; one line of summary.

    Raises UserError for the first fault.
    """
    tokens = TokenFile(prefix)
    for document in range(len(tokens)):
        tokens.read(document)
    sums = [_check_sha256(_with(tokens.prefix, suffix), tokens.sums) for suffix in (".bin", ".idx")]
    how = "vocabulary" if tokens.vocab_size else f"range of {tokens.dtype}"
    how = f"sha256 and {how}" if all(sums) else f"{how}; PREFIX.json has no sha256"
    counts = f"{len(tokens):,} documents, {tokens.tokens:,} tokens"
    return f"{tokens.prefix}: {counts} are undamaged ({how})"


class TokenWriter:
    """Write PREFIX.bin, .idx and .json; they replace existing files when the `with` block succeeds.

    meta: what PREFIX.json says in addition to the numbers of documents and tokens. It may be
        changed inside the block. Without it no .json is written.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: DTypeLike,
        *,
        meta: dict | None = None,
        overwrite: bool = False,
    ):
        self.prefix = Path(prefix)
        self.dtype = np.dtype(dtype)
        self.meta = dict(meta or {})
        self.documents = self.tokens = 0
        self._sizes = array("i")  # four bytes per document: there may be many millions
        self._digest = hashlib.sha256()
        # The index comes last. Without it there is no token file, so a crash cannot mix old and new
        # files.
        self._paths = [_with(self.prefix, suffix) for suffix in (".bin", ".json", ".idx")]
        for path in reversed(self._paths):
            if path.exists() and not overwrite:
                raise UserError(f"{path}: exists already - choose another name, or add --overwrite")
        check_output(_with(self.prefix, ".json"), b'"documents"')
        self._writing = self._write()

    @contextmanager
    def _write(self) -> Iterator[Self]:
        with atomic_write_all(*self._paths) as (ids, card, index):
            with ids.open("wb") as self._bin:
                yield self
            if not self.tokens:
                raise UserError(
                    f"{self.prefix}: there are no tokens to write - the input has no documents with"
                    " text in them"
                )
            write_index(index, self.dtype, self._sizes)
            if self.meta:
                facts = self.meta | {
                    "documents": self.documents,
                    "tokens": self.tokens,
                    "sha256": {"bin": self._digest.hexdigest(), "idx": sha256_of(index)},
                }
                # A file name that is not UTF-8 cannot be written in JSON.
                facts = parse(json.dumps(facts, ensure_ascii=False).encode(errors="replace"))
                card.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        return self._writing.__enter__()

    def __exit__(self, *fault: Any) -> bool | None:
        return self._writing.__exit__(*fault)

    def add(self, ids: Sequence[int] | NDArray) -> None:
        """Append one document: ids [tokens].

        Raises UserError for an id that doesn't fit into the file's dtype.
        """
        wide = np.asarray(ids, dtype=np.int64)
        limits = np.iinfo(self.dtype.name)
        misfits = wide[(wide < limits.min) | (wide > limits.max)]
        if len(misfits):
            raise UserError(
                f"{self.prefix}: token {misfits[0]} does not fit {self.dtype} ({limits.min} to "
                f"{limits.max}) - the vocabulary is too large for this file: int32 holds any"
            )
        self.append(wide.astype(self.dtype).tobytes())

    def append(self, content: bytes) -> None:
        """Append one document: its ids in the file's dtype."""
        size = len(content) // self.dtype.itemsize
        self._bin.write(content)
        self._digest.update(content)
        self._sizes.append(size)
        self.tokens += size
        self.documents += 1


def _with(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


Number = Annotated[int, Field(ge=0, lt=2**31)]


class _Writer(BaseModel):
    type: str = ""
    hash: str = ""
    vocab_size: Number = 0
    eod: Number = 0


class _Text(BaseModel):
    sha256: str


class Card(BaseModel):
    """The keys of PREFIX.json that we rely on; it may have others."""

    documents: int
    tokens: int
    corpus: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")] = ""  # rows repeat it
    tokenizer: _Writer = _Writer()
    sources: list[_Text] = []
    sha256: dict[str, str] = {}


def read_card(path: Path) -> dict:
    """The contents of PREFIX.json, {} if there is none; UserError if it doesn't describe a token
    file."""
    if not path.is_file():
        return {}
    try:
        meta = parse(read_small(path, LARGEST_CARD))
        Card.model_validate(meta, strict=True)
    except (OSError, ValueError) as fault:
        raise UserError(
            f"{path}: does not describe a token file ({in_words(fault)}) - remove it (the .bin and"
            f" .idx work without), or {REMAKE}"
        ) from None
    return meta


def _check_sha256(path: Path, sums: dict[str, str]) -> bool:
    """Whether PREFIX.json has the sha256 of a file; UserError if the file has another sha256."""
    written = sums.get(path.suffix.removeprefix("."))
    if written is None:
        return False
    if sha256_of(path) != written:
        raise UserError(
            f"{path}: does not match the sha256 in its .json, so it was damaged or changed"
            f" - {REMAKE}"
        )
    return True
