"""A sweep file -> its cells, each a checked configuration with evaluations; and how far each is."""

import collections
import contextlib
import itertools
import json
import logging
import math
import os
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, cast

from filelock import FileLock, Timeout
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from megatron.checkpoints.manifest import OPTIMIZER, read_record
from megatron.checkpoints.saved import find, folder_of, latest_step, with_parent
from megatron.config import Config, load, messages
from megatron.config.schema import KEYS, SECTIONS
from megatron.config.yaml_files import find_file, read_file
from megatron.data.parts import open_parts
from megatron.data.tasks import TaskText
from megatron.errors import UserError, control_fault, did_you_mean, visible
from megatron.evaluation.evaluate_checkpoint import check_options, options_of_training
from megatron.evaluation.options import option_names, options_of_words, words_of
from megatron.files import ROOT, expanded, read_small
from megatron.positions import fingerprint
from megatron.results.files import existing_results, training_log, write_lines
from megatron.results.row import Row, measurement_of, with_facts

SHIPPED = ROOT / "configs" / "sweeps"
LONGEST_FAILURE = 1_000_000  # bytes of failure.txt
MOST_CELLS = 10_000  # of a grid
LONGEST_NAME = 200  # characters of a cell's folder; most disks take 255
# Options of evaluate.py in a sweep, which gives checkpoint, step and output itself.
OPTIONS = [name for name in option_names() if name not in (*KEYS, "checkpoint", "step", "output")]
FORMS = {
    "base": "[configs/125M.yml], a list of files",
    "settings": "{train_iters: 1000}, keys of the configuration",
    "grid": "{pos_emb: [alibi, rotary], seed: [1, 2]}, axes with their values",
    "exclude": "[{pos_emb: alibi, seed: 2}], a list of cells",
    "evaluate": "{equal: {protocol: equal_tokens}}, with labels of letters, digits and _ . + -",
}
"""Every key of a sweep file, with an example."""
Values = dict[str, Any]  # a point of the grid: {axis: value}
Label = Annotated[str, StringConstraints(pattern=r"^[\w.+-]{1,100}$")]  # it names a file
Axis = Annotated[list, Field(min_length=1)] | dict[str, Values | None]

logger = logging.getLogger(__name__)


class EvaluationRequest(BaseModel):
    """One evaluation in a sweep file: keys of the configuration and options of evaluate.py.

    only: the values of the cells that it is for
    """

    model_config = ConfigDict(extra="allow")
    only: Values = {}

    @property
    def options(self) -> Values:
        return self.model_extra or {}

    @model_validator(mode="after")
    def check(self) -> Self:
        for key, value in self.options.items():
            if key in OPTIONS:
                options_of_words(_words({key: value}))
                continue
            if key not in KEYS:
                names = [*OPTIONS, "only", "eval_tokens", "eval_part"]
                hint = _hint(key, names, [*names, *KEYS])
                raise ValueError(f"{messages.shortened(key)}: no such option; {hint}")
            try:
                SECTIONS[KEYS[key]].model_validate({key: value})
            except ValidationError as error:
                for _, kind, line in messages.lines(error, [*KEYS]):
                    if kind != "missing":  # the section may need other keys too
                        raise ValueError(line) from None
        return self


def _hint(name: str, usual: Iterable[str], names: Iterable[str]) -> str:
    """`did you mean X? use A, B`: what may stand in place of a name that does not exist."""
    return f"{did_you_mean(name, names)} use {', '.join(usual)}".strip()


# A label alone, without options, is one too.
Request = Annotated[
    EvaluationRequest, BeforeValidator(lambda value: {} if value is None else value)
]


class SweepFile(BaseModel):
    """The form of a sweep file (docs/sweeps.md)."""

    model_config = ConfigDict(extra="forbid")
    base: list[str] = []
    settings: Values = {}
    grid: Annotated[dict[str, Axis], Field(min_length=1)]
    exclude: list[Values] = []
    evaluate: dict[Label, Request] = {}


@dataclass(frozen=True)
class EvaluationCall:
    """One call of evaluate.py: its words, and a label that changes with what is measured."""

    label: str
    words: tuple[str, ...]
    options: Values


@dataclass(frozen=True)
class Cell:
    """One training and its evaluations; `folder` is the run's `save`."""

    name: str
    values: Values
    folder: Path
    config: Config
    evaluations: tuple[EvaluationCall, ...]

    @property
    def steps(self) -> int:
        return self.config.training.train_iters

    @property
    def lock(self) -> FileLock:
        """Whoever works on the cell holds it."""
        return FileLock(self.folder / "lock", timeout=0.2)

    def file(self, evaluation: EvaluationCall, *, finished: bool = True) -> Path:
        """Rows of an evaluation. They have another name until evaluate.py has ended well."""
        suffix = ".jsonl" if finished else ".unfinished.jsonl"
        return self.folder / "evaluation" / f"{evaluation.label}{suffix}"

    def rows(self, evaluation: EvaluationCall) -> list[Row]:
        """Rows of a finished evaluation of this configuration's last step; else none."""
        rows = existing_results(self.file(evaluation))
        ours = self.config.hashes
        same = all(row["config_hash"] in ours and row["step"] == self.steps for row in rows)
        return rows if same else []


@dataclass(frozen=True)
class Sweep:
    """All cells of a file, in the order in which they run."""

    name: str
    path: Path
    folder: Path
    cells: tuple[Cell, ...]

    @property
    def results(self) -> Path:
        return self.folder / "results.jsonl"


def load_sweep(
    path: str | Path, folder: str | Path | None = None, only: Sequence[str] = ()
) -> Sweep:
    """The sweep that a file describes.

    path: the file, or the name of a shipped sweep with `-` or `_`;
    folder: where its runs are kept, by default runs/sweeps/NAME;
    only: `axis=value,value` words that choose cells.
    Raises UserError with the faults of the file, or with those of all chosen cells.
    """
    try:
        file = find_sweep(path)
        parts = SweepFile.model_validate(read_file(file))
    except ValidationError as error:
        faults = [f"bad sweep ({path})"]
        for detail in error.errors():
            key = str(detail["loc"][0])
            place = messages.shortened(
                ".".join(str(part) for part in detail["loc"] if "[" not in str(part))
            )
            value = messages.shortened(repr(detail["input"]))
            match detail["type"]:
                case "value_error":
                    message = detail["msg"].removeprefix("Value error, ")
                case "extra_forbidden":
                    message = f"no such key; {_hint(key, FORMS, FORMS)}"
                case "missing":
                    message = f"not given - write {key}: {FORMS[key]}"
                case _:
                    message = f"cannot be {value} - write {key}: {FORMS[key]}"
            faults.append(f"{place}: {message}")
        raise UserError("\n  ".join(dict.fromkeys(faults))) from None
    except ValueError as fault:
        raise UserError(f"sweep: {fault}") from None

    for place, value in (("grid", parts.grid), ("the file's name", file.stem)):
        if fault := control_fault(value):
            raise UserError(f"{file}: {place}: {fault}")
    count = math.prod(map(len, parts.grid.values()))
    if count > MOST_CELLS:
        raise UserError(
            f"{file}: grid: {count:,} cells, more than {MOST_CELLS:,} - divide it into several"
            " files"
        )
    # The first axis changes fastest: a sweep that is cut short is then whole in the first values
    # of the last axis, the seeds.
    slowest_first = [list(choices) for choices in reversed(parts.grid.values())]
    grid = []
    for values in itertools.product(*slowest_first):
        grid.append(dict(zip(parts.grid, reversed(values), strict=True)))
    excluded = [rule for several in parts.exclude for rule in _rules(several)]
    points = [point for point in grid if not any(_holds(rule, point) for rule in excluded)]
    rules = [("exclude", rule, grid) for rule in excluded]
    for label, request in parts.evaluate.items():
        rules += [(f"evaluate.{label}.only", rule, points) for rule in _rules(request.only)]
    for place, rule, several in rules:
        if not any(_holds(rule, point) for point in several):
            raise UserError(f"{file}: {place}: no cell has {rule} - {_axes(parts)}")
    if not points:
        raise UserError(f"{file}: no cell is left - exclude takes out the whole grid")
    for name, times in collections.Counter(map(_name, points)).items():
        if times > 1 or not name.strip(".") or len(name) > LONGEST_NAME:
            raise UserError(
                f"{file}: {times} cells would be called '{name[:80]}', which names their folder -"
                " give every value once, and names of their own of letters and digits, together"
                f" at most {LONGEST_NAME}"
            )
    for word in only:
        axis, _, text = word.partition("=")
        values = text.split(",")
        if not {str(point.get(axis)) for point in points}.issuperset(values):
            raise UserError(f"--only: {word}: {file} has no such cells - {_axes(parts)}")
        points = [point for point in points if str(point[axis]) in values]

    home = Path(folder) if folder else Path("runs/sweeps") / file.stem
    cells: list[Cell] = []
    faulty: dict[str, list[str]] = {}  # names of cells by their fault
    for values in points:
        try:
            cells.append(_cell(parts, values, home, file))
        except UserError as fault:
            faulty.setdefault(str(fault), []).append(_name(values))
    if faulty:
        lines = [f"{file}: {len(points) - len(cells)} of {len(points)} cells cannot be run"]
        lines += [f"{names[0]} ({len(names)} cells): {fault}" for fault, names in faulty.items()]
        raise UserError("\n".join(lines))
    same: dict[str, str] = {}  # the first cell with these settings, which may be spelt otherwise
    for cell in cells:
        settings = cell.config.flat().items()
        of_training = {key: value for key, value in settings if value != str(cell.folder)}
        first = same.setdefault(json.dumps(of_training, default=str), cell.name)
        if first != cell.name:
            raise UserError(
                f"{file}: {first} and {cell.name} are one training - give every value once"
            )
    return Sweep(file.stem, file, home, tuple(cells))


def _rules(several: Values) -> list[Values]:
    """A rule for each combination of values, where a list gives several values of an axis."""
    choices = [value if isinstance(value, list) else [value] for value in several.values()]
    if math.prod(map(len, choices)) > MOST_CELLS:
        raise UserError(f"sweep: a rule stands for more than {MOST_CELLS:,} cells - divide it")
    return [dict(zip(several, values, strict=True)) for values in itertools.product(*choices)]


def _holds(rule: Values, point: Values) -> bool:
    """Whether a point has all values of a rule."""
    return rule.items() <= point.items()


def _axes(parts: SweepFile) -> str:
    axes = [f"{axis} = {', '.join(map(str, choices))}" for axis, choices in parts.grid.items()]
    return f"its axes are {'; '.join(axes)}"


def find_sweep(name: str | Path) -> Path:
    """The file that a path or the bare name of a shipped sweep means.

    kerple-table3, kerple_table3 and configs/sweeps/kerple-table3.yml are one file.
    Raises ValueError that says what was looked for.
    """
    with contextlib.suppress(ValueError):
        return find_file(name)
    try:
        return find_file(SHIPPED / Path(name).name.replace("-", "_"))
    except ValueError as fault:
        raise ValueError(f"{name} is no file here, and {fault}") from None


def _cell(parts: SweepFile, values: Values, home: Path, path: Path) -> Cell:
    """One point of the grid; path: the file of the sweep."""
    files = []
    for name in parts.base:  # from the sweep's own folder, else from the project's root
        neighbour = path.parent / expanded(name)
        files.append(neighbour if neighbour.is_file() else ROOT / name)
    settings = dict(parts.settings)
    for axis, value in values.items():
        choices = parts.grid[axis]
        file_of_value = ROOT / "configs" / axis / f"{value}.yml"
        if isinstance(choices, dict):
            settings |= choices[value] or {}
        elif os.path.isfile(file_of_value):  # no error for a name that is too long
            files.append(file_of_value)
        else:
            settings[axis] = value
    folder = home / _name(values)
    settings["save"] = str(folder)
    config = load(files, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    if not config.checkpoint.finetune:  # there, load is the parent
        checkpoint = config.checkpoint.model_copy(update={"load": str(folder)})
        config = replace(config, checkpoint=checkpoint)
    config.require_for("train")
    if config.training.train_epochs is not None:
        raise UserError(
            "train_epochs: a sweep must know its steps before it reads the text - set train_iters"
        )
    config = with_parent(config)
    if config.evaluation.extrapolation_interval:
        options_of_training(config)

    measured = config.evaluation
    evaluations = []
    for label, request in parts.evaluate.items():
        if not any(_holds(rule, values) for rule in _rules(request.only)):
            continue
        # Options of evaluate.py are refused here, before anything is trained.
        changed = config
        for key in request.options.keys() & KEYS.keys():
            section = getattr(changed, KEYS[key]).model_copy(update={key: request.options[key]})
            changed = replace(changed, **{KEYS[key]: section})
        words = _words(request.options)
        try:
            measuring = {key: value for key, value in request.options.items() if key not in KEYS}
            check_options(changed, options_of_words(_words(measuring)))
        except UserError as fault:
            raise UserError(f"evaluate.{label}: {fault}") from None
        shaping = [measured.eval_lengths, measured.eval_tokens, measured.eval_part]
        for config_hash in reversed(config.hashes):
            text = json.dumps([config_hash, words, *shaping])
            name = f"{label}-{fingerprint(text)[:6]}"
            if (folder / "evaluation" / f"{name}.jsonl").exists():  # of an earlier version
                break
        evaluations.append(EvaluationCall(name, tuple(words), request.options))
    return Cell(_name(values), values, folder, config, tuple(evaluations))


def _name(values: Mapping[str, Any]) -> str:
    return "-".join(re.sub(r"[^\w.+]+", "_", str(value)) for value in values.values())


def _words(options: Mapping[str, Any]) -> list[str]:
    """Keys of the configuration become settings, others options: {eval_tokens: 4096, tail: 64}."""
    words = []
    for key, value in options.items():
        words += [f"{key}={json.dumps(value)}"] if key in KEYS else words_of({key: value})
    return words


# --- How far cells are, by the configuration's hash in checkpoints and rows ---


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
    missing: tuple[EvaluationCall, ...] = ()
    note: str = ""


def is_trained(cell: Cell, step: int) -> bool:
    """Whether its training has ended well at this last step: then the optimizer's state is gone.

    With the state a kill may have come before the last rows of extrapolation_interval.
    """
    path = folder_of(cell.folder, step)
    return step >= cell.steps and (path.is_symlink() or not (path / OPTIMIZER).exists())


def state_of(cell: Cell) -> State:
    """How far a cell is. A failure is shown until the next attempt begins."""
    failure = cell.folder / "failure.txt"
    try:
        step = latest_step(cell.folder) or 0
        if step:
            trained = read_record(find(cell.folder, step))["config_hash"]
            if trained not in cell.config.hashes:
                note = f"{cell.folder} holds a run of configuration {trained},"
                return State("foreign", step, note=f"{note} not {cell.config.hash}")
        trained_well = is_trained(cell, step)
        missing = cell.evaluations
        if trained_well:
            missing = tuple(call for call in cell.evaluations if not cell.rows(call))
            if not missing:
                return State("done", step)
        if failure.exists():
            note = read_small(failure, LONGEST_FAILURE).decode("utf-8", "backslashreplace")
            return State("failed", step, missing, visible(note.strip()))
        kind = "trained" if trained_well else "stopped" if step else "waiting"
        if (cell.folder / "lock").exists():  # else nobody has ever worked on it
            with cell.lock.acquire(timeout=0):
                pass
    except Timeout:
        kind = "evaluating" if trained_well else "training"
    except (UserError, OSError) as fault:
        return State("damaged", note=str(fault))
    return State(kind, step, missing)


def described(cell: Cell, state: State) -> str:
    """A state in words: `stopped at step 200 of 1000`."""
    if state.kind in ("trained", "evaluating"):
        count = f"{len(state.missing)} of {len(cell.evaluations)}"
        return f"{state.kind}, {count} evaluations are missing"
    text = state.kind
    if state.kind not in ("waiting", "done", "damaged"):
        text += f" at step {state.step} of {cell.steps}"
    return f"{text}: {state.note}" if state.note else text


# --- Results ---


def finished_rows(sweep: Sweep) -> list[Row]:
    """Rows of all finished evaluations.

    Each has also `sweep`, `cell`, the size of the corpus if it is here, and the seconds of a step.
    """
    rows: list[Row] = []
    for cell in sweep.cells:
        facts = {"sweep": sweep.name, "cell": cell.values}
        with contextlib.suppress(UserError):  # the data are absent
            parts = open_parts(cell.config.data, ["train"])
            files = parts["train"].files
            if not isinstance(files[0], TaskText):  # which has no end
                facts["corpus_documents"] = sum(map(len, files))
                facts["corpus_tokens"] = sum(int(tokens.tokens) for tokens in files)
        try:
            facts["seconds_per_step"] = seconds_per_step(cell)
            for evaluation in cell.evaluations:
                for row in cell.rows(evaluation):
                    rows.append(cast(Row, {**row, **facts}))
        except UserError as fault:
            logger.warning("%s: left out: %s", cell.name, fault)
    return rows


def seconds_per_step(cell: Cell) -> float | None:
    """Median over the log lines of a run, or None if there are none.

    The first line is left out: it contains the start of the machine.
    """
    path = cell.folder / "metrics.jsonl"
    try:
        records = training_log(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as fault:
        raise UserError(f"{path}: is damaged ({fault}) - remove that line, or the file") from None
    logged = [record.get("seconds_per_step") for record in records if record.get("kind") == "train"]
    seconds = [value for value in logged if value]
    return statistics.median(seconds[1:]) if len(seconds) > 1 else None


def rows_within_trainings(sweep: Sweep) -> list[Row]:
    """Rows that `extrapolation_interval` wrote, each with `sweep` and `cell`."""
    rows: list[Row] = []
    for cell in sweep.cells:
        facts = {"sweep": sweep.name, "cell": cell.values}
        for path in sorted((cell.folder / "evaluation").glob("*-global_step*.jsonl")):
            try:
                measured = existing_results(path)
            except UserError as fault:
                logger.warning("%s: left out: %s", cell.name, fault)
                continue
            rows += [
                with_facts(row, facts)
                for row in measured
                if row["config_hash"] in cell.config.hashes
            ]
    return rows


def collect(sweep: Sweep) -> list[Row]:
    """Write results.jsonl and return its rows; without rows nothing is written.

    Rows within trainings go into training.jsonl.
    Its rows of another configuration stay as long as their run is in its cell's folder.
    Raises UserError if the rows of other cells would be lost.
    """
    if within := rows_within_trainings(sweep):
        write_lines(sweep.folder / "training.jsonl", within)
    rows = finished_rows(sweep)
    measured = set(map(measurement_of, rows))
    for row in existing_results(sweep.results):
        if measurement_of(row) in measured:
            continue
        folder = sweep.folder / _name(row.get("cell", {}))
        with contextlib.suppress(UserError):  # no such run
            if read_record(find(folder, row["step"]))["config_hash"] == row["config_hash"]:
                rows.append(row)
    if rows:
        write_lines(sweep.results, rows)
    elif sweep.results.exists() and sweep.results.stat().st_size:
        raise UserError(
            f"{sweep.results}: holds rows, and {sweep.path} has none here - another sweep's, or "
            "brought from elsewhere; move it away, or give another --folder"
        )
    return rows
