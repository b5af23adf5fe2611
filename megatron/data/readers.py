"""Corpora, and corpora of files: JSON lines, text, tables, packed, in tar archives or not.

Files are streamed: memory holds one document several times, never a file. A table inside an archive
is the exception, it must be as small as a document.
"""

import gzip
import hashlib
import io
import json
import logging
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import zstandard

from megatron.errors import UserError
from megatron.files import sha256_of

log = logging.getLogger(__name__)

MB = 1_000_000
CHUNK = 1 << 20
# One block of zstd, of 4 bytes or more, unpacks to 128 KiB at most: so much input to 32 MiB.
ZSTD_INPUT = 1 << 10
WINDOW = 1 << 31  # zstd's largest: the Pile was compressed with long windows
FREE = 256 * MB  # unpacked bytes before the ratio counts: a small file may be very uniform
ROWS = 16  # of a Parquet file that are in memory at a time
PYTHONS_CACHE = "__pycache__"


class Corpus:
    """Where documents come from.

    about: what else PREFIX.json says of it, such as its recipe and how it was limited
    to_train_on: so many of its first documents are not held out; None: the split decides that
    skips: how many entries or files the last `documents()` left out, by reason
    skipped: how many of these are damaged
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.about: dict[str, Any] = {}
        self.to_train_on: int | None = None
        self.skips: Counter[str] = Counter()
        self.skipped = 0

    def documents(self) -> Iterator[str]:
        """The text of every document."""
        raise NotImplementedError

    def sources(self) -> list[dict[str, Any]]:
        """The files that are read, each with its sha256."""
        raise NotImplementedError

    def identity(self) -> Any:
        """JSON values that are others when the documents may be others, found quickly."""
        return self.sources()

    def is_here(self) -> bool:
        """Whether `sources` can be said without a download."""
        return True


class Limits(NamedTuple):
    """How much memory and disk the input may ask for.

    document: bytes of a line, a text file or an entry of a table
    ratio: unpacked bytes for each packed one, in files beyond 256 MB
    """

    document: int = 256 * MB
    ratio: int = 1000


class Keep(NamedTuple):
    """Which entries of a file belong to a corpus: those with `value` under `key`.

    key: with a dot for what lies deeper, such as meta.pile_set_name
    """

    key: str
    value: str

    def __call__(self, entry: Any) -> bool:
        for part in self.key.split("."):
            entry = entry.get(part) if isinstance(entry, dict) else None
        return entry == self.value


class Files(Corpus):
    """A corpus of files.

    inputs: files and folders; key: what holds the text in JSON lines and tables
    keep: which entries of JSON lines and tables are documents of this corpus (all without it)
    skip_bad: count damaged entries, which are errors otherwise
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
        super().__init__(name)
        self.paths = list_files(inputs)
        self.key = key
        self.limits = limits or Limits()
        self.keep = keep
        self.skip_bad = skip_bad
        self._read: dict[Path, os.stat_result] = {}  # files of which documents were read
        self._sums: dict[Path, str] = {}  # of files that were read to their end
        self._left = 0  # bytes that the current file may still unpack to

    def needed(self) -> Iterator[Path]:
        """The files in the order in which they are read."""
        yield from self.paths

    def documents(self) -> Iterator[str]:
        """The text of every document: files as given, folders by name.

        Raises UserError at the first fault.
        """
        self.skips.clear()
        self.skipped = 0
        for path in self.needed():
            with _readable(path), path.open("rb") as file:
                status = os.fstat(file.fileno())
                self._read[path] = status
                self._left = max(FREE, status.st_size * self.limits.ratio)
                if _reader(path.name) is Files._table:
                    texts = self._table(str(path), file)
                    summed = None
                else:
                    summed = _Summed(file)
                    texts = self._texts(str(path), io.BufferedReader(summed, CHUNK))
                for text in texts:
                    yield _encodable(text)
                if summed is not None:
                    while summed.read(CHUNK):  # what follows the last document
                        pass
                    self._sums[path] = summed.sum.hexdigest()
                self._check_unchanged(path)

    def sources(self) -> list[dict[str, Any]]:
        """Path, bytes and sha256 of each file."""
        entries = []
        for path in self.needed():
            with _readable(path):
                sha256 = self._sums.get(path) or sha256_of(path)
                entries.append({"path": str(path), "bytes": path.stat().st_size, "sha256": sha256})
                self._check_unchanged(path)
        return entries

    def identity(self) -> Any:
        """Names, sizes and times of the files, and how they are read."""
        files = []
        for path in self.needed():
            with _readable(path):
                status = path.stat()
            files.append([str(path.absolute()), status.st_size, status.st_mtime_ns])
        return [files, self.key, self.keep, self.skip_bad, self.limits]

    def _check_unchanged(self, path: Path) -> None:
        """Raise UserError if a file is not the one whose documents were read."""
        before = self._read.get(path)
        now = path.stat()
        if before and (before.st_size, before.st_mtime_ns) != (now.st_size, now.st_mtime_ns):
            raise UserError(
                f"--input: {path} was changed while it was read - wait until nothing writes to it,"
                " and start again"
            )

    # --- Kinds of files. name: for messages; its end says what the file is ---

    def _texts(self, name: str, file: IO[bytes]) -> Iterator[str]:
        reader = _reader(name) or Files._plain_text
        return reader(self, name, file)

    def _json_lines(self, name: str, file: IO[bytes]) -> Iterator[str]:
        for number, line in enumerate(self._lines(name, file), 1):
            where = f"{name}:{number}"
            self._check_size(where, len(line))
            if not line.strip():
                self.skips["empty line"] += 1
                continue
            try:
                entry = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
            except (ValueError, RecursionError) as error:
                fault = f"{where}: is not JSON in UTF-8 ({str(error)[:200]})"
                self._leave_out("line that is not JSON", f"{fault} - mend or remove the line")
                continue
            yield from self._entry(entry, where)

    def _plain_text(self, name: str, file: IO[bytes]) -> Iterator[str]:
        try:
            yield self._whole(name, file).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            fault = f"{name}: is not UTF-8 (byte {error.start}) - convert the file"
            self._leave_out("file that is not UTF-8", fault)

    def _table(self, name: str, file: IO[bytes]) -> Iterator[str]:
        """The rows of a Parquet or Arrow file."""
        import pyarrow  # here, because it is slow to import and rarely needed
        from pyarrow import parquet

        keys = {self.key, *([self.keep.key.split(".")[0]] if self.keep else [])}
        number = 0
        try:
            if name.endswith(".parquet"):
                table = parquet.ParquetFile(file)
                columns = [key for key in table.schema_arrow.names if key in keys]
                batches = table.iter_batches(ROWS, columns=columns or None)
            elif file.read(6) == b"ARROW1":
                table = pyarrow.ipc.open_file(file)
                batches = map(table.get_batch, range(table.num_record_batches))
            else:
                file.seek(0)
                batches = pyarrow.ipc.open_stream(file)
            for batch in batches:
                batch.validate(full=True)  # an Arrow file may claim places outside of itself
                for row in range(batch.num_rows):
                    number += 1
                    entry = dict.fromkeys(batch.schema.names)
                    for key in keys & entry.keys():
                        entry[key] = batch.column(key)[row].as_py()
                    where = f"{name}: row {number}"
                    for text in self._entry(entry, where):
                        self._check_size(where, len(text))
                        yield text
        except UserError:
            raise
        except Exception as error:  # pyarrow has many
            reason = str(error).split("\n")[0][:200]
            raise UserError(
                f"{name}: cannot be read as a table ({reason}) - copy it again"
            ) from None

    def _archive(self, name: str, file: IO[bytes]) -> Iterator[str]:
        """The documents of the regular files of an archive; nothing is written to the disk."""
        content = io.BufferedReader(_Chunks(self._chunks(name, file)))
        try:
            with tarfile.open(fileobj=content, mode="r|", tarinfo=_Member) as archive:
                while (member := archive.next()) is not None:
                    archive.members = []  # type: ignore[attr-defined]  # else memory keeps them all
                    if member.isdir():
                        continue
                    inner = archive.extractfile(member) if member.isreg() else None
                    inner_name = f"{name}: {member.name}"
                    if inner is None:
                        self.skips["link or device in an archive"] += 1
                    elif member.name.rpartition("/")[2].startswith("."):
                        self.skips["hidden file in an archive"] += 1
                    elif _reader(inner_name) is Files._table:
                        table = io.BytesIO(self._whole(inner_name, inner))
                        yield from self._table(inner_name, table)
                    else:
                        yield from self._texts(inner_name, inner)
        except UserError:
            raise
        except (tarfile.TarError, OverflowError, ValueError) as fault:
            raise UserError(
                f"{name}: is cut off or damaged as a tar archive ({fault}) - copy it again"
            ) from None
        while rest := content.read(CHUNK):
            if rest.strip(b"\0"):
                raise UserError(
                    f"{name}: goes on after the end of the archive - if several were joined, give"
                    " them one by one"
                )

    # --- Parts of files ---

    def _entry(self, entry: Any, where: str) -> Iterator[str]:
        """The text of an entry, as lm_dataformat stores it; nothing if it is not wanted.

        An entry is a bare string, or an object whose `key` holds text or a list of paragraphs.
        """
        if self.keep is not None and not self.keep(entry):
            self.skips[f"not {self.keep.key} = {self.keep.value}"] += 1
            return
        text = entry
        if isinstance(entry, dict):
            text = entry.get(self.key)
            if isinstance(text, list) and all(isinstance(part, str) for part in text):
                text = "\n\n".join(text)
        if isinstance(text, str):
            yield text
            return
        what = f"the keys {', '.join(entry)}" if isinstance(entry, dict) else "no keys"
        self._leave_out(
            "entry without text",
            f"{where}: has no text under '{self.key}', it has {what} - say which one holds the text"
            " with --text-key",
        )

    def _leave_out(self, reason: str, fault: str) -> None:
        """Count a damaged entry; raise UserError unless such are to be skipped."""
        if not self.skip_bad:
            raise UserError(fault)
        self.skips[reason] += 1
        self.skipped += 1

    def _check_size(self, where: str, size: int) -> None:
        if size > self.limits.document:
            raise UserError(
                f"{where}: is longer than {self.limits.document / MB:g} MB, which would fill the"
                " memory - remove it, cut it into several, or raise --max-document-mb"
            )

    def _lines(self, name: str, file: IO[bytes]) -> Iterator[bytes]:
        """The lines of a file without their ends."""
        begun: list[bytes] = []  # of a line that goes on in the next chunk
        for chunk in self._chunks(name, file):
            *ended, rest = chunk.split(b"\n")
            for line in ended:
                yield b"".join([*begun, line])
                begun = []
            begun.append(rest)
            self._check_size(name, sum(map(len, begun)))
        if last := b"".join(begun):
            yield last

    def _whole(self, name: str, file: IO[bytes]) -> bytes:
        content = []
        size = 0
        for chunk in self._chunks(name, file):
            content.append(chunk)
            size += len(chunk)
            self._check_size(name, size)
        return b"".join(content)

    def _chunks(self, name: str, file: IO[bytes]) -> Iterator[bytes]:
        """The contents of a file, unpacked by its name: never more than 32 MiB at a time."""
        for chunk in _unpacked(name, file):
            self._left -= len(chunk)
            if self._left < 0:
                raise UserError(
                    f"{name}: unpacks to more than {FREE // MB} MB and {self.limits.ratio} times"
                    " its size - it is no text; raise --max-unpack-ratio if it is"
                )
            yield chunk


Reader = Callable[[Files, str, IO[bytes]], Iterator[str]]

READERS: dict[str, Reader] = {
    ".jsonl": Files._json_lines,
    ".jsonl.gz": Files._json_lines,
    ".json.gz": Files._json_lines,
    ".jsonl.zst": Files._json_lines,
    ".txt": Files._plain_text,
    ".txt.gz": Files._plain_text,
    ".txt.zst": Files._plain_text,
    ".parquet": Files._table,
    ".arrow": Files._table,
    ".tar": Files._archive,
    ".tar.gz": Files._archive,
    ".tgz": Files._archive,
    ".tar.zst": Files._archive,
}


def _reader(name: str) -> Reader | None:
    """What reads files of this name, or None for a kind that is not known."""
    return next((reader for end, reader in READERS.items() if name.endswith(end)), None)


def list_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that inputs name, folders opened up.

    Raises UserError for what is missing, and for files of unknown kinds that do not begin as text.
    """
    files: list[Path] = []
    for path in map(Path, inputs):
        if os.path.isfile(path):  # False also for a loop of links, or a name that is too long
            files.append(path)
            continue
        inside = []
        if os.path.isdir(path):
            for file in sorted(path.rglob("*")):
                parts = file.relative_to(path).parts
                is_hidden = any(part.startswith(".") or part == PYTHONS_CACHE for part in parts)
                if file.is_file() and not is_hidden:
                    inside.append(file)
        if not inside:
            raise UserError(
                f"--input: {path} is neither a file nor a folder with files in it (looked from"
                f" {Path.cwd()}) - give existing files or folders"
            )
        files += inside

    unknown = [path for path in files if _reader(path.name) is None]
    for path in unknown:
        with _readable(path), path.open("rb") as file:
            beginning = file.read(CHUNK)
        text = beginning.decode("utf-8", errors="replace")
        if "\0" in text or "\ufffd" in text[:-1]:  # the last character may be cut
            raise UserError(
                f"--input: {path} is neither UTF-8 text nor of a kind that is read - use "
                f"{', '.join(READERS)} (if a folder holds other files too, name yours one by one)"
            )
    if unknown:
        log.warning(
            "--input: files of other kinds are read as plain text, one document each: %d, such"
            " as %s",
            *(len(unknown), unknown[0]),
        )
    return files


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


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer takes: it becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# --- Packed bytes ---


def _unpacked(name: str, file: IO[bytes]) -> Iterator[bytes]:
    """The bytes of a file. One that is cut off is a UserError, never a shorter corpus."""
    try:
        if name.endswith(".zst"):
            yield from _zstd(file)
            return
        if name.endswith((".gz", ".tgz")):
            file = gzip.GzipFile(fileobj=file, mode="rb")  # type: ignore[assignment]
        while chunk := file.read(CHUNK):
            yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError, MemoryError) as error:
        raise UserError(f"{name}: is cut off or damaged ({error}) - copy it again") from None


def _zstd(file: IO[bytes]) -> Iterator[bytes]:
    # Not zstandard's stream_reader, which takes a frame that is cut off for whole.
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW)
    frame = None
    packed = b""
    while packed or (packed := file.read(ZSTD_INPUT)):
        frame = frame or decompressor.decompressobj()
        yield frame.decompress(packed)
        packed = frame.unused_data if frame.eof else b""
        if frame.eof:
            frame = None
    if frame is not None:
        raise EOFError("inside its last zstd frame")


class _Summed(io.RawIOBase):
    """A file with the sha256 of what was read of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sum = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        content = self._file.read(len(buffer))
        buffer[: len(content)] = content
        self.sum.update(content)
        return len(content)


class _Chunks(io.RawIOBase):
    """Chunks as a file that is read once."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


class _Member(tarfile.TarInfo):
    """A member whose header is read strictly: only an empty block ends an archive.

    tarfile takes a damaged header, or none, for the end.
    """

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "tarfile.TarInfo":
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as fault:
            raise tarfile.ReadError(str(fault)) from None
