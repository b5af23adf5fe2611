"""What probes leave behind: JSON lines, one for each probe, length and depth."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from megatron.errors import UserError
from megatron.files import write_text
from megatron.results.row import Row, run_of

TASKS = ("passkey", "copy", "recall")  # of retrieval
PROBES = (*TASKS, "receptive_field", "attention")
NEEDED = ("pos_emb", "probe", "length", "step", "config_hash")


def write_probes(path: Path, rows: Sequence[Row]) -> None:
    """The whole file at once."""
    write_text(path, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))


def read_probes(paths: Iterable[str | Path]) -> list[Row]:
    """The lines of several files of probes; UserError for a line that is none."""
    rows = []
    for path in map(Path, paths):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            raise UserError(f"{path}: cannot be read as text ({fault})") from None
        for number, line in enumerate(lines, 1):
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                rows.append(None)
            if not isinstance(rows[-1], dict) or any(key not in rows[-1] for key in NEEDED):
                raise UserError(f"{path}, line {number}: is no result of tools/probe.py")
    return rows


def joined(there: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """Rows that are there and new ones, which replace all of the same run, probe and length."""

    def question(row: Row) -> tuple:
        return (*run_of(row), row["probe"], row["length"])

    asked = {question(row) for row in rows}
    return [*(row for row in there if question(row) not in asked), *rows]


def cells(rows: Sequence[Row], task: str) -> dict[tuple[float, int], tuple[float, float] | None]:
    """Of one model and one task, by depth and length: accuracy, and the log-probability that the answer in the context
    gains the targets, in nats; None where nothing could be measured."""
    return {
        (row["depth"], row["length"]): None
        if row["accuracy"] is None
        else (row["accuracy"], row["log_probability"] - row["without"])
        for row in rows
        if row["probe"] == task
    }
