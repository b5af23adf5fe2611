"""How far the cells of a sweep are, by the configuration's hash in checkpoints and result rows."""

import logging
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from megatron.checkpoints.manifest import read_record
from megatron.checkpoints.saved import find, latest_step
from megatron.config.load import DATA_PATHS
from megatron.config.schema import as_list
from megatron.data.parts import open_parts
from megatron.errors import UserError
from megatron.results.files import existing_results, training_log, write_lines
from megatron.results.row import COLLECTED, Row
from megatron.sweeps.lock import at_work
from megatron.sweeps.plan import Cell, Evaluation, Sweep

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class State:
    """How far a cell is.

    kind:
        waiting     nothing was kept of it, and nobody works on it
        training    a process holds its lock; likewise `evaluating`
        stopped     a checkpoint before the last step, and nobody works on it
        trained     evaluations are missing, and nobody works on it
        done        the last checkpoint and all evaluations
        failed      the last attempt; `note` is its last line
        foreign     the folder holds a run of another configuration
        damaged     a file in the folder cannot be read; `note` names it
    step: of the last checkpoint, 0 for none
    missing: evaluations without rows
    """

    kind: str
    step: int = 0
    missing: tuple[Evaluation, ...] = ()
    note: str = ""


def state_of(cell: Cell) -> State:
    """How far a cell is. A failure is shown until the next attempt begins."""
    try:
        return _state_of(cell)
    except (UserError, OSError) as fault:
        return State("damaged", note=str(fault))


def _state_of(cell: Cell) -> State:
    step = latest_step(cell.folder) or 0
    if step:
        kept = _hash_of_checkpoint(cell.folder, step)
        if kept != cell.config.hash:
            note = f"{cell.folder} holds a run of configuration {kept}, not {cell.config.hash}"
            return State("foreign", step, note=note)
    missing = cell.evaluations
    if step >= cell.steps:
        missing = tuple(one for one in cell.evaluations if not rows_of(cell, one))
        if not missing:
            return State("done", step)
    failure = cell.folder / "failure.txt"
    if failure.exists():
        return State("failed", step, missing, failure.read_text(encoding="utf-8").strip())
    busy = at_work(cell.folder)
    return State(_unfinished_kind(cell, step, busy), step, missing)


def _hash_of_checkpoint(folder: Path, step: int) -> str:
    return read_record(find(folder, step))["config_hash"]


def _unfinished_kind(cell: Cell, step: int, busy: bool) -> str:
    if step >= cell.steps:
        return "evaluating" if busy else "trained"
    if busy:
        return "training"
    return "stopped" if step else "waiting"


def described(cell: Cell, state: State) -> str:
    """A state in words: `stopped at step 200 of 1000`."""
    if state.kind in ("waiting", "done"):
        return state.kind
    if state.kind in ("trained", "evaluating"):
        count = f"{len(state.missing)} of {len(cell.evaluations)}"
        return f"{state.kind}, {count} evaluations are missing"
    if state.kind == "training":
        return f"training, checkpoint at step {state.step} of {cell.steps}"
    if state.kind == "damaged":
        return f"damaged: {state.note}"
    text = f"{state.kind} at step {state.step} of {cell.steps}"
    return f"{text}: {state.note}" if state.note else text


def rows_of(cell: Cell, evaluation: Evaluation) -> list[Row]:
    """Rows of a finished evaluation of this configuration's last step; else none."""
    rows = existing_results(cell.file(evaluation))
    wanted = (cell.config.hash, cell.steps)
    same = all((row["config_hash"], row["step"]) == wanted for row in rows)
    return rows if same else []


def finished_rows(sweep: Sweep) -> list[Row]:
    """Rows of all finished evaluations.

    Each has also `sweep`, `cell`, the size of the corpus and the seconds of a training step. If the
    data are absent, facts of the corpus in an earlier results.jsonl are used again.
    """
    earlier = _collected(sweep)
    rows: list[Row] = []
    for cell in sweep.cells:
        facts: dict[str, Any] = {"sweep": sweep.name, "cell": cell.values}
        facts |= earlier.get(cell.config.hash, {})
        facts |= _corpus_size(cell)
        facts["seconds_per_step"] = seconds_per_step(cell) or facts.get("seconds_per_step")
        for evaluation in cell.evaluations:
            try:
                of_evaluation = rows_of(cell, evaluation)
            except UserError as fault:
                logger.warning("%s: left out: %s", cell.name, fault)
                continue
            for row in of_evaluation:
                rows.append(cast(Row, {**row, **facts}))
    return rows


def _collected(sweep: Sweep) -> dict[str, dict[str, Any]]:
    """Facts in results.jsonl that the evaluations do not hold, by the configuration's hash."""
    try:
        rows = existing_results(sweep.results)
    except UserError:  # another kind of file, or a damaged one: `collect` says so
        return {}
    facts = {}
    for row in rows:
        kept = {key: value for key, value in row.items() if key in COLLECTED}
        facts[row["config_hash"]] = kept
    return facts


def other_runs(sweep: Sweep) -> list[str]:
    """Other runs in the sweep's folder: those of no cell, and of another configuration."""
    cells = {cell.name: cell for cell in sweep.cells}
    names = sorted(path.parent.name for path in sweep.folder.glob("*/cell.yml"))
    return [name for name in names if name not in cells or state_of(cells[name]).kind == "foreign"]


def collect(sweep: Sweep) -> list[Row]:
    """Write results.jsonl and return its rows; without rows nothing is written.

    Raises UserError where the rows of other cells would be lost.
    """
    rows = finished_rows(sweep)
    if not rows and sweep.results.exists() and sweep.results.stat().st_size:
        raise UserError(
            f"{sweep.results}: holds rows, and {sweep.path} has none here - another sweep's, or "
            "brought from elsewhere; move it away, or give another --folder"
        )
    if not rows:
        return rows
    existing_results(sweep.results)  # a damaged file is named, not replaced
    write_lines(sweep.results, rows)
    return rows


def unfinished(sweep: Sweep) -> list[tuple[Cell, State]]:
    """The cells that are not done, each with its state."""
    states = [(cell, state_of(cell)) for cell in sweep.cells]
    return [(cell, state) for cell, state in states if state.kind != "done"]


def absent_data(sweep: Sweep) -> list[str]:
    """The prefixes that cells name and whose token files do not exist."""
    paths: set[str] = set()
    for cell in sweep.cells:
        for key in DATA_PATHS:
            paths.update(as_list(cell.config[key]))
    return sorted(path for path in paths if not Path(f"{path}.idx").exists())


def _corpus_size(cell: Cell) -> dict[str, int]:
    """Documents and tokens of all corpora that a cell trains on."""
    try:
        files = open_parts(cell.config.data, ["train"])["train"].files
    except UserError:
        return {}
    return {
        "corpus_documents": sum(map(len, files)),
        "corpus_tokens": sum(int(tokens.tokens) for tokens in files),
    }


def seconds_per_step(cell: Cell) -> float | None:
    """Median over the log lines of a run; None where there are none.

    The first line is left out: it contains the start of the machine.
    """
    path = cell.folder / "metrics.jsonl"
    if not path.exists():
        return None
    try:
        records = training_log(path)
    except (OSError, ValueError) as fault:
        raise UserError(
            f"{path}: is damaged ({fault}) - remove that line, or the file: then the page lacks"
            " the speed of this training"
        ) from None
    logged = [record.get("seconds_per_step") for record in records if record.get("kind") == "train"]
    seconds = [value for value in logged if value]
    return statistics.median(seconds[1:]) if len(seconds) > 1 else None
