"""A sweep file -> its cells: a checked configuration and evaluations for each point of a grid."""

import collections
import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.checkpoints.saved import with_parent
from megatron.config import Config, load
from megatron.config.load import resolve_inputs
from megatron.config.messages import Report, shortened
from megatron.config.schema import KEYS
from megatron.config.yaml_files import find_file, read_file
from megatron.errors import UserError, did_you_mean
from megatron.files import ROOT
from megatron.results.reproduce import first_of
from megatron.sweeps.form import LONGEST_NAME, ONLY, check_form

logger = logging.getLogger(__name__)

SHIPPED = ROOT / "configs" / "sweeps"
Values = dict[str, Any]  # a point of the grid: {axis: value}


@dataclass(frozen=True)
class Evaluation:
    """One call of evaluate.py: its words, and a label that changes with what is measured."""

    label: str
    words: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One training and its evaluations; `folder` is the run's `save`."""

    name: str
    values: Values
    folder: Path
    config: Config
    evaluations: tuple[Evaluation, ...]

    @property
    def steps(self) -> int:
        return self.config.training.train_iters

    def file(self, evaluation: Evaluation, *, finished: bool = True) -> Path:
        """Rows of an evaluation. They have another name until evaluate.py has ended well."""
        suffix = ".jsonl" if finished else ".unfinished.jsonl"
        return self.folder / "evaluation" / f"{evaluation.label}{suffix}"


@dataclass(frozen=True)
class Sweep:
    """All cells of a file, in the order in which they run.

    keep_states: whether finished cells keep the optimizer's states beside their weights
    broken: what is wrong with the configurations of cells that cannot be run, by their names
    """

    name: str
    path: Path
    folder: Path
    cells: tuple[Cell, ...]
    keep_states: bool = False
    broken: Mapping[str, str] = field(default_factory=dict)

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
    Raises UserError with every fault of the file, and where every cell is broken.
    """
    try:
        file = find_sweep(path)
        parts = read_file(file)
    except ValueError as fault:
        raise UserError(f"sweep: {fault}") from None
    check_form(parts, file)
    home = Path(folder) if folder else Path("runs/sweeps") / file.stem
    cells: list[Cell] = []
    broken: dict[str, str] = {}
    report = Report()
    for values in _chosen(_points(parts, file), only, file):
        try:
            cells.append(_cell(parts, values, home, file, report))
        except UserError as fault:
            broken[_name(values)] = str(fault)
    if not cells:
        title = f"{file}: none of its {len(broken)} cells can be run"
        raise UserError("\n".join([title, *described_faults(broken)]))
    for note in report.notes:
        logger.warning("%s: %s", file, note)
    keep_states = parts.get("keep_optimizer_states", False)
    return Sweep(file.stem, file, home, tuple(cells), keep_states, broken)


def described_faults(broken: Mapping[str, str]) -> list[str]:
    """A line for each broken cell; a fault that several have is written once."""
    names_of: dict[str, list[str]] = {}
    for name, fault in broken.items():
        names_of.setdefault(fault, []).append(name)
    return [f"{first_of(names)}: {fault}" for fault, names in names_of.items()]


def find_sweep(name: str | Path) -> Path:
    """The file that a path or the bare name of a shipped sweep means.

    kerple-table3, kerple_table3 and configs/sweeps/kerple-table3.yml are one file.
    Raises ValueError that says what was looked for.
    """
    path = Path(name)
    folders = [path.parent]
    if path.parent == Path("."):
        folders.append(SHIPPED)
    spellings = (path.name, path.name.replace("-", "_"), path.name.replace("_", "-"))
    for folder, spelling in itertools.product(folders, spellings):
        for suffix in ("", ".yml", ".yaml"):
            candidate = folder / f"{spelling}{suffix}"
            if candidate.is_file():
                return candidate
    if len(folders) == 1 or path.is_dir():
        return find_file(path)  # raises
    known = sorted(file.stem for file in SHIPPED.glob("*.yml"))
    guess = did_you_mean(path.stem, known)
    hint = guess or f"give a file, or one of {', '.join(known)}"
    raise ValueError(f"{name}: no such file (looked in {Path.cwd()} and {SHIPPED}) - {hint}")


def _points(parts: Mapping[str, Any], path: Path) -> list[Values]:
    """The grid with its first axis changing fastest, without `exclude`, and `extra`.

    A sweep that is cut short is then whole in the first values of the last axis, the seeds.
    """
    grid = parts["grid"]
    excluded: list[Values] = parts.get("exclude", [])
    extra: list[Values] = parts.get("extra", [])
    _check_points(grid, excluded, extra, path)
    _check_excluded(grid, excluded, path)
    slowest_first = [list(choices) for choices in reversed(grid.values())]
    points = []
    for values in itertools.product(*slowest_first):
        point = dict(zip(grid, reversed(values), strict=True))
        if not any(rule.items() <= point.items() for rule in excluded):
            points.append(point)
    points += [point for point in extra if point not in points]
    if not points:
        raise UserError(f"{path}: no cell is left - exclude takes out the whole grid")
    _check_names(points, path)
    _check_evaluations(parts, points, path)
    return points


def _check_names(points: Sequence[Values], path: Path) -> None:
    """Refuse two cells with one folder: they would train into each other; and none of its own."""
    counts = collections.Counter(map(_name, points))
    for name, count in counts.items():
        if name.strip(".") == "":
            raise UserError(
                f"{path}: a cell would be called '{name}', which names no folder of its own"
                " - give its value a name of letters and digits"
            )
        if len(name) > LONGEST_NAME:
            raise UserError(
                f"{path}: a cell would be called '{shortened(name)}', of {len(name)} characters"
                f" - give shorter values, together at most {LONGEST_NAME}"
            )
        if count > 1:
            raise UserError(
                f"{path}: {count} cells are called {name}, which names their folder - give every"
                " value once, and values that differ in more than their punctuation"
            )


def _check_points(
    grid: Mapping[str, Any], excluded: Sequence[Values], extra: Sequence[Values], path: Path
) -> None:
    unknown = [point for point in [*excluded, *extra] if not point.keys() <= grid.keys()]
    partial = [point for point in extra if point.keys() != grid.keys()]
    for point in unknown + partial:
        raise UserError(f"{path}: {point} is no point of the grid - use its axes {', '.join(grid)}")


def _check_excluded(grid: Mapping[str, Any], excluded: Sequence[Values], path: Path) -> None:
    """Refuse a rule with a value that its axis does not have: it would take out nothing."""
    for rule in excluded:
        for axis, value in rule.items():
            choices = list(grid[axis])
            if value not in choices:
                known = ", ".join(map(str, choices))
                raise UserError(
                    f"{path}: exclude: {rule} takes out no cell, because {axis} has no {value!r}"
                    f" - it has {known}"
                )


def _check_evaluations(parts: Mapping[str, Any], points: list[Values], path: Path) -> None:
    """Refuse an evaluation for cells that do not exist: it would never be made."""
    for label, options in parts.get("evaluate", {}).items():
        only = (options or {}).get(ONLY, {})
        if not any(only.items() <= point.items() for point in points):
            raise UserError(
                f"{path}: evaluate: {label}: only: no cell has {only} - give values of the axes"
                f" {', '.join(parts['grid'])}"
            )


def _chosen(points: list[Values], only: Sequence[str], path: Path) -> list[Values]:
    """The points that agree with all of the `axis=value,value` words."""
    for word in only:
        axis, _, text = word.partition("=")
        wanted = text.split(",")
        axes = list(points[0]) if points else []
        if axis not in axes:
            guess = did_you_mean(axis, axes)
            hint = f" - {guess}" if guess else ""
            raise UserError(
                f"--only: {word}: {path} has no axis {axis}, it has {', '.join(axes)}{hint}"
            )
        known = {str(point[axis]) for point in points}
        if not known.issuperset(wanted):
            raise UserError(
                f"--only: {word}: {path} has {axis} = {', '.join(sorted(known))} at that place"
            )
        points = [point for point in points if str(point[axis]) in wanted]
    return points


def _cell(parts: Mapping[str, Any], values: Values, home: Path, path: Path, report: Report) -> Cell:
    """One point of the grid; notes about the sweep's own paths go to the report."""
    files = [_beside(name, path) for name in parts.get("base", [])]
    settings = dict(parts.get("settings", {}))
    for axis, value in values.items():
        choices = parts["grid"][axis]
        file_of_value = ROOT / "configs" / axis / f"{value}.yml"
        named = isinstance(choices, dict) and isinstance(value, str) and value in choices
        if named:
            settings |= choices[value] or {}
        elif os.path.isfile(file_of_value):  # no error for a name that is too long
            files.append(file_of_value)
        else:
            settings[axis] = value
    settings = resolve_inputs(settings, path, report)
    name = _name(values)
    folder = home / name
    settings["save"] = str(folder)
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    config = load(files, words)
    if not config.checkpoint.finetune:  # there, load is the parent
        config = replace(
            config, checkpoint=config.checkpoint.model_copy(update={"load": str(folder)})
        )
    config.require_for("train")
    if config.training.train_epochs is not None:
        raise UserError(
            "train_epochs: a sweep must know its steps before it reads the text - set train_iters"
        )
    config = with_parent(config)
    evaluations = []
    for label, given in parts.get("evaluate", {}).items():
        options = dict(given or {})
        only = options.pop(ONLY, {})
        if only.items() <= values.items():
            evaluations.append(_evaluation(label, options, config))
    return Cell(name, values, folder, config, tuple(evaluations))


def _beside(name: str, path: Path) -> Path:
    """A file named in a sweep: from the sweep's own folder, else from the project's root."""
    own = path.parent / name
    return own if os.path.isfile(own) else ROOT / name


def _name(values: Mapping[str, Any]) -> str:
    return "-".join(re.sub(r"[^\w.+]+", "_", str(value)) for value in values.values())


def _evaluation(label: str, options: dict[str, Any], config: Config) -> Evaluation:
    """Keys of the configuration become settings, others options: {eval_tokens: 4096, tail: 64}."""
    words = []
    for key, value in options.items():
        if key in KEYS:
            words.append(f"{key}={json.dumps(value)}")
            continue
        several = value if isinstance(value, list) else [value]
        words += ["--" + key.replace("_", "-"), *map(str, several)]
    measured = config.evaluation
    text = json.dumps(
        [config.hash, words, measured.eval_lengths, measured.eval_tokens, measured.eval_part]
    )
    digits = hashlib.sha256(text.encode()).hexdigest()[:6]
    return Evaluation(f"{label}-{digits}", tuple(words), options)
