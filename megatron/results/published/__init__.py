"""Numbers of papers, with where they were read; each .yml beside this file is one table, and a user may have others."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.errors import UserError

HERE = Path(__file__).parent
NEEDED = ("paper", "provenance", "sweep", "quantity", "cells")
OF_ROWS = (
    "protocol",
    "windows",
    "part",
)  # what rows of a sweep must have been measured by; windows: null for any
SHAPE = "cells: give corpus: {encoding: {length: [mean] or [mean, std] or a note}}"


@dataclass(frozen=True)
class Number:
    """mean and, where it is known, standard deviation over seeds; `note` where the paper has no number; `digits`: both
    as the paper prints them."""

    mean: float | None
    std: float | None = None
    note: str = ""
    digits: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Published:
    """A table: cells[corpus][encoding][length]; `said` is all else that its file says."""

    name: str
    said: dict[str, Any]
    cells: dict[str, dict[str, dict[int, Number]]]


def tables() -> list[str]:
    """Names of the tables at hand."""
    return sorted(path.stem for path in HERE.glob("*.yml"))


def published(name: str) -> Published:
    """One table by its name, or by the path of a .yml; UserError where there is none or it lacks something."""
    path = Path(name) if name.endswith(".yml") else HERE / f"{name}.yml"
    if not path.is_file():
        raise UserError(f"{name}: no such table; give a .yml or one of {', '.join(tables())}")
    text = path.read_text(encoding="utf-8")
    try:
        said, digits = (
            yaml.safe_load(text),
            yaml.load(text, yaml.BaseLoader),
        )  # 3.40 stays "3.40" in the second
    except yaml.YAMLError as fault:
        raise UserError(f"{path}: is no YAML: {fault}") from None
    said = said if isinstance(said, dict) else {}
    needed = NEEDED + (OF_ROWS if said.get("sweep") else ())
    missing = [key for key in needed if key not in said]
    if missing:
        raise UserError(f"{path}: lacks {', '.join(missing)}; take a table of {HERE} as an example")
    if not isinstance(said["sweep"], str | None):
        raise UserError(f"{path}: sweep: {said['sweep']} is no name of a file beside it")
    try:
        cells = {
            corpus: {
                encoding: {int(length): _number(value) for length, value in row.items()}
                for encoding, row in table.items()
            }
            for corpus, table in digits["cells"].items()
        }
    except (AttributeError, ValueError, TypeError):
        raise UserError(f"{path}: {SHAPE}") from None
    del said["cells"]
    return Published(path.stem, {"caveats": [], "seeds": None, **said}, cells)


def _number(value: str | list[str]) -> Number:
    """A note, or [mean] or [mean, standard deviation]."""
    if isinstance(value, str):
        if value.replace(".", "", 1).isdecimal():
            raise ValueError(f"{value} would be a note")
        return Number(None, note=value)
    mean, *std = map(float, value)
    return Number(mean, std[0] if std else None, digits=tuple(value))
