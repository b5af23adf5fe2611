"""Tokens of a preparation that has not ended, kept so that the same command continues it.

In a hidden folder beside the output: tokens.bin and sizes.bin grow, and state.json says how far
they are whole. What was written after the last state is cut off again, so an interruption at any
moment costs the work since then.
"""

import contextlib
import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from megatron.data.prepare.batches import Piece
from megatron.data.prepare.encoder import Encoded
from megatron.data.token_index import write_index
from megatron.data.tokens import LONGEST
from megatron.errors import UserError
from megatron.files import atomic_write_all, read_small, remove, sha256_of, write_text
from megatron.strict_json import parse

SHARD = 64_000_000  # bytes of text after which the state is written
LARGEST = 1 << 28  # bytes of state.json, which names all sources


@dataclass
class State:
    """How far a preparation is.

    read: documents of the corpus that were tokenised, blank ones too; documents: those written
    blank, only_space: documents without text, and those of white space; text_bytes: of UTF-8
    sha256: of tokens.bin; card: what PREFIX.json will say, once all is read
    """

    read: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    blank: int = 0
    only_space: int = 0
    sha256: str = hashlib.sha256().hexdigest()
    card: dict[str, Any] | None = None


class Unfinished:
    """The folder and what is in it; `with` opens it, and keeps it where a state was written.

    identity: JSON values that are others when the tokens may be others
    dtype, eod: of the tokens; keep: a file in the folder that belongs to this work
    """

    def __init__(
        self,
        prefix: Path,
        identity: Any,
        dtype: np.dtype,
        eod: int,
        *,
        keep: Path | None = None,
        shard: int = SHARD,
    ) -> None:
        self.prefix = prefix
        self.folder = unfinished_folder(prefix)
        self.state = State()
        self._identity = json.loads(json.dumps(identity))
        self.dtype = dtype
        self._end = np.array([eod], dtype).tobytes()
        self._keep = keep
        self._shard = shard
        self._digest = hashlib.sha256()
        self._sizes = array("i")  # of the documents since the last state
        self._size = 0  # tokens of the document that is being written
        self._text_since = 0  # bytes of text since the last state

    def __enter__(self) -> Self:
        stored = self._stored()
        self.folder.mkdir(parents=True, exist_ok=True)
        if stored is None:
            self._start_anew()
        else:
            self.state = stored
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, _: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):  # a full disk
            self._tokens.close()
            self._counts.close()
        interrupted = kind is KeyboardInterrupt
        if not self._state_file.exists() and not interrupted:
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def tokens(self) -> int:
        """All tokens, also those of a document that has not ended."""
        return self.state.tokens + self._size

    def add(self, batch: Sequence[Piece], encoded: Encoded) -> None:
        """Write a batch; the state follows once a shard is full."""
        contents: list[bytes] = []
        ended = 0  # contents up to the end of the last document
        place = 0
        width = self.dtype.itemsize
        for piece, count in zip(batch, encoded.counts, strict=True):
            contents.append(encoded.ids[place : place + count * width])
            place += count * width
            self._size += count
            if piece.last:
                if self._size:
                    contents.append(self._end)
                self._end_document(piece)
                ended = len(contents)
        self._write(contents[:ended])
        if ended and self._text_since >= self._shard:
            self.save()
        self._write(contents[ended:])

    def _end_document(self, piece: Piece) -> None:
        """Count a document. As in GPT-NeoX those without tokens are left out."""
        state = self.state
        state.read = piece.document
        state.only_space += piece.only_space
        if not self._size:
            state.blank += 1
            return
        size = self._size + 1
        if size > LONGEST:
            raise UserError(
                f"{self.prefix}: document {piece.document} has more than {LONGEST} tokens, which"
                " the format cannot count - cut it into several"
            )
        self._sizes.append(size)
        self._size = 0
        state.documents += 1
        state.tokens += size
        state.text_bytes += piece.text_bytes
        self._text_since += piece.text_bytes

    def _write(self, contents: Sequence[bytes]) -> None:
        content = b"".join(contents)
        self._tokens.write(content)
        self._digest.update(content)

    def save(self, card: dict[str, Any] | None = None) -> None:
        """Write down that all documents so far are whole; after that they are not lost."""
        self._counts.write(self._sizes.tobytes())
        for file in (self._tokens, self._counts):
            file.flush()
            os.fsync(file.fileno())
        self._sizes = array("i")
        self._text_since = 0
        self.state.sha256 = self._digest.hexdigest()
        self.state.card = card
        content = {"identity": self._identity, "state": asdict(self.state)}
        write_text(self._state_file, json.dumps(content) + "\n")

    def publish(self, tokenizer: Path | None = None, *, overwrite: bool) -> None:
        """Make PREFIX.bin, .idx and .json of the last state, which has a card, and end.

        tokenizer: a file in the folder that becomes tokenizer.json beside them
        """
        card = self.state.card
        assert card is not None
        tokens, sidecar, index = (
            self.prefix.with_name(self.prefix.name + end) for end in (".bin", ".json", ".idx")
        )
        contents = {tokens: self._token_file}
        if tokenizer is not None:
            contents[tokens.with_name("tokenizer.json")] = tokenizer
        with atomic_write_all(*contents, sidecar, index) as temporaries:
            *copies, new_sidecar, new_index = temporaries
            for source, copy in zip(contents.values(), copies, strict=True):
                _link(source, copy)
            write_index(new_index, self.dtype, array("i", self._count_file.read_bytes()))
            sums = {"bin": self.state.sha256, "idx": sha256_of(new_index)}
            new_sidecar.write_text(json.dumps(card | {"sha256": sums}, indent=2) + "\n", "utf-8")
            if index.exists() and not overwrite:  # it has appeared meanwhile
                remove(self.folder)
                raise UserError(
                    f"{index}: exists already - choose another name, or add --overwrite"
                )
        _remove(self.folder)

    # --- The folder ---

    @property
    def _token_file(self) -> Path:
        return self.folder / "tokens.bin"

    @property
    def _count_file(self) -> Path:
        return self.folder / "sizes.bin"

    @property
    def _state_file(self) -> Path:
        return self.folder / "state.json"

    def _open(self) -> None:
        state = self.state
        self._tokens = self._token_file.open("ab")
        self._counts = self._count_file.open("ab")
        if state.card is None:  # a finished tokens.bin may be PREFIX.bin too: it stays as it is
            self._tokens.truncate(state.tokens * self.dtype.itemsize)
            self._counts.truncate(state.documents * self._sizes.itemsize)

    def _stored(self) -> State | None:
        """How far an earlier process came with the same work; None where it is of no use."""
        try:
            content = parse(read_small(self._state_file, LARGEST))
            state = State(**content["state"])
            whole = content["identity"] == self._identity and self._is_whole(state)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return state if whole else None

    def _is_whole(self, state: State) -> bool:
        """Whether the files hold what a state says; continues the sum of tokens.bin."""
        if self._count_file.stat().st_size < state.documents * self._sizes.itemsize:
            return False
        sizes = np.fromfile(self._count_file, np.int32, state.documents)
        if int(sizes.sum(dtype=np.int64)) != state.tokens:
            return False
        digest = hashlib.sha256()
        missing = state.tokens * self.dtype.itemsize
        with self._token_file.open("rb") as file:
            while missing and (content := file.read(min(missing, 1 << 20))):
                digest.update(content)
                missing -= len(content)
        self._digest = digest
        return digest.hexdigest() == state.sha256

    def _start_anew(self) -> None:
        """Remove other work. Files are not emptied: tokens.bin may be PREFIX.bin too."""
        self._digest = hashlib.sha256()
        for file in self.folder.iterdir():
            if file != self._keep:
                remove(file)


def unfinished_folder(prefix: Path) -> Path:
    """Where a preparation keeps what it needs to continue."""
    return prefix.with_name(f".{prefix.name}.unfinished")


def remove_published(prefix: Path) -> None:
    """Remove a folder whose tokens became PREFIX.bin, where a kill left it."""
    folder = unfinished_folder(prefix)
    tokens = folder / "tokens.bin"
    published = prefix.with_name(prefix.name + ".bin")
    is_published = tokens.exists() and published.exists() and tokens.samefile(published)
    if is_published or not (folder / "state.json").exists():
        _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a folder, its state first: without that a kill leaves nothing that is continued."""
    (folder / "state.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
