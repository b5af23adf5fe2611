"""Files of results: JSON lines, written whole, read with the file and line of every fault."""

import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Required, cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from megatron.errors import CONTROL, UserError
from megatron.files import read_small, stream, write_output
from megatron.results.row import BLOCK, Facts, Row, measurement_of, with_facts, with_regions
from megatron.strict_json import parse

PICTURES = (".png", ".svg", ".pdf")
LINES = b'"config_hash"'  # what files of lines have in them
CHECKSUM = "checksum"  # the last key of a line: part of the file, not of the row
LARGEST = 1 << 30  # bytes of a file: a log of a million steps has 250 MB
WHOLE = 2**63  # whole numbers are smaller
adapter = cache(TypeAdapter)  # of the kinds of lines
ACCURACIES = ("accuracy", "token_accuracy")
COUNTS = ("length", "tokens", "windows")  # at least one of each


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
    """The rows of a file; none if it is absent or empty."""
    return read_rows([path]) if has_lines(path) else []


def read_rows(paths: Iterable[str | Path]) -> list[Row]:
    """The rows of several files, in order; a later row replaces that of the same measurement.

    A row that was measured again outside of its sweep still belongs to the sweep's cell.
    """
    rows: dict[tuple, Row] = {}
    for path in paths:
        lines = read_lines(Path(path), kind=Row, writer="evaluate.py")
        for line in lines:
            row = cast("Row", line)
            measurement = measurement_of(row)
            replaced = rows.get(measurement, row)
            cell = replaced.get("cell")
            if cell and not row.get("cell"):
                row = with_facts(row, {"sweep": replaced.get("sweep"), "cell": cell})
            rows[measurement] = row
    return with_regions(list(rows.values()))


def training_log(path: Path) -> list[Record]:
    """The records of a training's metrics.jsonl, without a last line that a kill cut off.

    Raises OSError if it cannot be read, and ValueError, with the number of the line, if it is
    damaged.
    """
    *lines, _ = read_small(path, LARGEST).split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(record_of(line))
        except ValueError as fault:
            raise ValueError(f"line {number}: {fault}") from None
    return records


def record_of(line: bytes) -> Record:
    """The record in a line of metrics.jsonl; ValueError if it is damaged or was edited."""
    record = parse(line)
    if not isinstance(record, dict):
        raise ValueError("it is not a record")
    if record.pop(CHECKSUM, None) not in (None, checksum(record)):
        raise ValueError("it does not agree with its checksum")
    if fault := fault_of(record, Record):
        raise ValueError(fault)
    return cast("Record", record)


# --- Lines of any kind ---


def has_lines(path: Path) -> bool:
    """Whether a file exists and is not empty. A device or a pipe is only written."""
    return path.exists() and not stream(path) and path.stat().st_size > 0


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


def read_lines(path: Path, *, kind: type, writer: str) -> list[Facts]:
    """The objects of a file, without their checksums; UserError for a fault.

    kind: the TypedDict that describes a line; writer: the tool that writes such files
    """
    give = f"give files of {writer}"
    try:
        content = read_small(path, LARGEST)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such results file - {writer} writes one") from None
    except OSError as fault:
        raise UserError(f"{path}: cannot be read ({fault.strerror}) - {give}") from None
    rows = []
    for number, text in enumerate(content.splitlines(), 1):
        where = f"{path}, line {number}"
        try:
            facts = parse(text)
        except ValueError as fault:
            raise UserError(
                f"{where}: is no result of {writer}, {fault} - {give}, or remove a damaged line"
                " and measure it again"
            ) from None
        if not isinstance(facts, dict):
            raise UserError(f"{where}: is no result of {writer}, it is no JSON object - {give}")
        again = f"remove the line, and measure it again with {writer}"
        written = facts.pop(CHECKSUM, None)
        if written not in (None, checksum(facts)):
            raise UserError(
                f"{where}: does not agree with its checksum, it was damaged or edited"
                f" - {again} (if you edited it, remove its key checksum)"
            )
        needed = [key for key in kind.__annotations__ if key in kind.__required_keys__]
        if missing := [key for key in needed if key not in facts]:
            raise UserError(
                f"{where}: is no result of {writer}, it lacks {', '.join(missing)} - {give}"
            )
        if fault := fault_of(facts, kind):
            raise UserError(f"{where}: {fault} - {again}")
        rows.append(facts)
    if not rows:
        raise UserError(f"{path}: is empty - leave it out, or write results with {writer}")
    return rows


# --- What every line must be ---


def fault_of(line: Mapping[str, Any], kind: type) -> str | None:
    """The fault of a line's facts, in words that follow its place, or None.

    kind: the TypedDict that describes such lines. Keys that it does not know may hold anything.
    """
    for value in _values(line):
        if isinstance(value, str) and CONTROL.search(value):
            return f"it has a control character in {ascii(value)[:60]}"
        if isinstance(value, int) and abs(value) >= WHOLE:
            return "it has a number of too many digits"
    try:
        adapter(kind).validate_python(line, strict=True)
    except ValidationError as fault:
        first = fault.errors(include_url=False)[0]
        value = ascii(first["input"])[:40]
        return f"its {first['loc'][0]} is {value}: {first['msg'].lower()}"
    for key in COUNTS:
        unanswered = key == "tokens" and line.get("reason")  # retrieval: no target was asked
        if key in line and line[key] < (0 if unanswered else 1):
            return f"its {key} is {line[key]}, not 1 or more"
    return _misfit(line) if kind is Row else None


def _values(value: Any) -> Iterator[Any]:
    """Every text and number in a value, keys included. Tables repeat texts on the terminal."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for element in value:
            yield from _values(element)
    else:
        yield value


def _misfit(row: Mapping[str, Any]) -> str | None:
    """Which numbers of a row cannot stand together, or None: tables and intervals count on them."""
    loss, windows = row["loss"], row["windows"]
    numbers = [key for key in ("perplexity", *ACCURACIES) if row.get(key) is not None]
    if loss is None and numbers:
        return f"its loss is null, its {numbers[0]} {row[numbers[0]]:g}"
    if loss is not None and loss < 0:
        return f"its loss is {loss:g}, below 0"
    shares = [row.get(key) or 0 for key in ACCURACIES] + (row.get("window_accuracies") or [])
    if not all(0 <= share <= 1 for share in shares):
        return "it has an accuracy that is not between 0 and 1"
    some_are_empty = "all_tokens" in row
    for key in ("window_losses", "window_accuracies"):
        count = len(row.get(key) or ())
        if count != windows and count and not (some_are_empty and count < windows):
            return f"it has {count} {key} of {windows} windows"
    blocks = row.get("block_losses") or []
    block_tokens = row.get("block_tokens") or [BLOCK] * len(blocks)
    edges = row.get("position_edges") or [0]
    for key, sizes in (
        ("window_losses", row.get("window_tokens")),
        ("block_losses", block_tokens),
        ("position_losses", [end - start for start, end in itertools.pairwise(edges)]),
    ):
        count = len(row.get(key) or ())
        if loss is None and count == 0:
            continue
        if sizes is not None and (len(sizes) != count or min(sizes, default=1) < 1):
            return f"its {count} {key} do not fit their {len(sizes)} numbers of tokens"
    if blocks and sum(block_tokens) != row["tokens"]:
        return f"its blocks have {sum(block_tokens)} tokens, the row {row['tokens']}"
    return None
