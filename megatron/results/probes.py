"""What probes measured: JSON lines, one for each probe, length and place in it."""

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Required, cast

import numpy as np

from megatron.errors import UserError
from megatron.files import read_small
from megatron.results.files import LARGEST, has_lines, read_lines, write_lines
from megatron.results.row import Question, run_of
from megatron.results.table import Table
from megatron.strict_json import parse

RETRIEVAL = ("passkey", "copy", "recall")
RULER = ("multikey", "multikey_dense", "variable_tracking", "common_words", "frequent_words")
TASKS = (*RETRIEVAL, *RULER)
PROBES = (*TASKS, "receptive_field", "attention")
GROUPS = {"ruler": RULER}  # several probes by one name
AXES = {"variable_tracking": "hops", "common_words": "named", "frequent_words": "rank"}
"""The key in which a task's rows of one length differ, if it is not the depth of the answer."""

PLACES = {
    "depth": "depth (0: start)",
    "hops": "assignments to follow",
    "named": "answers named before",
    "rank": "rank (1: most frequent)",
}


class ProbeRow(Question, total=False):
    """One probe of one checkpoint at one length and, for tasks, one depth or number of AXES."""

    probe: Required[str]
    length: Required[int]  # tokens of the context
    windows: int  # contexts
    seconds: float
    reason: str | None  # why there are no numbers

    # Tasks.
    form: dict[str, int]  # sizes that define the task, such as {"chains": 4, "hops": 4}
    depth: float  # of the answer: 0 is the start of the context, 1 just before the question
    hops: int  # assignments between the asked variable and its value
    named: int  # answers that stand before the target
    rank: int  # of the asked word, by how often it occurs: 1 is the most frequent
    trials: int
    tokens: int  # targets
    probe_seed: int
    chance: float  # accuracy of guessing among all words
    guess: float | None  # accuracy of guessing among what the context offers
    accuracy: float | None  # share of targets that are the argmax
    error: float | None  # standard error of the accuracy, over trials
    low: float | None  # 95 % Wilson interval of the accuracy, over trials
    high: float | None
    log_probability: float | None  # mean over targets, in nats
    without: float | None  # the same where the context has another answer

    # The receptive field.
    reach: int  # tokens that hold 99 % of the gradient
    distances: list[int]
    cumulative: list[float]  # share of the gradient up to each distance

    # Attention.
    layers: list[str]  # the encoding of each layer, where they differ
    edges: list[int]  # [n + 1], distances between which the mass is summed
    mass: list[list[float]]  # [layers, n]
    entropy: list[list[float]]  # [layers, heads], in nats
    mean_entropy: float


def is_of_probes(path: Path) -> bool:
    """Whether the first line of a file is of tools/probe.py."""
    try:
        first, *_ = read_small(path, LARGEST).split(b"\n", 1)
        line = parse(first)
    except (OSError, ValueError):
        return False  # read_rows says what is wrong with it
    return isinstance(line, dict) and "probe" in line


def write_probes(path: Path, rows: Sequence[ProbeRow]) -> None:
    """Add rows to a file; they replace all of the same run, probe and length."""

    def measurement(row: ProbeRow) -> tuple[Hashable, ...]:
        return (*run_of(row), row["probe"], row["length"])

    measured = {measurement(row) for row in rows}
    unchanged = [row for row in existing_probes(path) if measurement(row) not in measured]
    write_lines(path, [*unchanged, *rows])


def existing_probes(path: Path) -> list[ProbeRow]:
    """The rows of a file; none if it is absent or empty."""
    return read_probes([path]) if has_lines(path) else []


def read_probes(paths: Iterable[str | Path]) -> list[ProbeRow]:
    """The rows of several files, in order; UserError for a line of another kind."""
    rows: list[ProbeRow] = []
    for path in paths:
        lines = read_lines(Path(path), kind=ProbeRow, writer="tools/probe.py")
        rows += cast("list[ProbeRow]", lines)
    return rows


def axis_of(probe: str) -> str:
    """The key in which the rows of a task at one length differ."""
    return AXES.get(probe, "depth")


def tables_of_probes(rows: Sequence[ProbeRow]) -> list[Table]:
    """For one model: the token accuracy of each task by place and length, its receptive field, and
    its attention by distance at the longest length. Only what was measured has a table."""
    rows_of: dict[str, list[ProbeRow]] = {}
    for row in rows:
        if not row.get("reason"):
            rows_of.setdefault(row["probe"], []).append(row)
    tables = []
    for task in TASKS:
        if task not in rows_of:
            continue
        axis = axis_of(task)
        cells: dict[tuple[float, int], str] = {}
        for row in rows_of[task]:
            guess = row.get("guess")
            guess_rate = "" if guess is None else f"({guess:.2g}) "
            gain = (row.get("log_probability") or 0.0) - (row.get("without") or 0.0)
            numbers = f"{row.get('accuracy') or 0.0:.2f} {guess_rate}{gain:+.2f}"
            place = cast("dict[str, float]", row).get(axis, 0.0), row["length"]
            if cells.setdefault(place, numbers) != numbers:
                raise UserError(
                    f"{task}: {row['pos_emb']} was asked twice at length {row['length']}, and its"
                    " answers differ - give the results of one call"
                )
        lengths = sorted({length for _, length in cells})
        body = []
        for place in sorted({place for place, _ in cells}):
            body.append([f"{place:g}", *(cells.get((place, length), "") for length in lengths)])
        title = f"{task}: token accuracy, (guess rate), gain in nats"
        tables.append(Table([PLACES[axis], *map(str, lengths)], body, title=title))
    if fields := rows_of.get("receptive_field"):
        body = [[str(row["length"]), str(row.get("reach"))] for row in fields]
        title = "receptive_field: tokens that hold 99 % of the gradient"
        tables.append(Table(["length", "tokens"], body, title=title))
    if looks := rows_of.get("attention"):
        longest = max(looks, key=lambda row: row["length"])
        edges = longest.get("edges", [])
        head = ["distance or further", *map(str, edges[:-1])]
        body = []
        for layer, mass in enumerate(longest.get("mass", [])):
            further = np.cumsum(mass[::-1])[::-1]
            numbers = [f"{fraction:.3f}" for fraction in further]
            body.append([f"layer {layer}", *numbers])
        title = f"attention: fraction of the probability at length {longest['length']}"
        tables.append(Table(head, body, title=title))
    return tables
