"""Files of results: JSON lines, written whole, read with the file and line of every fault."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from megatron.errors import UserError
from megatron.files import write_text
from megatron.results.row import NEEDED, Facts, Row, measurement_of, with_facts

PICTURES = (".png", ".svg", ".pdf")


def check_output(path: Path) -> None:
    """UserError where results could not be written, or would replace another kind of file.

    Called before anything is measured.
    """
    if path.suffix.lower() in PICTURES:
        lines = path.with_suffix(".jsonl")
        raise UserError(f"--output: {path} is the name of a picture - name the lines {lines}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(
            f"--output: {path.parent} cannot be made ({fault.strerror}) - choose another place"
        ) from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--output: {path} cannot be written - choose another place")
    _existing_output(path)


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
        for line in read_lines(Path(path), needed=NEEDED, writer="evaluate.py"):
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
    """Write one JSON object per line, the whole file at once; ValueError for nan and infinity."""
    texts = [json.dumps(line, allow_nan=False) + "\n" for line in lines]
    write_text(path, "".join(texts))


def read_lines(path: Path, *, needed: Sequence[str], writer: str) -> list[Facts]:
    """The objects of a file; UserError for a fault.

    needed: the keys that every line has; writer: the tool that writes such files
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such results file - {writer} writes one") from None
    except (OSError, UnicodeDecodeError) as fault:
        raise UserError(f"{path}: cannot be read as text ({fault})") from None
    if not lines:
        raise UserError(f"{path}: is empty - leave it out, or write results with {writer}")
    found = []
    for number, line in enumerate(lines, 1):
        facts = _object(line)
        missing = [key for key in needed if key not in facts]
        if missing:
            fault = f"it lacks {', '.join(missing)}" if facts else "it is no JSON object"
            raise UserError(
                f"{path}, line {number}: is no result of {writer}, {fault} - give files of {writer}"
            )
        found.append(facts)
    return found


def _object(line: str) -> Facts:
    """A line as an object; empty where it is anything else."""
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
