"""Numbers of papers, with where they were read; each .yml beside this file is one table."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron.errors import UserError

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Number:
    """mean and, where it is known, standard deviation over seeds; `note` where the paper has no number."""

    mean: float | None
    std: float | None = None
    note: str = ""


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
    said = yaml.safe_load((HERE / f"{name}.yml").read_text(encoding="utf-8"))
    cells = {
        corpus: {
            encoding: {
                length: Number(None, note=value) if isinstance(value, str) else Number(*value)
                for length, value in row.items()
            }
            for encoding, row in table.items()
        }
        for corpus, table in said.pop("cells").items()
    }
    return Published(name, said, cells)
