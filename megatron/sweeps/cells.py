"""A sweep file and its cells, each a checked configuration with evaluations; and each cell's
state."""

import contextlib
import itertools
import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, cast

from filelock import FileLock, Timeout
from pydantic import BaseModel, Field, ValidationError

from megatron.checkpoints.manifest import OPTIMIZER, read_record
from megatron.checkpoints.saved import find, folder_of, latest_step, with_parent
from megatron.config import Config, load, messages
from megatron.config.schema import KEYS
from megatron.config.yaml_files import find_file, read_file
from megatron.data.parts import open_parts
from megatron.data.tasks import TaskText
from megatron.errors import UserError, visible
from megatron.evaluation.evaluate_checkpoint import check_options, options_of_training
from megatron.evaluation.options import options_of_words, words_of
from megatron.files import ROOT, expanded
from megatron.positions import fingerprint, load_file
from megatron.positions.registry import registered_by
from megatron.results.files import existing_results, training_log, write_lines
from megatron.results.row import Row, with_facts

SHIPPED = ROOT / "configs" / "sweeps"
GIVEN_BY_SWEEP = {"checkpoint", "step", "output"}  # options of evaluate.py
Arguments = tuple[Path, Path, tuple[str, ...], str | Path | None]
Values = dict[str, Any]  # a point of the grid: {axis: value}
Axis = Annotated[list, Field(min_length=1)] | dict[str, Values | None]


class SweepFile(BaseModel, extra="forbid"):
    """The form of a sweep file (docs/sweeps.md).

    evaluate: for each label, configuration keys and options of evaluate.py, and `only`: which cells
        it applies to
    entry: values of axes for a user's own encoding; without them the sweep takes none
    prepare: the command that makes its data, if prepare_data.py alone can't
    """

    base: list[str] = []
    settings: Values = {}
    grid: dict[str, Axis] = {}
    exclude: list[Values] = []
    evaluate: dict[str, Values | None] = {}
    entry: dict[str, Axis] = {}
    prepare: str = ""


class EvaluationCall(NamedTuple):
    """One call of evaluate.py: its command line, and a label that changes with what is measured."""

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
        """The lock of the process that works on the cell."""
        return FileLock(self.folder / "lock", timeout=0.2)

    def file(self, evaluation: EvaluationCall, *, finished: bool = True) -> Path:
        """The rows of an evaluation. The file has another name until evaluate.py has succeeded."""
        suffix = ".jsonl" if finished else ".unfinished.jsonl"
        return self.folder / "evaluation" / f"{evaluation.label}{suffix}"

    def rows(self, evaluation: EvaluationCall) -> list[Row]:
        """The rows of a finished evaluation of this configuration's last step, or none."""
        rows = existing_results(self.file(evaluation))
        ours = (self.config.hash, self.steps)
        same = all((row["config_hash"], row["step"]) == ours for row in rows)
        return rows if same else []


@dataclass(frozen=True)
class Sweep:
    """All cells of a file, in running order.

    arguments: those of load_sweep that give it again; prepare: the command that makes its data
    """

    name: str
    arguments: Arguments
    folder: Path
    cells: tuple[Cell, ...]
    prepare: str

    @property
    def results(self) -> Path:
        return self.folder / "results.jsonl"


def load_sweep(
    path: str | Path,
    folder: str | Path | None = None,
    only: Sequence[str] = (),
    entry: str | Path | None = None,
) -> Sweep:
    """Read the sweep in a file.

    path: the file, or the name of one of our sweeps with `-` or `_`;
    folder: for its runs, by default runs/sweeps/NAME;
    only: `axis=value,value` words that choose cells;
    entry: the file of an encoding that takes the place of the sweep's own ones.
    Raises UserError that lists the faults of the file, or of all chosen cells.
    """
    try:
        file = find_sweep(path)
        form = SweepFile.model_validate(read_file(file))
        name = file.stem
    except ValidationError as error:
        names = list(SweepFile.model_fields)
        lines = [line for *_, line in messages.lines(error, names)]
        raise UserError("\n  ".join([f"bad sweep ({path})", *lines])) from None
    except ValueError as fault:
        raise UserError(f"sweep: {fault}") from None
    if entry is not None:
        form = with_entry(form, Path(entry))
        name += f"-{Path(entry).stem}"

    for label in form.evaluate:
        if not re.fullmatch(r"[\w.+-]{1,100}", label):
            raise UserError(
                f"{file}: evaluate: {label!r} becomes a file name - use letters and digits"
            )
    home = Path(folder or f"runs/sweeps/{name}")
    evaluations = {label: dict(options or {}) for label, options in form.evaluate.items()}
    chosen = {label: options.pop("only", {}) for label, options in evaluations.items()}
    rules = [("exclude", rule) for rule in form.exclude]
    rules += [(f"evaluate.{label}.only", rule) for label, rule in chosen.items()]
    for word in only:
        axis, _, text = word.partition("=")
        by_name = {str(value): value for value in form.grid.get(axis, ())}
        rules.append(("--only", {axis: [by_name.get(name, name) for name in text.split(",")]}))
    for place, rule in rules:
        for axis, values in rule.items():
            choices = form.grid.get(axis, ())
            for value in _several(values):
                if value not in choices:
                    choices = (
                        ", ".join(map(str, choices)) or f"no such axis; use {', '.join(form.grid)}"
                    )
                    raise UserError(
                        f"{file}: {place}: no cell has {axis}: {value} - it has {choices}"
                    )

    # The first axis changes fastest, so an interrupted sweep is complete for the first values of
    # the last axis, the seeds.
    slowest_first = [list(choices) for choices in reversed(form.grid.values())]
    points = []
    for values in itertools.product(*slowest_first):
        point = dict(zip(form.grid, reversed(values), strict=True))
        is_chosen = all(_holds(rule, point) for place, rule in rules if place == "--only")
        if is_chosen and not any(_holds(rule, point) for rule in form.exclude):
            points.append(point)
    if not form.grid or not points:
        raise UserError(
            f"{file}: has no cells - write, for example, grid: {{pos_emb: [alibi, rotary]}}"
        )
    names = {_name(point) for point in points}
    if len(names) < len(points):
        raise UserError(
            f"{file}: grid: several cells have the same name, which is also their folder - list"
            " each value once, with letters and digits"
        )

    cells: list[Cell] = []
    faults: dict[str, list[str]] = {}  # names of cells by their fault
    for point in points:
        chosen_evaluations = {
            label: options for label, options in evaluations.items() if _holds(chosen[label], point)
        }
        try:
            cells.append(_cell(form, point, chosen_evaluations, home, file))
        except UserError as fault:
            faults.setdefault(str(fault), []).append(_name(point))
    if faults:
        lines = [f"{file}: {len(points) - len(cells)} of {len(points)} cells cannot be run"]
        lines += [f"{cells[0]} ({len(cells)} cells): {fault}" for fault, cells in faults.items()]
        raise UserError("\n".join(lines))
    arguments = (file, home, tuple(only), entry)
    return Sweep(file.stem, arguments, home, tuple(cells), form.prepare)


def with_entry(form: SweepFile, path: Path) -> SweepFile:
    """The sweep with one encoding, a user's own, in place of those on its axis pos_emb.

    path: a Python file that registers one encoding, or YAML with keys such as pos_emb_args
    Raises UserError if the sweep takes no entries, or if the file is something else.
    """
    if not form.entry:
        raise UserError("--entry: this sweep takes none - use atlas")
    if path.suffix == ".py":
        name, *unwanted = registered_by(load_file(path))
        settings: Values = {"pos_emb": name, "pos_emb_file": str(path)}
    else:
        settings = read_file(path)
        unwanted = [key for key in settings if KEYS.get(key) != "position"]
    if unwanted:
        raise UserError(
            f"--entry: {path}: has {', '.join(unwanted)} - an entry is one encoding: a Python file"
            " that registers it, or YAML with keys that begin with pos_emb"
        )
    ours = ROOT / "configs" / "pos_emb" / f"{path.stem}.yml"
    if ours.exists() and path.resolve() != ours:
        raise UserError(f"--entry: {path.stem} is an encoding of ours - rename {path}")
    grid = {**form.grid, **form.entry, "pos_emb": {path.stem: settings}}
    return form.model_copy(update={"grid": grid, "exclude": []})


def _several(value: Any) -> list[Any]:
    """The values that a rule lists for an axis; a single value becomes a list."""
    return value if isinstance(value, list) else [value]


def _holds(rule: Values, point: Values) -> bool:
    """Whether a point has one of the rule's values on each of the rule's axes."""
    return all(point[axis] in _several(value) for axis, value in rule.items())


def find_sweep(name: str | Path) -> Path:
    """The file for a path or for the name of one of our sweeps.

    kerple-table3, kerple_table3 and configs/sweeps/kerple-table3.yml mean the same file. Raises
    ValueError that lists what was tried.
    """
    with contextlib.suppress(ValueError):
        return find_file(name)
    return find_file(SHIPPED / Path(name).name.replace("-", "_"))


def _cell(
    form: SweepFile, values: Values, evaluations: Mapping[str, Values], home: Path, path: Path
) -> Cell:
    """One point of the grid. evaluations: options by label; path: the file of the sweep."""
    files = []
    for name in form.base:  # from the sweep's own folder, else from the project's root
        neighbour = path.parent / expanded(name)
        files.append(neighbour if neighbour.is_file() else ROOT / name)
    settings = dict(form.settings)
    for axis, value in values.items():
        choices = form.grid[axis]
        file_of_value = ROOT / "configs" / axis / f"{value}.yml"
        if isinstance(choices, dict):
            settings |= choices[value] or {}
        elif os.path.isfile(file_of_value):  # no error for a name that is too long
            files.append(file_of_value)
        else:
            settings[axis] = value
    folder = home / _name(values)
    settings["save"] = str(folder)
    words = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
    config = load(files, words)
    if not config.checkpoint.finetune:  # for fine-tuning, load is the parent
        checkpoint = config.checkpoint.model_copy(update={"load": str(folder)})
        config = replace(config, checkpoint=checkpoint)
    config.require_for("train")
    config = with_parent(config)
    if config.evaluation.extrapolation_interval:
        options_of_training(config)

    measured = config.evaluation
    calls = []
    for label, options in evaluations.items():
        # Find options that evaluate.py would reject now, before anything is trained.
        option_words, rest, changed = [], {}, config
        try:
            for key, value in options.items():
                if key not in KEYS:
                    rest[key] = value
                    option_words += words_of({key: value})
                    continue
                # Keys become settings: {eval_tokens: 4096, tail: 64}
                option_words.append(f"{key}={json.dumps(value)}")
                section = getattr(changed, KEYS[key])
                section = type(section).model_validate({**dict(section), key: value})
                changed = replace(changed, **{KEYS[key]: section})
            if given := rest.keys() & GIVEN_BY_SWEEP:
                raise UserError(f"{', '.join(given)}: is set by the sweep - remove it")
            check_options(changed, options_of_words(words_of(rest)))
        except ValidationError as error:
            lines = [line for *_, line in messages.lines(error, [*KEYS])]
            raise UserError(f"evaluate.{label}: {'; '.join(lines)}") from None
        except UserError as fault:
            raise UserError(f"evaluate.{label}: {fault}") from None
        shaping = [measured.eval_lengths, measured.eval_tokens, measured.eval_part]
        text = json.dumps([config.hash, option_words, *shaping])
        name = f"{label}-{fingerprint(text)[:6]}"
        calls.append(EvaluationCall(name, tuple(option_words), options))
    return Cell(_name(values), values, folder, config, tuple(calls))


def _name(values: Mapping[str, Any]) -> str:
    return "-".join(re.sub(r"[^\w.+]+", "_", str(value)) for value in values.values())


# --- The states of cells, by the configuration's hash in checkpoints and rows ---


class State(NamedTuple):
    """The state of a cell. kind: waiting     nothing exists yet, and no process works on it
        training    a process has its lock; likewise `evaluating`
        stopped     it has a checkpoint before the last step, and no process works on it
        trained     evaluations are missing, and no process works on it
        done        the last checkpoint and all evaluations exist
        failed      the last attempt failed; `note` is its last line
        damaged     the folder has another run or an unreadable file; `note` names it
    step: of the last checkpoint, 0 for none
    missing: evaluations without rows
    """

    kind: str
    step: int = 0
    missing: tuple[EvaluationCall, ...] = ()
    note: str = ""


def is_trained(cell: Cell, step: int) -> bool:
    """Whether its training has finished: then the optimizer's state is deleted.

    If the state exists, a kill may have prevented the last rows of extrapolation_interval.
    """
    path = folder_of(cell.folder, step)
    return step >= cell.steps and (path.is_symlink() or not (path / OPTIMIZER).exists())


def state_of(cell: Cell) -> State:
    """The state of a cell. A failure is shown until the next attempt begins."""
    failure = cell.folder / "failure.txt"
    try:
        step = latest_step(cell.folder) or 0
        if step:
            trained = read_record(find(cell.folder, step))["config_hash"]
            if trained != cell.config.hash:
                note = f"{cell.folder} has a run of configuration {trained}"
                return State("damaged", step, note=f"{note}, not {cell.config.hash}")
        trained_well = is_trained(cell, step)
        missing = cell.evaluations
        if trained_well:
            missing = tuple(call for call in cell.evaluations if not cell.rows(call))
            if not missing:
                return State("done", step)
        if failure.exists():
            note = failure.read_text(encoding="utf-8", errors="replace").strip()
            return State("failed", step, missing, note)
        kind = "trained" if trained_well else "stopped" if step else "waiting"
        if (cell.folder / "lock").exists():  # otherwise no process has ever worked on it
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
        return (
            f"{state.kind}, {len(state.missing)} of {len(cell.evaluations)} evaluations are missing"
        )
    text = state.kind
    if state.kind not in ("waiting", "done", "damaged"):
        text += f" at step {state.step} of {cell.steps}"
    return visible(f"{text}: {state.note}") if state.note else text


# --- Results ---


def finished_rows(sweep: Sweep) -> list[Row]:
    """Rows of all finished evaluations.

    Each row also has `sweep`, `cell`, the size of the corpus if it exists here, and the seconds per
    step.
    """
    rows: list[Row] = []
    for cell in sweep.cells:
        facts = {"sweep": sweep.name, "cell": cell.values}
        with contextlib.suppress(UserError):  # the data is missing
            parts = open_parts(cell.config.data, ["train"])
            files = parts["train"].files
            if not isinstance(files[0], TaskText):  # a task, which is endless
                facts["corpus_documents"] = sum(map(len, files))
                facts["corpus_tokens"] = sum(int(tokens.tokens) for tokens in files)
        facts["seconds_per_step"] = seconds_per_step(cell)
        for evaluation in cell.evaluations:
            for row in cell.rows(evaluation):
                rows.append(cast(Row, {**row, **facts}))
    return rows


def collect(sweep: Sweep) -> list[Row]:
    """Write results.jsonl and return its rows; if there are none, nothing is written.

    Rows that `extrapolation_interval` wrote go into training.jsonl, with `sweep` and `cell`.
    """
    rows = finished_rows(sweep)
    if rows:
        write_lines(sweep.results, rows)
    within: list[Row] = []
    for cell in sweep.cells:
        paths = sorted((cell.folder / "evaluation").glob("*-global_step*.jsonl"))
        rows_of_cell = [row for path in paths for row in existing_results(path)]
        for row in sorted(rows_of_cell, key=lambda row: row["step"]):
            if row["config_hash"] == cell.config.hash:
                within.append(with_facts(row, {"sweep": sweep.name, "cell": cell.values}))
    if within:
        write_lines(sweep.folder / "training.jsonl", within)
    return rows


def seconds_per_step(cell: Cell) -> float | None:
    """Median over the log lines of a run, or None if there are none that can be read.

    The first line is excluded, because it includes the start-up.
    """
    seconds = []
    with contextlib.suppress(OSError, ValueError):
        for record in training_log(cell.folder / "metrics.jsonl"):
            value = record.get("seconds_per_step")
            if record.get("kind") == "train" and value:
                seconds.append(value)
    return statistics.median(seconds[1:]) if len(seconds) > 1 else None
