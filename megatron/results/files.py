"""Files of results: JSON lines, written whole, read with the file and line of every fault."""

import itertools
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from megatron.errors import UserError
from megatron.files import write_text
from megatron.results.check import fault_of
from megatron.results.row import NEEDED, Facts, Row, measurement_of, with_facts
from megatron.strict_json import parse

PICTURES = (".png", ".svg", ".pdf")
CHECKSUM = "checksum"  # the last key of a line: part of the file, not of the row
LONGEST = 1 << 26  # bytes of a line: a row of a million blocks has 10 MB


def check_output(path: Path) -> None:
    """UserError where results could not be written, or would replace another kind of file.

    Called before anything is measured.
    """
    check_place(path)
    _existing_output(path)


def check_place(path: Path) -> None:
    """UserError where lines could not be written; the folder is made if it is missing."""
    if path.suffix.lower() in PICTURES:
        lines = path.with_suffix(".jsonl")
        raise UserError(f"--output: {path} is the name of a picture - name the lines {lines}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(
            f"--output: {path.parent} cannot be made ({fault.strerror}) - choose another place"
        ) from None
    if path.is_dir():
        raise UserError(f"--output: {path} is a folder - name a file in it, as in {path}/a.jsonl")
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"--output: {path} cannot be written - choose another place")


def write_results(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a file; a row replaces the one of the same measurement.

    UserError where another kind of file is in the way.
    """
    merged = {measurement_of(row): row for row in (*_existing_output(path), *rows)}
    write_lines(path, merged.values())


def _existing_output(path: Path) -> list[Row]:
    try:
        return existing_results(path)
    except UserError as fault:
        raise UserError(
            f"--output: {path} exists and holds something else - choose another name ({fault})"
        ) from None


def existing_results(path: Path) -> list[Row]:
    """The rows of a file; none where it is absent or empty."""
    return read_results([path]) if has_lines(path) else []


def read_results(paths: Iterable[str | Path]) -> list[Row]:
    """The rows of several files, in order; a later row replaces that of the same measurement."""
    rows: dict[tuple, Row] = {}
    for path in paths:
        for line in read_lines(Path(path), kind=Row, needed=NEEDED, writer="evaluate.py"):
            row = cast("Row", line)
            measurement = measurement_of(row)
            rows[measurement] = _in_cell_of(rows.get(measurement), row)
    return list(rows.values())


def _in_cell_of(replaced: Row | None, row: Row) -> Row:
    """A row that was measured again outside of its sweep still belongs to the sweep's cell."""
    if replaced is None or not replaced.get("cell") or row.get("cell"):
        return row
    return with_facts(row, {"sweep": replaced.get("sweep"), "cell": replaced.get("cell")})


# --- Lines of any kind ---


def has_lines(path: Path) -> bool:
    """Whether a file exists and is not empty."""
    return path.exists() and path.stat().st_size > 0


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, the whole file at once; ValueError for nan and infinity.

    Each line ends with a checksum of its facts, so that one damaged digit is noticed.
    """
    texts = []
    for line in lines:
        text = json.dumps({**line, CHECKSUM: checksum(line)}, allow_nan=False)
        texts.append(text + "\n")
    write_text(path, "".join(texts))


def checksum(line: Mapping[str, Any]) -> str:
    """8 hex digits of the facts of a line, whatever their order."""
    text = json.dumps(line, sort_keys=True, allow_nan=False)
    return f"{zlib.crc32(text.encode()):08x}"


def read_lines(path: Path, *, kind: type, needed: Sequence[str], writer: str) -> list[Facts]:
    """The objects of a file, without their checksums; UserError for a fault.

    kind: the TypedDict that describes a line
    needed: the keys that every line has; writer: the tool that writes such files
    """
    found = []
    for number, text in enumerate(_raw_lines(path, writer), 1):
        where = f"{path}, line {number}"
        facts = _parsed(text, where, writer)
        missing = [key for key in needed if key not in facts]
        if missing:
            raise UserError(
                f"{where}: is no result of {writer}, it lacks {', '.join(missing)}"
                f" - give files of {writer}"
            )
        if fault := fault_of(facts, kind):
            raise UserError(f"{where}: {fault} - {_again(writer)}")
        found.append(facts)
    if not found:
        raise UserError(f"{path}: is empty - leave it out, or write results with {writer}")
    return found


def _raw_lines(path: Path, writer: str) -> Iterator[bytes]:
    """The lines of a file without their ends; none is longer than LONGEST."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UserError(f"{path}: is no regular file - give files of {writer}")
    try:
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(LONGEST + 1)
                if not line:
                    return
                if len(line) > LONGEST:
                    raise UserError(
                        f"{path}, line {number}: is longer than {LONGEST >> 20} MiB, it is no"
                        f" result of {writer} - give files of {writer}"
                    )
                yield line.rstrip(b"\r\n")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such results file - {writer} writes one") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder - give a file of {writer}") from None
    except OSError as fault:
        raise UserError(
            f"{path}: cannot be read ({fault.strerror}) - give a file of {writer} that is yours to"
            " read"
        ) from None


def _parsed(text: bytes, where: str, writer: str) -> Facts:
    """The facts of a line that is what was written."""
    try:
        facts = parse(text)
    except ValueError as fault:
        raise UserError(
            f"{where}: is no result of {writer}, {fault} - give files of {writer}, or remove a"
            " damaged line and measure it again"
        ) from None
    if not isinstance(facts, dict):
        raise UserError(
            f"{where}: is no result of {writer}, it is no JSON object - give files of {writer}"
        )
    written = facts.pop(CHECKSUM, None)
    if written not in (None, checksum(facts)):
        raise UserError(
            f"{where}: does not agree with its checksum, it was damaged or edited"
            f" - {_again(writer)} (if you edited it, remove its key checksum)"
        )
    return facts


def _again(writer: str) -> str:
    return f"remove the line, and measure it again with {writer}"
