"""What of a sweep is done, by the configuration's hash in checkpoints and result rows; all rows in one file."""

import json
import statistics
from dataclasses import dataclass

from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.results.files import existing_results, read_results, write_lines
from megatron.results.row import COLLECTED, Row
from megatron.sweeps.plan import Cell, Evaluation, Sweep
from megatron.training.checkpoint import find, latest_step


@dataclass(frozen=True)
class State:
    """kind: waiting, training, evaluating, done, failed (the last attempt), foreign (another run is in the folder)."""

    kind: str
    step: int = 0
    missing: tuple[Evaluation, ...] = ()
    note: str = ""


def state_of(cell: Cell) -> State:
    """How far a cell is; a failure is said until the next attempt begins."""
    step = latest_step(cell.folder) or 0
    if step:
        meta = json.loads((find(cell.folder, step) / "checkpoint.json").read_text())
        if meta["config_hash"] != cell.config.hash:
            there, wanted = meta["config_hash"], cell.config.hash
            return State(
                "foreign",
                step,
                note=f"{cell.folder} holds a run of configuration {there}, not {wanted}",
            )
    missing = tuple(one for one in cell.evaluations if not rows_of(cell, one))
    failure = cell.folder / "failure.txt"
    if step < cell.steps:
        kind, missing = "training" if step else "waiting", cell.evaluations
    else:
        kind = "evaluating" if missing else "done"
    if failure.exists() and kind != "done":
        return State("failed", step, missing, failure.read_text(encoding="utf-8").strip())
    return State(kind, step, missing)


def rows_of(cell: Cell, evaluation: Evaluation) -> list[Row]:
    """Rows of a finished evaluation of this configuration's last step; none where there are others."""
    path = cell.file(evaluation)
    rows = existing_results(path)
    same = all(row["config_hash"] == cell.config.hash and row["step"] == cell.steps for row in rows)
    return rows if same else []


def finished_rows(sweep: Sweep) -> list[Row]:
    """Rows of all finished evaluations with `sweep`, `cell`, what is known of the corpus' size and the seconds of a
    training step; what was known when they were collected before stays known away from the data."""
    rows, known = [], _collected(sweep)
    for cell in sweep.cells:
        about = {
            "sweep": sweep.name,
            "cell": cell.values,
            **known.get(cell.config.hash, {}),
            **_size(cell),
        }
        about["seconds_per_step"] = seconds_per_step(cell) or about.get("seconds_per_step")
        for evaluation in cell.evaluations:
            rows += [row | about for row in rows_of(cell, evaluation)]
    return rows


def _collected(sweep: Sweep) -> dict[str, Row]:
    """Facts of the rows of results.jsonl that their evaluations do not hold, by the configuration's hash."""
    try:
        rows = read_results([sweep.results])
    except UserError:  # none yet, or something else, which `collect` leaves alone
        return {}
    return {row["config_hash"]: {key: row[key] for key in COLLECTED if key in row} for row in rows}


def other_runs(sweep: Sweep) -> list[str]:
    """What else is in the sweep's folder: runs that are no cells, and cells that hold another configuration's run."""
    cells = {cell.name: cell for cell in sweep.cells}
    found = sorted(path.parent.name for path in sweep.folder.glob("*/cell.yml"))
    return [name for name in found if name not in cells or state_of(cells[name]).kind == "foreign"]


def collect(sweep: Sweep) -> list[Row]:
    """Write results.jsonl, and return its rows; UserError where the rows of other cells would be lost."""
    rows = finished_rows(sweep)
    if not sweep.folder.exists():
        return rows
    if not rows and sweep.results.exists() and sweep.results.stat().st_size:
        raise UserError(
            f"{sweep.results}: holds rows, and {sweep.path} has none here - another sweep's, or brought from elsewhere;"
            " move it away, or give another --folder"
        )
    write_lines(sweep.results, rows)
    return rows


def _size(cell: Cell) -> dict[str, int]:
    try:
        tokens = TokenFile.open(cell.config.data.data_path or "")
    except UserError:
        return {}
    return {"corpus_documents": len(tokens), "corpus_tokens": int(tokens.tokens)}


def seconds_per_step(cell: Cell) -> float | None:
    """Median over the log lines of a run, without the first, which starts the machine up; None where there are none."""
    path = cell.folder / "metrics.jsonl"
    if not path.exists():
        return None
    seconds = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:  # a line that a kill cut off
            continue
        if record.get("kind") == "train" and record.get("seconds_per_step"):
            seconds.append(record["seconds_per_step"])
    return statistics.median(seconds[1:]) if len(seconds) > 1 else None
