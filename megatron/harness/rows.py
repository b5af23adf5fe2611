"""What tasks of the harness gave: JSON lines, one for each task, metric and length."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Required, cast

from megatron.errors import UserError
from megatron.results.columns import in_columns
from megatron.results.files import has_lines, read_lines, write_lines
from megatron.results.row import Facts, Question

COLUMNS = ("task", "metric", "shots", "documents", "length", "value", "± standard error")


class TaskRow(Question, total=False):
    """One metric of one task on one checkpoint, which sees texts of at most `length` tokens."""

    task: Required[str]
    metric: Required[str]  # such as acc
    filter: str  # what the harness did to answers first; none: nothing
    length: Required[int]
    stride: int  # of rolling windows
    value: Required[float | None]
    stderr: float | None  # as the harness estimates it
    documents: int  # that were asked
    of_documents: int  # that the task has
    shots: int  # examples in each prompt
    task_version: str
    harness: str  # version of lm-evaluation-harness


NEEDED = tuple(key for key in TaskRow.__annotations__ if key in TaskRow.__required_keys__)
ANSWERS = ("value", "stderr", "of_documents", "commit", "code", "attention_backend", "device")


def rows_of(results: Mapping[str, Any], facts: Facts) -> list[TaskRow]:
    """The rows of one call of the harness; facts: what all of them share."""
    rows = []
    for task, metrics in results["results"].items():
        counts = results["n-samples"].get(task, {})
        about = {
            "task": task,
            "documents": counts.get("effective"),
            "of_documents": counts.get("original"),
            "shots": results["n-shot"].get(task),
            "task_version": str(results["versions"].get(task)),
        }
        known = {key: value for key, value in about.items() if value is not None}
        for name, value in metrics.items():
            if "," not in name or "_stderr," in name:
                continue
            metric, _, which = name.partition(",")
            stderr = metrics.get(f"{metric}_stderr,{which}")
            numbers = {"value": number(value), "stderr": number(stderr)}
            rows.append(
                cast("TaskRow", facts | known | {"metric": metric, "filter": which} | numbers)
            )
    return rows


def number(value: Any) -> float | None:
    """A number of the harness, which writes "N/A" for none."""
    return float(value) if isinstance(value, int | float) else None


def write_rows(path: Path, rows: Sequence[TaskRow]) -> None:
    """Add rows to a file; a row replaces the one that answers the same question."""
    merged = {_question(row): row for row in (*existing_rows(path), *rows)}
    write_lines(path, merged.values())


def existing_rows(path: Path) -> list[TaskRow]:
    """The rows of a file, none where it is absent; UserError where it holds something else."""
    if not has_lines(path):
        return []
    try:
        lines = read_lines(path, kind=TaskRow, needed=NEEDED, writer="evaluate.py --tasks")
    except UserError as fault:
        raise UserError(
            f"--output: {path} exists and holds something else - choose another name ({fault})"
        ) from None
    return [cast("TaskRow", line) for line in lines]


def _question(row: TaskRow) -> str:
    return repr(sorted((key, value) for key, value in row.items() if key not in ANSWERS))


def table(rows: Iterable[TaskRow]) -> str:
    """A line for each row."""
    return "\n".join(in_columns([COLUMNS, *(_cells(row) for row in rows)]))


def _cells(row: TaskRow) -> tuple[str, ...]:
    value, stderr = row["value"], row.get("stderr")
    documents, all_of_them = row.get("documents"), row.get("of_documents")
    asked = str(documents) if documents == all_of_them else f"{documents} of {all_of_them}"
    named = row["metric"]
    if row.get("filter", "none") != "none":
        named = f"{named} ({row.get('filter')})"
    return (
        row["task"],
        named,
        str(row.get("shots", "")),
        asked,
        str(row["length"]),
        _shown(value),
        _shown(stderr),
    )


def _shown(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value:.4f}" if abs(value) < 10_000 else f"{value:.4g}"
