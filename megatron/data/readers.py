"""Documents from files: JSON lines (plain, .gz, .zst as in the Pile), text, Parquet and Arrow tables."""

import gzip
import hashlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import zstandard

from megatron.errors import UserError

CHUNK = 1 << 20
WINDOW = 1 << 31  # zstd's largest: the Pile was compressed with long windows


class Files:
    """A corpus of the user's files. `documents()` reads them anew; `sources()` tells what was read."""

    def __init__(self, name: str, inputs: Sequence[str | Path], key: str = "text"):
        self.name, self.key, self.skipped = name, key, 0
        self.paths = list_files(inputs)

    def documents(self) -> Iterator[str]:
        """The text of every document, files as given, folders by name; UserError at the first fault."""
        for path in self.paths:
            yield from map(_encodable, READERS[_kind(path)](path, self.key))

    def sources(self) -> list[dict[str, Any]]:
        """Path, bytes and sha256 of each file."""
        return [
            {"path": str(p), "bytes": p.stat().st_size, "sha256": _sha256(p)} for p in self.paths
        ]


def list_files(inputs: Sequence[str | Path]) -> list[Path]:
    """The files that inputs name, folders opened up; UserError for what is missing or of a kind that is not read."""
    found: list[Path] = []
    for path in map(Path, inputs):
        if not path.exists():
            raise UserError(
                f"--input: there is no {path} (looked from {Path.cwd()}) - give existing files or folders"
            )
        inside = sorted(p for p in path.rglob("*") if p.is_file() and not p.name.startswith("."))
        if path.is_dir() and not inside:
            raise UserError(f"--input: the folder {path} is empty - give one with files in it")
        found += inside if path.is_dir() else [path]
    for path in found:
        _kind(path)
    return found


def _kind(path: Path) -> str:
    for kind in READERS:
        if path.name.endswith(kind):
            return kind
    raise UserError(
        f"--input: {path} is of a kind that is not read - use {', '.join(READERS)} "
        f"(name the files one by one where a folder holds others too)"
    )


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
                f"{where}: is not JSON ({error.msg}, column {error.colno}) - mend or remove the line"
            ) from None
        yield _entry_text(entry, key, where)


def _entry_text(entry: Any, key: str, where: str) -> str:
    """As lm_dataformat: an object with the key, whose value is text or a list of paragraphs, or a bare string."""
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, dict) or key not in entry:
        there = (
            f"has the keys {', '.join(entry) or '(none)'}"
            if isinstance(entry, dict)
            else "is not an object"
        )
        raise UserError(
            f'{where}: {there}, expected {{"{key}": "..."}} - say which one holds the text with --text-key'
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
    """The contents of a file, unpacked by its suffix. A file that is cut off is a UserError, never a shorter corpus."""
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
    # Not zstandard's stream_reader: it ends after the first frame and takes a cut-off one for whole.
    packed = zstandard.ZstdDecompressor(max_window_size=WINDOW)
    frame, rest = None, b""
    with path.open("rb") as file:
        while rest or (rest := file.read(CHUNK)):
            frame = frame or packed.decompressobj()
            try:
                yield frame.decompress(rest)
            except zstandard.ZstdError as error:
                raise UserError(
                    f"{path}: is damaged or not zstd ({error}) - copy it again"
                ) from None
            rest = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame:
        raise UserError(f"{path}: is cut off inside its last zstd frame - copy it again")


def _whole_text(path: Path, key: str) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 (byte {error.start}) - convert the file") from None


def _table(path: Path, key: str) -> Iterator[str]:
    import datasets  # here, because it is slow to import and rarely needed

    try:
        rows = datasets.load_dataset(
            path.suffix[1:], data_files=str(path), split="train", streaming=True
        )
        for number, row in enumerate(rows, 1):
            yield _entry_text(row, key, f"{path}: row {number}")
    except UserError:
        raise
    except Exception as error:  # datasets and pyarrow have many
        raise UserError(
            f"{path}: cannot be read as {path.suffix[1:]} ({error}) - copy it again"
        ) from None


READERS: dict[str, Callable[[Path, str], Iterator[str]]] = {
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
