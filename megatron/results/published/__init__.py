"""Numbers of papers, with where they were read. Each .yml in this folder is one table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.errors import UserError, did_you_mean
from megatron.files import read_small

HERE = Path(__file__).parent
LARGEST = 1 << 20  # bytes; the largest table here has a few thousand
NEEDED = ("paper", "provenance", "sweep", "quantity", "cells")
OF_ROWS = ("protocol", "windows", "part")  # also needed where there is a sweep
WORDS = {"paper", "provenance", "quantity", "why_not"}  # keys whose value is text
SHAPE = "cells: give corpus: {encoding: {length: [mean] or [mean, std] or a note}}"


@dataclass(frozen=True)
class Number:
    """One number of a paper.

    std: over seeds, where it is known; note: why the paper has no number; digits: mean and std as
    the paper prints them
    """

    mean: float | None
    std: float | None = None
    note: str = ""
    digits: tuple[str, ...] = field(default=(), compare=False)


Cells = dict[str, dict[str, dict[int, Number]]]  # cells[corpus][encoding][length]


@dataclass(frozen=True)
class Published:
    """A table of a paper, and what rows must have been measured by to be compared with it.

    sweep: file of the sweep that measures it here, None where there is none, and `why_not` says
    why; quantity: key of a row; windows: None for any number
    """

    name: str
    paper: str
    provenance: str
    cells: Cells
    sweep: str | None
    quantity: str
    protocol: str | None = None
    part: str | None = None
    windows: int | None = None
    seeds: int | None = None
    caveats: tuple[str, ...] = ()
    verified: bool = False
    why_not: str = "it names no sweep"


def tables() -> list[str]:
    """Names of the tables of this folder."""
    return sorted(path.stem for path in HERE.glob("*.yml"))


def published(name: str) -> Published:
    """A table by its name, with - or _, or by the path of a .yml.

    UserError where there is none or it lacks something.
    """
    path = _file_of(name)
    text = _text_of(path)
    try:
        facts = yaml.safe_load(text)
        # All values as text: 3.40 stays "3.40".
        texts = yaml.load(text, yaml.BaseLoader)
    except yaml.YAMLError as fault:
        raise UserError(f"{path}: is no YAML: {fault}") from None
    if not isinstance(facts, dict):
        facts = {}
    needed = NEEDED + OF_ROWS if facts.get("sweep") else NEEDED
    missing = [key for key in needed if key not in facts]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}; take a table of {HERE} as an example")
    if not isinstance(facts["sweep"], str | None):
        raise UserError(f"{path}: sweep: {facts['sweep']} is no name of a file beside it")
    for key in sorted(WORDS & facts.keys()):
        if not isinstance(facts[key], str):
            raise UserError(f"{path}: {key}: is no text - put it in quotes")
    caveats = facts.get("caveats", [])
    if not isinstance(caveats, list) or not all(isinstance(line, str) for line in caveats):
        raise UserError(f"{path}: caveats: give a list of sentences, or leave them out")
    try:
        cells = _cells(texts["cells"])
    except (AttributeError, ValueError, TypeError):
        raise UserError(f"{path}: {SHAPE}") from None
    known = {key: facts[key] for key in Published.__dataclass_fields__ if key in facts}
    known["caveats"] = tuple(caveats)
    return Published(**{**known, "name": path.stem, "cells": cells})


def _file_of(name: str) -> Path:
    if name.endswith(".yml"):
        path = Path(name)
        hint = ""
    else:
        path = HERE / f"{name.replace('-', '_')}.yml"
        hint = did_you_mean(path.stem, tables())
    if path.is_file():
        return path
    message = f"{name}: no such table"
    if hint:
        message += f"; {hint}"
    raise UserError(f"{message} - give a .yml or one of {', '.join(tables())}")


def _text_of(path: Path) -> str:
    try:
        return read_small(path, LARGEST).decode()
    except OSError as fault:
        raise UserError(f"{path}: cannot be read ({fault.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is no UTF-8 - convert the file") from None


def _cells(texts: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Cells:
    cells: Cells = {}
    for corpus, encodings in texts.items():
        cells[corpus] = {}
        for encoding, lengths in encodings.items():
            numbers = {int(length): _number(value) for length, value in lengths.items()}
            cells[corpus][encoding] = numbers
    return cells


def _number(value: str | list[str]) -> Number:
    """A note, or [mean] or [mean, standard deviation]; ValueError for anything else."""
    if isinstance(value, str):
        if value.replace(".", "", 1).isdecimal():
            raise ValueError(f"{value} would be a note")
        return Number(None, note=value)
    mean, *std = map(float, value)
    return Number(mean, std[0] if std else None, digits=tuple(value))
