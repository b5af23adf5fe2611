"""Numbers of papers, with where they were read; each .yml beside this file is one table."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron.errors import UserError

HERE = Path(__file__).parent


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
    """One table by its name; UserError where there is none."""
    if name not in tables():
        raise UserError(f"{name}: no such table; there are {', '.join(tables())}")
    text = (HERE / f"{name}.yml").read_text(encoding="utf-8")
    said, digits = yaml.safe_load(text), yaml.load(text, yaml.BaseLoader)["cells"]  # 3.40 stays "3.40" in the second
    cells = {
        corpus: {
            encoding: {int(length): _number(value) for length, value in row.items()} for encoding, row in table.items()
        }
        for corpus, table in digits.items()
    }
    del said["cells"]
    return Published(name, said, cells)


def _number(value: str | list[str]) -> Number:
    """A note, or [mean] or [mean, standard deviation]."""
    if isinstance(value, str):
        return Number(None, note=value)
    mean, *std = map(float, value)
    return Number(mean, std[0] if std else None, digits=tuple(value))
