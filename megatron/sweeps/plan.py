"""A sweep file -> its cells: one checked configuration and its evaluations for each point of a grid."""

import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import Config, load
from megatron.config.read import find_file, read_file
from megatron.config.schema import KEYS
from megatron.errors import UserError
from megatron.files import ROOT

PARTS = {"base", "settings", "grid", "exclude", "extra", "evaluate"}
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
        """Rows of an evaluation; they lie under another name until evaluate.py has ended well."""
        return (
            self.folder
            / "evaluation"
            / f"{evaluation.label}{'' if finished else '.unfinished'}.jsonl"
        )


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
    """The sweep that a file describes; UserError with every fault of the file, or every bad cell.

    folder: where its runs are kept, unset: runs/sweeps/NAME; only: `axis=value,value` words that choose cells
    """
    try:
        path = find_file(path)
        given = read_file(path)
    except ValueError as fault:
        raise UserError(f"sweep: {fault}") from None
    _check_parts(given, path)
    home = Path(folder) if folder else Path("runs/sweeps") / path.stem
    cells, faults = [], []
    for values in _chosen(_points(given, path), only, path):
        try:
            cells.append(_cell(given, values, home, path))
        except UserError as fault:
            faults.append(f"{_name(values)}: {fault}")
    if faults:
        raise UserError(
            "\n".join([f"{path}: {len(faults)} cells cannot be run", *dict.fromkeys(faults)])
        )
    return Sweep(path.stem, path, home, tuple(cells))


def _check_parts(given: dict[str, Any], path: Path) -> None:
    kinds = {
        "base": list,
        "settings": dict,
        "grid": dict,
        "exclude": list,
        "extra": list,
        "evaluate": dict,
    }
    faults = [
        f"{key}: no such part; a sweep has {', '.join(sorted(PARTS))}"
        for key in given.keys() - PARTS
    ]
    for key in given.keys() & PARTS:
        if not isinstance(given[key], kinds[key]):
            faults.append(f"{key}: give a {'list' if kinds[key] is list else 'mapping'}")
    if not given.get("grid"):
        faults.append(
            "grid: not given; write axes with their values, such as pos_emb: [alibi, rotary]"
        )
    for axis, choices in (given.get("grid") or {}).items() if not faults else ():
        if not isinstance(choices, list | dict) or not choices:
            faults.append(
                f"grid: {axis} has no values; give a list, or a mapping of names to settings"
            )
    if faults:
        raise UserError("\n  ".join([f"bad sweep ({path})", *faults]))


def _points(given: dict[str, Any], path: Path) -> list[Values]:
    """The grid, its first axis changing fastest, so that what is cut short is whole in the last one (the seeds)."""
    grid = given["grid"]
    axes = [list(choices) for choices in reversed(grid.values())]
    points = [dict(zip(grid, reversed(values), strict=True)) for values in itertools.product(*axes)]
    unlike = [
        point
        for point in [*given.get("exclude", []), *given.get("extra", [])]
        if not point.keys() <= grid.keys()
    ]
    unlike += [point for point in given.get("extra", []) if point.keys() != grid.keys()]
    if unlike:
        raise UserError(
            f"{path}: {unlike[0]} is no point of the grid - use its axes {', '.join(grid)}"
        )
    kept = [
        one
        for one in points
        if not any(rule.items() <= one.items() for rule in given.get("exclude", []))
    ]
    return kept + [one for one in given.get("extra", []) if one not in kept]


def _chosen(points: list[Values], only: Sequence[str], path: Path) -> list[Values]:
    for word in only:
        axis, _, wanted = word.partition("=")
        axes = list(points[0]) if points else []
        if axis not in axes:
            close = difflib.get_close_matches(axis, axes, 1)
            raise UserError(
                f"--only: {word}: {path} has no axis {axis}, it has {', '.join(axes)}"
                + (f" - did you mean {close[0]}?" if close else "")
            )
        known = {str(point[axis]) for point in points}
        unknown = set(wanted.split(",")) - known
        if unknown:
            raise UserError(
                f"--only: {word}: {path} has {axis} = {', '.join(sorted(known))} at that place"
            )
        points = [point for point in points if str(point[axis]) in wanted.split(",")]
    return points


def _cell(given: dict[str, Any], values: Values, home: Path, path: Path) -> Cell:
    files, settings = (
        [_beside(name, path) for name in given.get("base", [])],
        dict(given.get("settings", {})),
    )
    for axis, value in values.items():
        choices = given["grid"][axis]
        known = ROOT / "configs" / axis / f"{value}.yml"
        if isinstance(choices, dict) and value in choices:
            settings |= choices[value] or {}
        elif known.exists():
            files.append(known)
        else:
            settings[axis] = value
    name = _name(values)
    settings |= {"save": str(home / name), "load": str(home / name)}
    config = load(files, [f"{key}={json.dumps(value)}" for key, value in settings.items()])
    config.require_for("train")
    evaluations = [
        _evaluation(label, said or {}, config) for label, said in given.get("evaluate", {}).items()
    ]
    return Cell(name, values, home / name, config, tuple(evaluations))


def _beside(name: str, path: Path) -> Path:
    """A file named in a sweep: from the sweep's own folder, else from the project's root."""
    own = path.parent / name
    return own if own.is_file() else ROOT / name


def _name(values: Mapping[str, Any]) -> str:
    return "-".join(re.sub(r"[^\w.+]+", "_", str(value)) for value in values.values())


def _evaluation(label: str, said: dict[str, Any], config: Config) -> Evaluation:
    """Keys of the configuration become settings, others options: {eval_tokens: 4096, protocol: tail}."""
    words = []
    for key, value in said.items():
        several = value if isinstance(value, list) else [value]
        option = ["--" + key.replace("_", "-"), *map(str, several)]
        words += [f"{key}={json.dumps(value)}"] if key in KEYS else option
    measured = config.evaluation
    text = json.dumps(
        [config.hash, words, measured.eval_lengths, measured.eval_tokens, measured.eval_part]
    )
    return Evaluation(
        f"{label}-{hashlib.sha256(text.encode()).hexdigest()[:6]}", tuple(words), said
    )
