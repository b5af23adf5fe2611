"""Files of result rows: JSON lines."""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.errors import UserError
from megatron.files import Beside
from megatron.results.row import Row, measurement_of

PICTURES = (".png", ".svg", ".pdf")
NEEDED = ("pos_emb", "length", "windows", "tokens", "loss", "perplexity", "step", "config_hash")


def check_output(path: Path) -> None:
    """UserError, before anything is measured, where results could not be written or would replace something else."""
    if path.suffix.lower() in PICTURES:
        raise UserError(
            f"--output: {path} is the name of a picture - name the lines {path.with_suffix('.jsonl')}"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(
            f"--output: {path.parent} cannot be made ({fault.strerror}) - choose another place"
        ) from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--output: {path} cannot be written - choose another place")
    _check_replaceable(path)


def write_results(path: Path, rows: Sequence[Row]) -> None:
    """One JSON object per line, the whole file at once. Results that are there stay, but for the same measurement done
    again; UserError where another kind of file is in the way."""
    _check_replaceable(path)
    there = read_results([path]) if path.exists() and path.stat().st_size else []
    merged = {measurement_of(row): row for row in [*there, *rows]}
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in merged.values())
    with Beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _check_replaceable(path: Path) -> None:
    if path.exists() and path.stat().st_size:
        try:
            read_results([path])
        except UserError as fault:
            raise UserError(
                f"--output: {path} is there and holds something else - choose another name ({fault})"
            ) from None


def read_results(paths: Iterable[str | Path]) -> list[Row]:
    """The lines of several results files, in order; of two lines for the same measurement the later counts."""
    rows: dict[tuple, Row] = {}
    for path in map(Path, paths):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise UserError(
                f"{path}: there is no such results file - evaluate.py writes one"
            ) from None
        except (OSError, UnicodeDecodeError) as fault:
            raise UserError(f"{path}: cannot be read as text ({fault})") from None
        if not lines:
            raise UserError(f"{path}: is empty - leave it out, or write results with evaluate.py")
        for number, line in enumerate(lines, 1):
            row = _row(line, f"{path}, line {number}")
            rows[measurement_of(row)] = row
    return list(rows.values())


def _row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = None
    missing = [key for key in NEEDED if key not in row] if isinstance(row, dict) else list(NEEDED)
    if not isinstance(row, dict) or missing:
        raise UserError(f"{where}: is no result of evaluate.py, it lacks {', '.join(missing)}")
    return row
