"""What probes measured: JSON lines, one for each probe, length and depth."""

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Required, cast

from megatron.results.files import LONGEST, has_lines, read_lines, write_lines
from megatron.results.row import Question, run_of
from megatron.strict_json import parse

TASKS = ("passkey", "copy", "recall")  # of retrieval
PROBES = (*TASKS, "receptive_field", "attention")


class ProbeRow(Question, total=False):
    """One probe of one checkpoint at one length and, for retrieval, one depth."""

    probe: Required[str]
    length: Required[int]  # tokens of the context
    windows: int  # contexts
    seconds: float
    reason: str | None  # why there are no numbers

    # Retrieval.
    depth: float  # of the answer: 0 is the start of the context, 1 just before the question
    trials: int
    tokens: int  # targets
    probe_seed: int
    chance: float  # accuracy of guessing
    accuracy: float | None  # share of targets that are the argmax
    error: float | None  # standard error of the accuracy, over trials
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


NEEDED = tuple(key for key in ProbeRow.__annotations__ if key in ProbeRow.__required_keys__)


def is_of_probes(path: Path) -> bool:
    """Whether the first line of a file is of tools/probe.py."""
    if not path.is_file():
        return False  # read_results says what is wrong with it
    try:
        with path.open("rb") as file:
            first = parse(file.readline(LONGEST))
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and "probe" in first


def write_probes(path: Path, rows: Sequence[ProbeRow]) -> None:
    """Write the whole file at once."""
    write_lines(path, rows)


def existing_probes(path: Path) -> list[ProbeRow]:
    """The rows of a file; none where it is absent or empty."""
    return read_probes([path]) if has_lines(path) else []


def read_probes(paths: Iterable[str | Path]) -> list[ProbeRow]:
    """The rows of several files, in order; UserError for a line of another kind."""
    rows: list[ProbeRow] = []
    for path in paths:
        lines = read_lines(Path(path), kind=ProbeRow, needed=NEEDED, writer="tools/probe.py")
        rows += [cast("ProbeRow", line) for line in lines]
    return rows


def joined(existing: Sequence[ProbeRow], rows: Sequence[ProbeRow]) -> list[ProbeRow]:
    """Existing rows and new ones, which replace all of the same run, probe and length."""
    measured = {_measurement_of(row) for row in rows}
    return [*(row for row in existing if _measurement_of(row) not in measured), *rows]


def _measurement_of(row: ProbeRow) -> tuple[Hashable, ...]:
    return (*run_of(row), row["probe"], row["length"])


def cells(
    rows: Sequence[ProbeRow], task: str
) -> dict[tuple[float, int], tuple[float, float] | None]:
    """Results of one model in one task by (depth, length): (accuracy, gain), or None.

    The gain is the log-probability of the targets, in nats, minus that with another answer in the
    context.
    """
    found = {}
    for row in rows:
        if row["probe"] == task:
            found[row.get("depth", 0.0), row["length"]] = _accuracy_and_gain(row)
    return found


def _accuracy_and_gain(row: ProbeRow) -> tuple[float, float] | None:
    accuracy = row.get("accuracy")
    with_answer, without = row.get("log_probability"), row.get("without")
    if accuracy is None or with_answer is None or without is None:
        return None
    return accuracy, with_answer - without
