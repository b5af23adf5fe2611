"""A corpus of files: JSON lines, text, tables, packed or not, and tar archives of those."""

import codecs
import io
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.data.readers.archives import archive_texts
from megatron.data.readers.entries import json_lines, plain_text
from megatron.data.readers.reading import Keep, Reading
from megatron.data.readers.tables import table
from megatron.data.readers.unpack import CHUNK, Budget, Limits, Stream, Summed
from megatron.errors import UserError
from megatron.files import sha256_of

__all__ = ["READERS", "Files", "Keep", "is_text", "list_files"]

log = logging.getLogger(__name__)

PYTHONS_CACHE = "__pycache__"


class Files:
    """A corpus of the user's files.

    inputs: files and folders; key: what holds the text in JSON lines and tables;
    limits: of memory and disk; keep: which entries of JSON lines and tables are documents of this
    corpus (all without it); skip_bad: count damaged entries, which are errors otherwise
    skips, skipped: what the last `documents()` left out by reason, and how many were damaged
    Raises UserError for what is missing or cannot be read as text.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str | Path],
        key: str = "text",
        limits: Limits | None = None,
        keep: Keep | None = None,
        *,
        skip_bad: bool = False,
    ):
        self.name = name
        self.about: dict[str, Any] = {}
        self.to_train_on: int | None = None
        self.paths = list_files(inputs)
        self._reading = Reading(key, limits or Limits(), keep, skip_bad)
        self._read: dict[Path, os.stat_result] = {}
        self._sums: dict[Path, str] = {}  # of files that were read to their end
        self._done = 0  # bytes of the files before
        self._current: Summed | None = None
        self._size = sum(path.stat().st_size for path in self.paths)
        _check_kinds(self.paths)

    @property
    def skips(self) -> dict[str, int]:
        return dict(self._reading.skips)

    @property
    def skipped(self) -> int:
        return self._reading.bad

    def documents(self) -> Iterator[str]:
        """The text of every document: files as given, folders by name.

        Raises UserError at the first fault.
        """
        self._reading.skips = Counter()
        self._reading.bad = 0
        self._done = 0
        for path in self.paths:
            with _readable(path), path.open("rb") as file:
                self._read[path] = os.fstat(file.fileno())
                for text in self._documents_of(path, file):
                    yield _encodable(text)
                self._check_unchanged(path)

    def _documents_of(self, path: Path, file: io.BufferedReader) -> Iterator[str]:
        """The documents of one file, whose sum is taken on the way where it is read in order."""
        size = self._read[path].st_size
        budget = Budget(str(path), size, self._reading.limits.ratio)
        if _is_table(path.name):
            yield from table(Stream(str(path), file, budget), self._reading)
        else:
            self._current = Summed(file)
            packed = io.BufferedReader(self._current, CHUNK)
            yield from _texts(Stream(str(path), packed, budget), self._reading)
            self._sums[path] = self._current.read_rest().sum.hexdigest()
            self._current = None
        self._done += size

    def sources(self) -> list[dict[str, Any]]:
        """Path, bytes and sha256 of each file."""
        entries = []
        for path in self.paths:
            with _readable(path):
                size = path.stat().st_size
                self._check_unchanged(path)
                sha256 = self._sums.get(path) or sha256_of(path)
                entries.append({"path": str(path), "bytes": size, "sha256": sha256})
                self._check_unchanged(path)
        return entries

    def identity(self) -> Any:
        """Names, sizes and times of the files, and how they are read."""
        files = []
        for path in self.paths:
            with _readable(path):
                status = path.stat()
            files.append([str(path.absolute()), status.st_size, status.st_mtime_ns])
        how = self._reading
        limits = [how.limits.document, how.limits.ratio]
        return [files, how.key, how.keep, how.skip_bad, limits]

    def fraction(self) -> float | None:
        """The share of the bytes of all files that was read."""
        done = self._done + (self._current.done if self._current else 0)
        return done / self._size if self._size else None

    def _check_unchanged(self, path: Path) -> None:
        """Raise UserError where a file is not the one whose documents were read."""
        before = self._read.get(path)
        now = path.stat()
        if before and (before.st_size, before.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
            raise UserError(
                f"--input: {path} was changed while it was read - wait until nothing writes to it,"
                " and start again"
            )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Name the input where the system refuses to read it."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"--input: {path} cannot be read ({error.strerror or error}) - check that it is still "
            "there, its permissions and its disk"
        ) from None


def list_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that inputs name, folders opened up. Raises UserError for what is missing."""
    files: list[Path] = []
    for path in map(Path, inputs):
        if not os.path.exists(path):  # also for a loop of links, or a name that is too long
            raise UserError(
                f"--input: there is no {path} (looked from {Path.cwd()}) - give existing files or "
                "folders"
            )
        if path.is_file():
            files.append(path)
            continue
        if not path.is_dir():
            raise UserError(
                f"--input: {path} is neither a file nor a folder (a pipe or device) - write it to "
                "a file first"
            )
        inside = sorted(p for p in path.rglob("*") if _is_for_readers(p.relative_to(path)))
        inside = [p for p in inside if p.is_file()]
        if not inside:
            raise UserError(f"--input: the folder {path} is empty - give one with files in it")
        files += inside
    return files


def _is_for_readers(path: Path) -> bool:
    """Whether neither a file nor a folder that it is in is hidden or Python's own cache."""
    return not any(part.startswith(".") or part == PYTHONS_CACHE for part in path.parts)


def _check_kinds(paths: Sequence[Path]) -> None:
    """Raise UserError for a file of unknown kind that is not text; say which are taken as text."""
    unknown = [path for path in paths if _kind(path.name) is None]
    for path in unknown:
        if not is_text(path):
            raise UserError(
                f"--input: {path} is neither UTF-8 text nor of a kind that is read - use "
                f"{', '.join(READERS)} (if a folder holds other files too, name yours one by one)"
            )
    if unknown:
        suffixes = sorted({path.suffix or "no suffix" for path in unknown})
        log.warning(
            "--input: files of other kinds are read as plain text, one document each: %d (%s),"
            " such as %s",
            *(len(unknown), ", ".join(suffixes), unknown[0]),
        )


def is_text(path: Path) -> bool:
    """Whether the whole file is UTF-8 without NUL bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                if b"\0" in chunk:
                    return False
                decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise UserError(
            f"--input: {path} cannot be read ({error.strerror}) - check its permissions"
        ) from None
    return True


Reader = Callable[[Stream, Reading], Iterator[str]]


def _kind(name: str) -> Reader | None:
    """What reads files of this name; None for a kind that is not known."""
    for suffix, reader in READERS.items():
        if name.endswith(suffix):
            return reader
    return None


def _is_table(name: str) -> bool:
    return _kind(name) is table


def _texts(stream: Stream, reading: Reading) -> Iterator[str]:
    """The documents of a file by its kind; of an unknown one it is plain text."""
    return (_kind(stream.name) or plain_text)(stream, reading)


def _archive(stream: Stream, reading: Reading) -> Iterator[str]:
    return archive_texts(stream, reading, _texts)


READERS: dict[str, Reader] = {
    ".jsonl": json_lines,
    ".jsonl.gz": json_lines,
    ".json.gz": json_lines,
    ".jsonl.zst": json_lines,
    ".txt": plain_text,
    ".txt.gz": plain_text,
    ".txt.zst": plain_text,
    ".parquet": table,
    ".arrow": table,
    ".tar": _archive,
    ".tar.gz": _archive,
    ".tgz": _archive,
    ".tar.zst": _archive,
}


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer takes: it becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
