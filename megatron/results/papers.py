"""Papers' tables, and our numbers beside them: the difference in standard errors, or why none.

Each .yml in the folder `published` is one table, with where its numbers were read.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError

from megatron.errors import UserError, did_you_mean
from megatron.files import read_small
from megatron.results.row import ATTENTION_INPUTS, CORPUS_AXIS, Row, value_of
from megatron.results.table import in_columns, variant_of
from megatron.strict_yaml import parse

TABLES = Path(__file__).parent / "published"
LARGEST = 1 << 20  # bytes; the largest table here has a few thousand
TABLE_HEAD = ("corpus", "pos_emb", "length", "paper", "ours", "seeds", "difference", "std errors")
SHOWN = 3  # places of a refusal that are listed


# [mean] or [mean, standard deviation over seeds] as the paper prints them, or why there is none.
Number = list[Decimal] | Annotated[str, StringConstraints(pattern=r"[^\d.]")]


class Published(BaseModel):
    """A table of a paper, and what rows must have been measured by to be compared with it.

    cells: numbers by corpus, encoding and length
    sweep: file of the sweep that measures it here, or None, and `why_not` says why
    quantity: key of a row; windows: None for any number
    """

    model_config = ConfigDict(frozen=True)

    name: str
    paper: str
    provenance: str
    cells: dict[str, dict[str, dict[int, Number]]]
    sweep: str | None
    quantity: str
    protocol: str | None = None
    part: str | None = None
    windows: int | None = None
    seeds: int | None = None
    caveats: tuple[str, ...] = ()
    verified: bool = False
    why_not: str = "it names no sweep"


def published_tables() -> list[str]:
    """Names of the tables of the folder."""
    return sorted(path.stem for path in TABLES.glob("*.yml"))


def published(name: str) -> Published:
    """A table by its name, with - or _, or by the path of a .yml; UserError for a fault."""
    path = Path(name) if name.endswith(".yml") else TABLES / f"{name.replace('-', '_')}.yml"
    if not path.is_file():
        hint = did_you_mean(path.stem, published_tables())
        message = f"{name}: no such table" + (f"; {hint}" if hint else "")
        raise UserError(f"{message} - give a .yml or one of {', '.join(published_tables())}")
    try:
        text = read_small(path, LARGEST).decode()
        facts = parse(text)
        if isinstance(facts, dict):
            facts["name"] = path.stem
            # As text: 3.40 stays "3.40".
            facts["cells"] = yaml.load(text, yaml.BaseLoader).get("cells")
        return Published.model_validate(facts)
    except ValidationError as fault:
        first = fault.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(
            f"{path}: {place}: {first['msg']} - take a table of {TABLES} as an example"
        ) from None
    except (OSError, ValueError) as fault:
        raise UserError(f"{path}: cannot be read as a table: {fault}") from None


# --- Ours beside a paper's ---


@dataclass(frozen=True)
class Requirements:
    """Values that a row must have to answer a table's question.

    hashes: of the configurations of the sweep's cells, by corpus and encoding
    tokens: that training reads, so that the corpus must hold as many
    start: first window of the protocol `paper`
    """

    hashes: Mapping[tuple[str, str], frozenset[str]]
    train_length: int
    step: int
    tokens: int
    start: int | None = None


@dataclass(frozen=True)
class Compared:
    """One cell of a table.

    ours: one value for each seed, empty if there are no rows or all are refused
    refused: reasons why rows are not taken
    """

    corpus: str
    encoding: str
    length: int
    paper: Number
    ours: tuple[float, ...]
    refused: tuple[str, ...] = ()

    @property
    def difference(self) -> float | None:
        if not self.ours or isinstance(self.paper, str):
            return None
        return statistics.mean(self.ours) - float(self.paper[0])

    def standard_errors(self, seeds: int | None) -> float | None:
        """difference / sqrt(s² / n + s_paper² / seeds), or None if either spread is unknown."""
        if self.difference is None or len(self.ours) < 2 or len(self.paper) < 2 or not seeds:
            return None
        our_variance = statistics.variance(self.ours) / len(self.ours)
        paper_variance = float(self.paper[1]) ** 2 / seeds
        error = math.sqrt(our_variance + paper_variance)
        return self.difference / error if error else None


def compare(table: Published, rows: Sequence[Row], required: Requirements) -> list[Compared]:
    """Every cell of the table with the rows that answer its question; others are refused."""
    rows_of: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        # The corpus as the sweep names it, else as the row does.
        corpus = (row.get("cell") or {}).get(CORPUS_AXIS, row.get("corpus"))
        place = (corpus, row["pos_emb"], row["length"], row.get("protocol"))
        rows_of.setdefault(place, []).append(row)
    cells = []
    for corpus, encodings in table.cells.items():
        for encoding, numbers in encodings.items():
            hashes = required.hashes.get((corpus, encoding), frozenset())
            for length, number in numbers.items():
                by_seed: dict[int | None, list[float]] = {}
                refused = []
                for row in rows_of.get((corpus, encoding, length, table.protocol), ()):
                    reason = refusal(row, table, required, hashes)
                    if reason:
                        refused.append(reason)
                    else:
                        values = by_seed.setdefault(row.get("seed"), [])
                        values.append(value_of(row, table.quantity))
                ours = []
                for seed, values in by_seed.items():
                    if len(values) > 1:
                        rows_of_seed = f"seed {seed} has {len(values)} rows"
                        refused.append(f"{rows_of_seed}: give the results of one run")
                    else:
                        ours += values
                reasons = tuple(dict.fromkeys(refused))
                cells.append(Compared(corpus, encoding, length, number, tuple(ours), reasons))
    return cells


def refusal(
    row: Row, table: Published, required: Requirements, hashes: frozenset[str]
) -> str | None:
    """Why a row does not answer the table's question, or None."""
    required_facts = {
        "train_length": required.train_length,
        "step": required.step,
        "part": table.part,
        "start": required.start,
    }
    if table.windows is not None:
        required_facts["windows"] = table.windows
    for key, value in required_facts.items():
        if row.get(key) != value:
            return f"{key} is {row.get(key)}, the table's is {value}"
    if changed := variant_of([row], ATTENTION_INPUTS):
        return f"it was evaluated with {', '.join(changed)}"
    if row["config_hash"] not in hashes:
        return (
            f"configuration {row['config_hash']} is none of the sweep's:"
            " another size, recipe or text"
        )
    corpus_tokens = row.get("corpus_tokens")
    if corpus_tokens is None:
        return "the size of its corpus is not known: run the sweep where the data are"
    if corpus_tokens < required.tokens:
        has, reads = f"{corpus_tokens / 1e6:,.0f}", f"{required.tokens / 1e6:,.0f}"
        return (
            f"its corpus has {has} million tokens, training reads {reads}:"
            " a stand-in, not the paper's"
        )
    if value_of(row, table.quantity) is None:
        return row.get("reason") or f"it has no {table.quantity}"
    return None


def render(table: Published, cells: Sequence[Compared]) -> str:
    """The table as text; beneath it the reasons of refusals, and the table's caveats."""
    body: list[Sequence[str]] = [TABLE_HEAD]
    refused: dict[str, list[str]] = {}
    answered = 0
    for cell in cells:
        place = [cell.corpus, cell.encoding, str(cell.length)]
        for reason in cell.refused:
            places = refused.setdefault(reason, [])
            places.append(" ".join(place))
        paper = cell.paper
        if not isinstance(paper, str):
            paper = " ± ".join(map(str, paper))
        seeds, difference, errors = "", "", ""
        if cell.ours:
            answered += 1
            seeds = str(len(cell.ours))
        if cell.difference is not None:
            difference = f"{cell.difference:+.4g}"
        standard_errors = cell.standard_errors(table.seeds)
        if standard_errors is not None:
            errors = f"{standard_errors:+.1f}"
        body.append([*place, paper, _ours(cell), seeds, difference, errors])

    lines = [f"{table.paper}: {table.quantity}", table.provenance, ""]
    if cells:
        lines += in_columns(body)
    lines += ["", f"{answered} of {len(cells)} cells have our numbers"]
    for reason, places in refused.items():
        lines.append(f"refused: {reason} ({first_of(places)})")
    lines += [f"caveat: {caveat}" for caveat in table.caveats]
    return "\n".join(lines)


def first_of(names: Sequence[str]) -> str:
    """Names as a list of at most `SHOWN`, such as "a, b, c and 2 more"."""
    shown = ", ".join(names[:SHOWN])
    more = len(names) - SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _ours(cell: Compared) -> str:
    """Mean ± standard deviation with as many decimals as the paper's, or why there is none.

    If the paper has no standard deviation, ours has the decimals of its mean.
    """
    if not cell.ours:
        return "refused" if cell.refused else "missing"
    digits = ["0.00"]
    if not isinstance(cell.paper, str):
        digits = list(map(str, cell.paper))
    decimals = []
    for number in digits:
        _, _, fraction = number.partition(".")
        decimals.append(len(fraction))
    mean = statistics.mean(cell.ours)
    text = f"{mean:.{decimals[0]}f}"
    if len(cell.ours) == 1:
        return text
    std = statistics.stdev(cell.ours)
    return f"{text} ± {std:.{decimals[-1]}f}"
