"""Documents from files: JSON lines (plain, .gz, .zst as in the Pile), text, Parquet and Arrow."""

import codecs
import gzip
import hashlib
import json
import logging
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import zstandard

from megatron.errors import UserError

log = logging.getLogger(__name__)

CHUNK = 1 << 20
WINDOW = 1 << 31  # zstd's largest: the Pile was compressed with long windows


class Files:
    """A corpus of the user's files.

    inputs: files and folders; key: what holds the text in JSON lines and tables.
    Raises UserError for what is missing or cannot be read as text.
    """

    def __init__(self, name: str, inputs: Sequence[str | Path], key: str = "text"):
        self.name = name
        self.key = key
        self.skipped = 0
        self.paths = list_files(inputs)
        _check_kinds(self.paths)

    def documents(self) -> Iterator[str]:
        """The text of every document: files as given, folders by name.

        Raises UserError at the first fault.
        """
        for path in self.paths:
            read = _reader(path) or _whole_text
            for text in read(path, self.key):
                yield _encodable(text)

    def sources(self) -> list[dict[str, Any]]:
        """Path, bytes and sha256 of each file."""
        entries = []
        for path in self.paths:
            size = path.stat().st_size
            entries.append({"path": str(path), "bytes": size, "sha256": _sha256(path)})
        return entries


def list_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that inputs name, folders opened up. Raises UserError for what is missing."""
    files: list[Path] = []
    for path in map(Path, inputs):
        if not path.exists():
            raise UserError(
                f"--input: there is no {path} (looked from {Path.cwd()}) - give existing files or "
                "folders"
            )
        if not path.is_dir():
            files.append(path)
            continue
        inside = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        if not inside:
            raise UserError(f"--input: the folder {path} is empty - give one with files in it")
        files += inside
    return files


def _check_kinds(paths: Sequence[Path]) -> None:
    """Raise UserError for a file of unknown kind that is not text; say which are taken as text."""
    unknown = [path for path in paths if _reader(path) is None]
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


def _reader(path: Path) -> "Reader | None":
    """What reads files of this kind; None for a kind that is not known."""
    for suffix, reader in READERS.items():
        if path.name.endswith(suffix):
            return reader
    return None


def _json_lines(path: Path, key: str) -> Iterator[str]:
    for number, line in enumerate(_lines(_chunks(path)), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            entry = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
        except UnicodeDecodeError:
            raise UserError(f"{where}: is not UTF-8 - convert the file") from None
        except json.JSONDecodeError as error:
            raise UserError(
                f"{where}: is not JSON ({error.msg}, column {error.colno}) "
                "- mend or remove the line"
            ) from None
        yield _entry_text(entry, key, where)


def _entry_text(entry: Any, key: str, where: str) -> str:
    """The text of one entry, as lm_dataformat stores it.

    An entry is a bare string, or an object whose `key` holds text or a list of paragraphs.
    """
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, dict) or key not in entry:
        fault = "is not an object"
        if isinstance(entry, dict):
            fault = f"has the keys {', '.join(entry) or '(none)'}"
        raise UserError(
            f'{where}: {fault}, expected {{"{key}": "..."}} - say which one holds the text with '
            "--text-key"
        )
    text = entry[key]
    if isinstance(text, list) and all(isinstance(part, str) for part in text):
        text = "\n\n".join(text)
    if not isinstance(text, str):
        raise UserError(
            f"{where}: '{key}' is {type(text).__name__}, not text - choose another with --text-key"
        )
    return text


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for chunk in chunks:
        *whole, last = chunk.split(b"\n")
        if whole:
            yield b"".join([*rest, whole[0]])
            yield from whole[1:]
            rest = []
        rest.append(last)
    if tail := b"".join(rest):
        yield tail


def _chunks(path: Path) -> Iterator[bytes]:
    """The contents of a file, unpacked by its suffix.

    A file that is cut off is a UserError, never a shorter corpus.
    """
    if path.suffix == ".zst":
        yield from _unpacked(path)
        return
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: is cut off or damaged ({error}) - copy it again") from None


def _unpacked(path: Path) -> Iterator[bytes]:
    # Not zstandard's stream_reader: it ends after the first frame, also where that is cut off.
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW)
    frame = None
    packed = b""
    with path.open("rb") as file:
        while packed or (packed := file.read(CHUNK)):
            if frame is None:
                frame = decompressor.decompressobj()
            try:
                yield frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise UserError(
                    f"{path}: is damaged or not zstd ({error}) - copy it again"
                ) from None
            packed = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
    if frame is not None:
        raise UserError(f"{path}: is cut off inside its last zstd frame - copy it again")


def _whole_text(path: Path, key: str) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 (byte {error.start}) - convert the file") from None


def _table(path: Path, key: str) -> Iterator[str]:
    import datasets  # here, because it is slow to import and rarely needed

    kind = path.suffix.removeprefix(".")
    try:
        rows = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True)
        for number, row in enumerate(rows, 1):
            yield _entry_text(row, key, f"{path}: row {number}")
    except UserError:
        raise
    except Exception as error:  # datasets and pyarrow have many
        raise UserError(f"{path}: cannot be read as {kind} ({error}) - copy it again") from None


Reader = Callable[[Path, str], Iterator[str]]  # (file, key) -> documents
READERS: dict[str, Reader] = {
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".jsonl.zst": _json_lines,
    ".txt": _whole_text,
    ".parquet": _table,
    ".arrow": _table,
}


def _encodable(text: str) -> str:
    """JSON can spell half a surrogate pair, which no tokenizer takes: it becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
