"""Corpora, and corpora of files: JSON, text and Parquet, packed, in tar archives or not.

Files are streamed: memory holds one document several times, never a file. The exceptions are a JSON
array and a table inside an archive, which must be as small as a document.
"""

import gzip
import io
import itertools
import json
import logging
import os
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from reprlib import Repr
from typing import IO, Any, NamedTuple, TypeVar

import zstandard
from lm_dataformat import handle_jsonl

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
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A number beside the text may have more digits than Python makes an integer of.
READ_JSON = json.JSONDecoder(parse_int=float).decode
ABRIDGED = Repr()
ABRIDGED.maxdict = 20
AnyFile = TypeVar("AnyFile")  # here, or at a source


class Corpus:
    """Where documents come from.

    about: what else PREFIX.json says of it, such as its recipe and how it was limited
    to_train_on: so many of its first documents are not held out; None: the split decides that
    skips: how many entries or files the last `documents()` left out, by reason
    is_here: whether `sources` can be said without a download
    part: (number, parts): which part of its files this is, and of how many
    """

    part: tuple[int, int] = (1, 1)

    def __init__(self, name: str) -> None:
        self.name = name
        self.about = {}
        self.to_train_on: int | None = None
        self.skips = Counter()
        self.is_here = True

    def documents(self) -> Iterator[str]:
        """The text of every document."""
        raise NotImplementedError

    def sources(self) -> list[dict]:
        """The files that are read, each with its sha256."""
        raise NotImplementedError


class Limits(NamedTuple):
    """How much memory and disk the input may ask for.

    document: bytes of a line, a text file or an entry of a table
    ratio: unpacked bytes for each packed one, in files beyond 256 MB
    """

    document: int = 256 * MB
    ratio: int = 1000


class Keep(NamedTuple):
    """Which entries of JSON lines belong to a corpus: those with `value` under `key`.

    key: with a dot for what lies deeper, such as meta.pile_set_name
    """

    key: str
    value: str


class Files(Corpus):
    """A corpus of files.

    inputs: files and folders
    keys: what holds the text in JSON lines and tables; the first that an entry has
    keep: which entries of JSON lines are documents of this corpus (all without it)
    Raises UserError for what is missing or cannot be read as text.
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str | Path],
        keys: Sequence[str] = ("text",),
        limits: Limits | None = None,
        keep: Keep | None = None,
    ):
        super().__init__(name)
        self.paths = list_files(inputs)
        self.keys = keys
        self.limits = limits or Limits()
        self.keep = keep
        self._read = {}  # size and time of each file when it was first read
        self._left = 0  # bytes that the current file may still unpack to

    def needed(self) -> Iterator[Path]:
        """The files in the order in which they are read."""
        yield from files_of_part(self.paths, self.part)

    def documents(self) -> Iterator[str]:
        """The text of every document: files as given, folders by name.

        Raises UserError at the first fault.
        """
        self.skips.clear()
        for path in self.needed():
            with _readable(path), path.open("rb") as file:
                size, _ = self._read.setdefault(path, _size_and_time(path))
                self._left = max(FREE, size * self.limits.ratio)
                for text in self._texts(str(path), file):
                    try:
                        text.encode()
                    except UnicodeEncodeError:
                        # JSON can spell half a surrogate pair, which no tokenizer takes: U+FFFD.
                        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
                    yield text

    def sources(self) -> list[dict]:
        """Path, bytes and sha256 of each file. Raises UserError if one was changed meanwhile."""
        entries = []
        for path in self._read or self.needed():
            with _readable(path):
                sha256 = sha256_of(path)
                size_and_time = _size_and_time(path)
            if self._read.get(path, size_and_time) != size_and_time:
                raise UserError(
                    f"--input: {path} was changed while it was read - wait until nothing writes to"
                    " it, and start again"
                )
            entries.append({"path": str(path), "bytes": size_and_time[0], "sha256": sha256})
        return entries

    # --- Kinds of files. name: for messages; its end says what the file is ---

    def _texts(self, name: str, file: IO[bytes]) -> Iterator[str]:
        return (_reader(name) or Files._plain_text)(self, name, file)

    def _json(self, name: str, file: IO[bytes]) -> Iterator[str]:
        """The texts of JSON lines, or of one array."""
        for where, entry in self._entries(name, self._unpacked(name, file)):
            if self.keep and value_at(entry, self.keep.key) != self.keep.value:
                self.skips[f"not {self.keep.key} = {self.keep.value}"] += 1
            else:
                yield text_of(entry, self.keys, where)

    def _entries(self, name: str, stream: IO[bytes]) -> Iterator[tuple[str, Any]]:
        """Each entry of a JSON file, after the place where it stands."""
        limit = self.limits.document
        is_first = True
        for number, line in enumerate(iter(lambda: stream.readline(limit + 2), b""), 1):
            where = f"{name}:{number}"
            self._check_size(where, len(line) - 1)
            line = line.removeprefix(BYTE_ORDER_MARK)
            if not line.strip():
                self.skips["empty line"] += 1
            elif is_first and line.lstrip().startswith(b"["):
                array = line + stream.read(limit)
                self._check_size(name, len(array))
                for place, entry in enumerate(json_value(array, name), 1):
                    yield f"{name}: entry {place}", entry
            else:
                yield where, json_value(line, where)
            is_first = is_first and not line.strip()

    def _plain_text(self, name: str, file: IO[bytes]) -> Iterator[str]:
        try:
            text = self._whole(name, self._unpacked(name, file)).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{name}: is not UTF-8 (byte {error.start}) - convert the file"
            ) from None
        line = text.partition("\n")[0].rstrip()
        is_object = (line[:1], line[-1:]) == ("{", "}")
        if is_object and any(f'"{key}":' in line for key in self.keys):
            raise UserError(
                f"{name}: holds JSON lines, and its name does not say so - give it the ending"
                " .jsonl"
            )
        yield text

    def _table(self, name: str, file: IO[bytes]) -> Iterator[str]:
        """The rows of a Parquet file."""
        from pyarrow import parquet  # here, because it is slow to import and rarely needed

        number = itertools.count(1)
        try:
            table = parquet.ParquetFile(file)
            names = table.schema_arrow.names
            keys = {*self.keys, *(key.partition(".")[0] for key in self.keys)}
            groups = map(table.metadata.row_group, range(table.num_row_groups))
            if sum(group.total_byte_size for group in groups) > self._left:
                self._unpack(name, self._left + 1)
            for batch in table.iter_batches(ROWS, columns=sorted(keys & {*names}) or names):
                self._unpack(name, batch.nbytes)
                for row in batch.to_pylist():
                    where = f"{name}: row {next(number)}"
                    text = text_of(row, self.keys, where)
                    self._check_size(where, len(text))
                    yield text
        except UserError:
            raise
        except Exception as error:  # pyarrow has many
            reason, *_ = str(error).split("\n")
            raise UserError(
                f"{name}: cannot be read as a table ({reason[:200]}) - copy it again"
            ) from None

    def _archive(self, name: str, file: IO[bytes]) -> Iterator[str]:
        """The documents of the regular files of an archive; nothing is written to the disk."""
        stream = self._unpacked(name, file)
        try:
            with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as archive:
                while (member := archive.next()) is not None:
                    archive.members = []  # type: ignore[attr-defined]  # else memory keeps them all
                    if member.isdir():
                        continue
                    is_hidden = member.name.rpartition("/")[2].startswith(".")
                    inner = archive.extractfile(member) if member.isreg() else None
                    if inner is None or is_hidden:
                        self.skips["link, device or hidden file in an archive"] += 1
                        continue
                    inner_name = f"{name}: {member.name}"
                    if _reader(inner_name) is Files._table:
                        inner = io.BytesIO(self._whole(inner_name, inner))
                    yield from self._texts(inner_name, inner)
        except UserError:
            raise
        except (tarfile.TarError, OverflowError, ValueError) as fault:
            raise UserError(
                f"{name}: is cut off or damaged as a tar archive ({fault}) - copy it again"
            ) from None
        while rest := stream.read(CHUNK):
            if rest.strip(b"\0"):
                raise UserError(
                    f"{name}: goes on after the end of the archive - if several were joined, give"
                    " them one by one"
                )

    # --- Parts of files ---

    def _unpack(self, name: str, size: int) -> None:
        """Count unpacked bytes; UserError where the file has become too many."""
        self._left -= size
        if self._left < 0:
            raise UserError(
                f"{name}: unpacks to more than {FREE // MB} MB and {self.limits.ratio} times its"
                " size - it is no text; raise --max-unpack-ratio if it is"
            )

    def _check_size(self, where: str, size: int) -> None:
        if size > self.limits.document:
            raise UserError(
                f"{where}: is longer than {self.limits.document / MB:g} MB, which would fill the"
                " memory - remove it, cut it into several, or raise --max-document-mb"
            )

    def _whole(self, name: str, file: IO[bytes]) -> bytes:
        content = file.read(self.limits.document + 1)
        self._check_size(name, len(content))
        return content

    def _unpacked(self, name: str, file: IO[bytes]) -> io.BufferedReader:
        """A file that is read once, unpacked by its name."""
        return io.BufferedReader(_Chunks(self._chunks(name, file)), CHUNK)

    def _chunks(self, name: str, file: IO[bytes]) -> Iterator[bytes]:
        """The bytes of a file, unpacked by its name: never more than 32 MiB at a time.

        Raises UserError for a file that is cut off, which must not pass for a shorter corpus.
        """
        _, _, end = name.lower().rpartition(".")
        if end in ("gz", "tgz", "zst") and not file.peek(1):  # type: ignore[attr-defined]
            raise UserError(f"{name}: is empty, as no packed file is - copy it again")
        if end in ("gz", "tgz"):
            file = gzip.GzipFile(fileobj=file, mode="rb")  # type: ignore[assignment]
        chunks = _zstd(file) if end == "zst" else iter(lambda: file.read(CHUNK), b"")
        try:
            for chunk in chunks:
                self._unpack(name, len(chunk))
                yield chunk
        except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError, MemoryError) as error:
            fault, fix = "is cut off or damaged", "copy it again"
            if "Dictionary mismatch" in str(error):
                fault, fix = (
                    "was packed with a dictionary",
                    "unpack it first: `zstd -d -D DICTIONARY`",
                )
            raise UserError(f"{name}: {fault} ({error}) - {fix}") from None


Reader = Callable[[Files, str, IO[bytes]], Iterator[str]]

READERS: dict[str, Reader] = {
    ".jsonl": Files._json,
    ".json": Files._json,
    ".ndjson": Files._json,
    ".txt": Files._plain_text,
    ".tar": Files._archive,
}
READERS |= {
    f"{end}{packed}": reader for packed in (".gz", ".zst") for end, reader in READERS.items()
}
READERS |= {".tgz": Files._archive, ".parquet": Files._table}


def _reader(name: str) -> Reader | None:
    """The reader of files of this name, or None for a kind that is not read."""
    end = name.lower()
    return next((reader for kind, reader in READERS.items() if end.endswith(kind)), None)


def files_in(folder: Path) -> list[Path]:
    """The files in a folder and below it, by name, without hidden ones and Python's caches.

    A linked folder is opened as any other, and none twice. UserError for what is no file, and for a
    folder that cannot be read.
    """
    files = []
    opened = set()
    for place, folders, names in os.walk(folder, onerror=_refuse_folder, followlinks=True):
        target = os.path.realpath(place)
        if target in opened:
            folders.clear()
            continue
        opened.add(target)
        folders[:] = sorted(filter(_is_shown, folders))
        files += [Path(place, name) for name in filter(_is_shown, names)]
    for path in files:
        if not path.is_file():
            raise UserError(f"{path}: is a link to nothing, a pipe or a device - remove it")
    return sorted(files)


def _is_shown(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _refuse_folder(fault: OSError) -> None:
    raise UserError(
        f"{fault.filename}: the folder cannot be read ({fault.strerror}) - check its permissions"
        " and its disk, or name the files that you want one by one"
    )


def list_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that inputs name, folders opened up.

    Raises UserError for what is missing, and for files of unknown kinds that do not begin as text.
    """
    listed = []
    for path in map(Path, inputs):
        # Both are also False for a loop of links, or a name that is too long.
        inside = files_in(path) if os.path.isdir(path) else [path] * os.path.isfile(path)
        if not inside:
            raise UserError(
                f"--input: {path} is neither a file nor a folder with files in it (looked from"
                f" {Path.cwd()}) - give existing files or folders"
            )
        listed += inside
    files = list({os.path.realpath(path): path for path in listed}.values())
    if twice := len(listed) - len(files):
        log.warning("--input: %d files are given twice, and read once", twice)

    unknown = [path for path in files if _reader(path.name) is None]
    for path in unknown:
        with _readable(path), path.open("rb") as file:
            text = file.read(CHUNK).decode("utf-8", errors="replace")
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


def files_of_part(files: Sequence[AnyFile], part: tuple[int, int]) -> Sequence[AnyFile]:
    """The files of one of several parts of a corpus, which one after the other are all of it.

    part: (number, parts), such as (1, 4) for the first of four
    Raises UserError for more parts than files.
    """
    number, parts = part
    count = len(files)
    if 1 < parts > count:
        raise UserError(
            f"--part: {parts} parts need as many files, for none is cut, and this corpus has"
            f" {count} - take fewer parts, or cut JSON lines before, such as with"
            f" `split -n l/{parts} FILE --additional-suffix .jsonl`"
        )
    return files[(number - 1) * count // parts : number * count // parts]


def json_value(content: bytes, where: str) -> Any:
    """The value of a line, or of a file, of JSON; UserError if it is none."""
    try:
        return READ_JSON(content.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as fault:
        raise UserError(
            f"{where}: cannot be read as JSON in UTF-8 ({str(fault)[:200]}) - mend or remove it:"
            " each line is an entry, or the file is one array"
        ) from None


def value_at(entry: Any, key: str) -> Any:
    """What an entry has under a key, with a dot for what lies deeper; None if it has nothing."""
    parts = [key] if isinstance(entry, dict) and key in entry else key.split(".")
    for part in parts:
        entry = entry.get(part) if isinstance(entry, dict) else None
    return entry


def text_of(entry: Any, keys: Sequence[str], where: str) -> str:
    """The text of an entry, as lm_dataformat reads it.

    An entry is a bare string, or an object with text or a list of paragraphs under a key.
    """
    values = (value_at(entry, key) for key in keys)
    value = next((value for value in values if value is not None), None)
    document = entry if isinstance(entry, str) else {"text": value}
    with suppress(TypeError):  # of a list that holds more than strings
        [text] = handle_jsonl([document], False, autojoin_paragraphs=True, para_joiner="\n\n")
        if isinstance(text, str):
            return text
    raise UserError(
        f"{where}: has no text under '{' or '.join(keys)}', it is {ABRIDGED.repr(entry)} - say"
        " which key holds the text with --text-key, or remove the entry"
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


def _size_and_time(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


# --- Packed bytes ---


def _zstd(file: IO[bytes]) -> Iterator[bytes]:
    # Not zstandard's stream_reader, which takes a frame that is cut off for whole.
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW)
    frame = None
    packed = b""
    while packed or (packed := file.read(ZSTD_INPUT)):
        frame = frame or decompressor.decompressobj()
        yield frame.decompress(packed)
        packed = frame.unused_data
        if frame.eof:
            frame = None
    if frame is not None:
        raise EOFError("inside its last zstd frame")


class _Chunks(io.RawIOBase):
    """Chunks as a file that is read once."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = filter(None, chunks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        rest = self._rest or memoryview(next(self._chunks, b""))
        count = min(len(buffer), len(rest))
        buffer[:count] = rest[:count]
        self._rest = rest[count:]
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
