"""Papers' tables, and our numbers beside them: the difference in standard errors, or why none.

Each .yml in the folder `published` is one table, with where its numbers were read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import yaml
from pydantic import BaseModel, StringConstraints

from megatron.errors import UserError, did_you_mean, in_words
from megatron.files import read_small
from megatron.results.row import ATTENTION_INPUTS, CORPUS_AXIS, Row, cell_of, value_of
from megatron.results.table import PERPLEXITY, Table, mean_and_std, shared_values, with_spread
from megatron.strict_yaml import parse

TABLES = Path(__file__).parent / "published"
LARGEST = 1 << 20  # bytes; the largest table here has a few thousand
TABLE_HEAD = ("corpus", "pos_emb", "length", "paper", "ours", "seeds", "difference", "std errors")
SHOWN = 3  # places of a refusal that are listed


# [mean] or [mean, standard deviation over seeds] as the paper prints them, or why there is none.
Number = list[Decimal] | Annotated[str, StringConstraints(pattern=r"[^\d.]")]


class Published(BaseModel, frozen=True):
    """A table of a paper, and what rows must have been measured by to be compared with it.

    cells: numbers by corpus, encoding and length
    sweep: file of the sweep that measures it here, or None, and `why_not` says why
    quantity: key of a row; windows: None for any number
    """

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
            # As text: 3.40 stays "3.40".
            facts["cells"] = yaml.load(text, yaml.BaseLoader).get("cells")
        return Published.model_validate(facts)
    except (OSError, ValueError) as fault:
        raise UserError(
            f"{path}: cannot be read as a table: {in_words(fault)} - take one of {TABLES} as an"
            " example"
        ) from None


# --- Ours beside a paper's ---


class Requirements(NamedTuple):
    """What a row must have to answer a table's question.

    facts: values of its keys
    hashes: of the configurations of the sweep's cells, by corpus and encoding
    tokens: that training reads, so that the corpus must hold as many
    """

    facts: Mapping[str, Any]
    hashes: Mapping[tuple[str, str], set[str]]
    tokens: int


@dataclass
class Cell:
    """One cell of a table.

    by_seed: our value for each seed; empty if there are no rows or all are refused
    refused: reasons why rows are not taken
    """

    corpus: str
    encoding: str
    length: int
    paper: Number
    by_seed: dict[int | None, float] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    @property
    def ours(self) -> list[float]:
        """One value for each seed."""
        return [*self.by_seed.values()]

    def difference(self, seeds: int | None) -> tuple[float | None, float | None]:
        """Our mean minus the paper's, and that in standard errors; None where it is unknown.

        difference / sqrt(s² / n + s_paper² / seeds); seeds: of the paper
        """
        mean, std = mean_and_std(self.ours)
        if mean is None or isinstance(self.paper, str):
            return None, None
        difference = mean - float(self.paper[0])
        if std is None or len(self.paper) < 2 or not seeds:
            return difference, None
        error = math.hypot(std / math.sqrt(len(self.ours)), float(self.paper[1]) / math.sqrt(seeds))
        return difference, difference / error if error else None


def compare(table: Published, rows: Sequence[Row], required: Requirements) -> list[Cell]:
    """Every cell of the table with the rows that answer its question; others are refused."""
    cells = {}
    for corpus, encodings in table.cells.items():
        for encoding, numbers in encodings.items():
            for length, number in numbers.items():
                cells[corpus, encoding, length] = Cell(corpus, encoding, length, number)
    for row in rows:
        # The corpus as the sweep names it, else as the row does.
        corpus = cell_of(row).get(CORPUS_AXIS, row.get("corpus"))
        cell = cells.get((corpus, row["pos_emb"], row["length"]))
        if cell is None or row.get("protocol") != table.protocol:
            continue
        seed = row.get("seed")
        reason = refusal(row, table, required, required.hashes.get((corpus, row["pos_emb"]), set()))
        if reason is None and seed in cell.by_seed:
            reason = f"seed {seed} has several rows: give the results of one run"
        if reason is None:
            cell.by_seed[seed] = value_of(row, table.quantity)
        elif reason not in cell.refused:
            cell.refused.append(reason)
    return [*cells.values()]


def refusal(row: Row, table: Published, required: Requirements, hashes: set[str]) -> str | None:
    """Why a row does not answer the table's question, or None."""
    for key, value in required.facts.items():
        if row.get(key) != value:
            return f"{key} is {row.get(key)}, the table's is {value}"
    if changed := shared_values([row], ATTENTION_INPUTS):
        return f"it was evaluated with {', '.join(changed)}"
    if row["config_hash"] not in hashes:
        return (
            f"configuration {row['config_hash']} is none of the sweep's:"
            " another size, recipe or text"
        )
    corpus_tokens = row.get("corpus_tokens") or 0
    if corpus_tokens < required.tokens:
        has, reads = f"{corpus_tokens / 1e6:,.0f}", f"{required.tokens / 1e6:,.0f}"
        return (
            f"its corpus has {has} million tokens (0: not known), training reads {reads}:"
            " a stand-in, not the paper's"
        )
    if value_of(row, table.quantity) is None:
        return row.get("reason") or f"it has no {table.quantity}"
    return None


def render(table: Published, cells: Sequence[Cell]) -> str:
    """The table as text; beneath it the reasons of refusals, and the table's caveats."""
    body, refused = [], {}
    for cell in cells:
        place = [cell.corpus, cell.encoding, str(cell.length)]
        for reason in cell.refused:
            refused.setdefault(reason, []).append(" ".join(place))
        paper = cell.paper if isinstance(cell.paper, str) else " ± ".join(map(str, cell.paper))
        ours = "refused" if cell.refused else "missing"
        if cell.ours:
            ours = with_spread(PERPLEXITY.form, *mean_and_std(cell.ours))
        difference, errors = cell.difference(table.seeds)
        numbers = ["" if difference is None else f"{difference:+.4g}"]
        numbers.append("" if errors is None else f"{errors:+.1f}")
        body.append([*place, paper, ours, str(len(cell.ours) or ""), *numbers])
    answered = sum(bool(cell.ours) for cell in cells)
    notes = [f"{answered} of {len(cells)} cells have our numbers"]
    for reason, places in refused.items():
        more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
        notes.append(f"refused: {reason} ({', '.join(places[:SHOWN])}{more})")
    notes += [f"caveat: {caveat}" for caveat in table.caveats]
    title = f"{table.paper}: {table.quantity}\n{table.provenance}\n"
    return Table(TABLE_HEAD, body, ["", *notes], title).text()
