"""What probes measured: JSON lines, one for each probe, length and place in it."""

from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Required, cast

from megatron.results.files import LONGEST, has_lines, read_lines, write_lines
from megatron.results.row import Question, run_of
from megatron.strict_json import parse

RETRIEVAL = ("passkey", "copy", "recall")
RULER = ("multikey", "multikey_dense", "variable_tracking", "common_words", "frequent_words")
TASKS = (*RETRIEVAL, *RULER)
PROBES = (*TASKS, "receptive_field", "attention")
GROUPS = {"ruler": RULER}  # several probes by one name
AXES = {"variable_tracking": "hops", "common_words": "named", "frequent_words": "rank"}
"""What the rows of a task at one length differ in, where it is not the depth of the answer."""


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
    """Results of one model in one task by (place, length): (accuracy, gain), or None.

    The place is the depth, or the number on the axis of the task. The gain is the log-probability
    of the targets, in nats, minus that with another answer in the context.
    """
    found = {}
    for row in rows:
        if row["probe"] == task:
            found[place_of(row), row["length"]] = _accuracy_and_gain(row)
    return found


def guesses(rows: Sequence[ProbeRow], task: str) -> dict[tuple[float, int], float]:
    """Guess rates of one model in one task by (place, length), where there are any."""
    found = {}
    for row in rows:
        guess = row.get("guess")
        if row["probe"] == task and guess is not None:
            found[place_of(row), row["length"]] = guess
    return found


def axis_of(probe: str) -> str:
    """The key in which the rows of a task at one length differ."""
    return AXES.get(probe, "depth")


def place_of(row: ProbeRow) -> float:
    """The depth of a row, or its number on the axis of its task."""
    place = cast("dict[str, float]", row).get(axis_of(row["probe"]))
    return 0.0 if place is None else place


def _accuracy_and_gain(row: ProbeRow) -> tuple[float, float] | None:
    accuracy = row.get("accuracy")
    with_answer, without = row.get("log_probability"), row.get("without")
    if accuracy is None or with_answer is None or without is None:
        return None
    return accuracy, with_answer - without
