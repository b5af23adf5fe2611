"""Corpora, and corpora of files: JSON, text and Parquet, compressed, in tar archives or plain.

Files are streamed: memory holds a few copies of one document, never a whole file. The exception is
a JSON array, which must be as small as a document.
"""

import gzip
import itertools
import json
import os
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from reprlib import Repr
from typing import IO, Any

from lm_dataformat import handle_jsonl

from megatron.errors import UserError, in_words
from megatron.files import sha256_of

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# zstd's largest window: the Pile was compressed with long ones.
ZSTD_OPTIONS = {int(zstd.DecompressionParameter.window_log_max): 31}
LONGEST = 256_000_000  # bytes of a line, an array or a text file: memory holds several copies
ROWS = 16  # rows of a Parquet file that are in memory at a time
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# A number next to the text may have more digits than Python's int accepts.
READ_JSON = json.JSONDecoder(parse_int=float).decode
ABRIDGED = Repr()
ABRIDGED.maxdict = 20


class Corpus:
    """Where documents come from.

    about: what else PREFIX.json says about it, such as its recipe and limits
    to_train_on: how many of its first documents are not held out; None: the split decides
    skips: how many entries or files the last `documents()` skipped, by reason
    is_here: whether `sources` needs no download
    """

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
        """The files that are read, with their sha256."""
        raise NotImplementedError


class Files(Corpus):
    """A corpus of files.

    inputs: files and folders; UserError if one is missing
    keys: the keys of the text in JSON lines and tables; the first that an entry has is used
    keep: use only entries of JSON lines with these values under these keys
    """

    def __init__(
        self,
        name: str,
        inputs: Sequence[str | Path],
        keys: Sequence[str] = ("text",),
        keep: Mapping[str, str] | None = None,
    ):
        super().__init__(name)
        files = {}  # each once, whatever names lead to it
        for path in map(Path, inputs):
            inside = files_in(path) if path.is_dir() else [path]
            missing = [file for file in inside if not file.is_file()]
            if missing or not inside:
                raise UserError(
                    f"--input: {[*missing, path][0]} is neither a file nor a folder with files in"
                    f" it (looked from {Path.cwd()}) - name existing files or folders"
                )
            for file in inside:
                files.setdefault(os.path.realpath(file), file)
        self.paths = list(files.values())
        self.keys = keys
        self.keep = keep or {}
        self._read: list[Path] = []  # what the last `documents()` opened

    def needed(self) -> Iterable[Path]:
        """The files in the order in which they are read."""
        return self.paths

    def documents(self) -> Iterator[str]:
        """The text of every document: files in the given order, folders sorted by name.

        Raises UserError at the first fault: a truncated file must not pass for a shorter corpus.
        """
        self.skips.clear()
        self._read.clear()
        for path in self.needed():
            self._read.append(path)
            try:
                with path.open("rb") as file:
                    yield from self._texts(str(path), file)
            except UserError:
                raise
            except Exception as fault:  # each library has its own
                raise UserError(
                    f"--input: {path} cannot be read ({in_words(fault)[:200]}) - check that it is"
                    " complete and has the right ending, or copy it again"
                ) from None

    def sources(self) -> list[dict]:
        """Path, bytes and sha256 of each file."""
        return [
            {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in self._read or self.needed()
        ]

    # --- Kinds of files. name: for messages; its ending gives the kind ---

    def _texts(self, name: str, file: IO[bytes]) -> Iterator[str]:
        end = name.lower()
        readers = (reader for kind, reader in READERS.items() if end.endswith(kind))
        reader = next(readers, Files._plain_text)
        return reader(self, name, unpacked(name, file))

    def _json(self, name: str, file: IO[bytes]) -> Iterator[str]:
        """The texts of JSON lines or of a JSON array."""
        for where, entry in entries(name, file):
            if any(value_at(entry, key) != value for key, value in self.keep.items()):
                self.skips[f"not {self.keep}"] += 1
                continue
            text = text_of(entry, self.keys, where)
            try:
                text.encode()
            except UnicodeEncodeError:
                # JSON can contain half a surrogate pair, which no tokenizer accepts: use U+FFFD.
                text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            yield text

    def _plain_text(self, name: str, file: IO[bytes]) -> Iterator[str]:
        yield bounded(file.read(LONGEST + 1), name).decode("utf-8-sig")

    def _table(self, name: str, file: IO[bytes]) -> Iterator[str]:
        """The rows of a Parquet file."""
        from pyarrow import parquet  # here, because importing it is slow and it is rarely needed

        number = itertools.count(1)
        table = parquet.ParquetFile(file)
        keys = {*self.keys, *(key.partition(".")[0] for key in self.keys)}
        columns = sorted(keys & {*table.schema_arrow.names})
        for batch in table.iter_batches(ROWS, columns=columns or None):
            for row in batch.to_pylist():
                yield text_of(row, self.keys, f"{name}: row {next(number)}")

    def _archive(self, name: str, file: IO[bytes]) -> Iterator[str]:
        """The documents of an archive's regular files; nothing is written to the disk."""
        with tarfile.open(fileobj=file, mode="r|", tarinfo=_Member) as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # else memory keeps them all
                is_hidden = member.name.rpartition("/")[2].startswith(".")
                content = archive.extractfile(member) if member.isreg() else None
                if content and not is_hidden:
                    yield from self._texts(f"{name}: {member.name}", content)
                elif not member.isdir():
                    self.skips["link, device or hidden file in an archive"] += 1


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


def files_in(folder: Path) -> list[Path]:
    """The files in a folder and its subfolders, by name, without hidden files and Python's caches.

    Linked folders are followed. OSError for a folder that cannot be read.
    """
    files = []
    for place, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        folders[:] = filter(_is_shown, folders)
        files += [Path(place, name) for name in filter(_is_shown, names)]
    return sorted(files)


def _is_shown(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _refuse(fault: OSError) -> None:
    raise fault


# --- Entries ---


def bounded(content: bytes, where: str) -> bytes:
    """Return the content unchanged; UserError if it is too long."""
    if len(content) > LONGEST:
        raise UserError(
            f"{where}: is longer than {LONGEST // 1_000_000} MB and would fill the memory - remove"
            " it, or cut it into pieces"
        )
    return content


def entries(name: str, file: IO[bytes]) -> Iterator[tuple[str, Any]]:
    """Each entry of a JSON file, with its place in the file."""
    for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
        where = f"{name}:{number}"
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
            if line.startswith(b"["):
                array = json_value(line + file.read(LONGEST), name)
                for place, entry in enumerate(array, 1):
                    yield f"{name}: entry {place}", entry
                return
        if line.strip():
            yield where, json_value(line, where)


def json_value(content: bytes, where: str) -> Any:
    """The value of a line or a file of JSON; UserError if it is not JSON."""
    try:
        return READ_JSON(bounded(content, where).decode("utf-8", "surrogatepass"))
    except UserError:
        raise
    except (ValueError, RecursionError) as fault:
        raise UserError(
            f"{where}: cannot be read as JSON in UTF-8 ({str(fault)[:200]}) - fix or remove it:"
            " each line must be an entry, or the whole file an array"
        ) from None


def value_at(entry: Any, key: str) -> Any:
    """The value of an entry under a (dotted) key; None if it has none."""
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
    with suppress(TypeError):  # a list with items that are not strings
        [text] = handle_jsonl([document], False, autojoin_paragraphs=True, para_joiner="\n\n")
        if isinstance(text, str):
            return text
    raise UserError(
        f"{where}: has no text under '{' or '.join(keys)}', it is {ABRIDGED.repr(entry)} - name the"
        " key of the text with --text-key, or remove the entry"
    )


# --- Packed bytes ---


def unpacked(name: str, file: IO[bytes]) -> IO[bytes]:
    """A file that is read once and unpacked according to its name, a little at a time.

    Reading a truncated file raises an error.
    """
    _, _, end = name.lower().rpartition(".")
    if end not in ("gz", "tgz", "zst"):
        return file
    if not file.peek(1):  # type: ignore[attr-defined]
        raise UserError(f"{name}: is empty, which no compressed file is - copy it again")
    if end == "zst":
        return zstd.ZstdFile(file, options=ZSTD_OPTIONS)  # type: ignore[return-value]
    return gzip.GzipFile(fileobj=file, mode="rb")  # type: ignore[return-value]


class _Member(tarfile.TarInfo):
    """A member with a strictly read header: only an empty block ends an archive.

    tarfile accepts a damaged or missing header as the end.
    """

    @classmethod
    def frombuf(cls, buf: bytes, encoding: str, errors: str) -> "tarfile.TarInfo":
        try:
            return super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            raise
        except tarfile.HeaderError as fault:
            raise tarfile.ReadError(str(fault)) from None
