"""Files of results: JSON lines, written whole, read with the file and line of every fault."""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Required, cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from megatron.errors import UserError, control_fault, in_words
from megatron.files import read_small, write_output
from megatron.results.row import Facts, Row, measurement_of
from megatron.strict_json import parse

PICTURES = (".png", ".svg", ".pdf")
LINES = b'"config_hash"'  # what files of lines have in them
CHECKSUM = "checksum"  # the last key of a line: part of the file, not of the row
LARGEST = 1 << 30  # bytes of a file: a log of a million steps has 250 MB
adapter = cache(TypeAdapter)  # of the kinds of lines


class Record(TypedDict, total=False):
    """One line of metrics.jsonl, of a training step or a validation. Other keys may follow."""

    step: Required[int]
    kind: str  # train or valid
    seconds_per_step: float | None


# --- Rows of evaluation ---


def write_results(path: Path, rows: Sequence[Row]) -> None:
    """Add rows to a file; a row replaces the one of the same measurement.

    Raises UserError if another kind of file is in the way.
    """
    merged = {measurement_of(row): row for row in (*existing_results(path), *rows)}
    write_lines(path, merged.values())


def existing_results(path: Path) -> list[Row]:
    """The rows of a file; none if it is absent or empty. A device or a pipe is only written."""
    return read_rows([path]) if path.is_file() and path.stat().st_size > 0 else []


def read_rows(paths: Iterable[str | Path]) -> list[Row]:
    """The rows of several files, in order; a later row replaces that of the same measurement."""
    rows = [cast("Row", line) for path in paths for line in read_lines(Path(path))]
    return [*{measurement_of(row): row for row in rows}.values()]


def training_log(path: Path) -> list[Facts]:
    """The records of a training's metrics.jsonl, without a last line that a kill cut off.

    Raises OSError if it cannot be read, and ValueError, with the number of the line, if it is
    damaged.
    """
    *lines, _ = read_small(path, LARGEST).split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(facts_of_line(line, Record))
        except ValueError as fault:
            raise ValueError(f"line {number}: {fault}") from None
    return records


# --- Lines of any kind ---


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write one JSON object per line, the whole file at once; UserError for nan and infinity.

    Each line ends with a checksum of its facts, so that one damaged digit is noticed.
    """
    texts = []
    for line in lines:
        try:
            text = json.dumps({**line, CHECKSUM: checksum(line)}, allow_nan=False)
        except ValueError as fault:
            raise UserError(
                f"{path}: a number of the model is not finite ({fault}) - take an earlier"
                " checkpoint (--step)"
            ) from None
        texts.append(text + "\n")
    write_output(path, "".join(texts).encode(), LINES)


def checksum(line: Mapping[str, Any]) -> str:
    """8 hex digits of the facts of a line, whatever their order."""
    text = json.dumps(line, sort_keys=True, allow_nan=False)
    return f"{zlib.crc32(text.encode()):08x}"


def read_lines(path: Path) -> list[Facts]:
    """The rows of a file, without their checksums; UserError for a fault."""
    try:
        content = read_small(path, LARGEST)
    except OSError as fault:
        raise UserError(
            f"{path}: cannot be read ({fault.strerror}) - give files that evaluate.py wrote"
        ) from None
    rows = []
    for number, text in enumerate(content.splitlines(), 1):
        try:
            rows.append(facts_of_line(text, Row))
            rows[-1].pop("label", None)  # a name for one command
        except ValueError as fault:
            raise UserError(
                f"{path}, line {number}: is no result of evaluate.py: {fault}"
                " - remove the line and measure it again"
            ) from None
    if not rows:
        raise UserError(f"{path}: is empty - leave it out, or write results with evaluate.py")
    return rows


def facts_of_line(text: bytes, kind: type) -> Facts:
    """The facts of a line without its checksum; ValueError, in words, if they cannot be these.

    kind: the TypedDict that describes such lines. Keys that it does not know may hold anything.
    """
    facts = parse(text)
    try:
        adapter(kind).validate_python(facts, strict=True)
    except ValidationError as fault:
        raise ValueError(in_words(fault)) from None
    if facts.pop(CHECKSUM, None) not in (None, checksum(facts)):
        raise ValueError(
            "it does not agree with its checksum, it was damaged or edited (if you edited it,"
            " remove its key checksum)"
        )
    # Most lines show at once that they have none, and hold thousands of numbers.
    printable = b"\\" not in text and text.decode(errors="replace").isprintable()
    if not printable and (fault := control_fault(facts)):
        raise ValueError(fault)
    return facts
