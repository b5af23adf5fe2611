"""Ours beside a paper's, cell by cell: the difference in standard errors, or why there is none."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.results.published import Number, Published
from megatron.results.row import VARIANT, Row, plain, value_of

TABLE_HEAD = ("corpus", "pos_emb", "length", "paper", "ours", "seeds", "difference", "std errors")


@dataclass(frozen=True)
class Asked:
    """What a row must be to answer the question: of which configurations (hashes of the sweep's cells, by corpus and
    encoding), and how many training tokens the corpus must at least hold."""

    hashes: Mapping[tuple[str, str], frozenset[str]]
    train_length: int
    step: int
    tokens: int
    start: int | None = None
    """First window of the protocol `paper`."""


@dataclass(frozen=True)
class Compared:
    """One cell. ours: values by seed; empty where it is missing or `refused` says why rows are not taken."""

    corpus: str
    encoding: str
    length: int
    paper: Number
    ours: tuple[float, ...]
    refused: tuple[str, ...] = ()

    @property
    def difference(self) -> float | None:
        return (
            statistics.mean(self.ours) - self.paper.mean
            if self.ours and self.paper.mean is not None
            else None
        )

    def standard_errors(self, seeds: int | None) -> float | None:
        """difference / sqrt(s² / n + s_paper² / seeds); None where either spread is unknown."""
        if self.difference is None or len(self.ours) < 2 or self.paper.std is None or not seeds:
            return None
        error = math.sqrt(
            statistics.variance(self.ours) / len(self.ours) + self.paper.std**2 / seeds
        )
        return self.difference / error if error else None


def compare(table: Published, rows: Sequence[Row], asked: Asked) -> list[Compared]:
    """Every cell of the table, with our rows that answer its question; other rows of that cell are refused."""
    found = []
    for corpus, encodings in table.cells.items():
        for encoding, numbers in encodings.items():
            for length, number in numbers.items():
                mine = [
                    row
                    for row in rows
                    if (corpus_of(row), row["pos_emb"], row["length"]) == (corpus, encoding, length)
                    and row.get("protocol") == table.said["protocol"]
                ]
                found.append(_compared(table, corpus, encoding, length, number, mine, asked))
    return found


def unmatched(table: Published, rows: Sequence[Row]) -> int:
    """How many rows are of no cell of the table: of another corpus, encoding, length or protocol."""
    cells = {
        (corpus, encoding, length, table.said["protocol"])
        for corpus, encodings in table.cells.items()
        for encoding, numbers in encodings.items()
        for length in numbers
    }
    return sum(
        (corpus_of(row), row["pos_emb"], row["length"], row.get("protocol")) not in cells
        for row in rows
    )


def corpus_of(row: Row) -> Any:
    return row.get("cell", {}).get("data", row.get("corpus"))


def _compared(
    table: Published,
    corpus: str,
    encoding: str,
    length: int,
    number: Number,
    rows: Sequence[Row],
    asked: Asked,
) -> Compared:
    by_seed: dict[Any, list[float]] = {}
    refused: list[str] = []
    for row in rows:
        reason = refusal(row, table, asked, asked.hashes.get((corpus, encoding), frozenset()))
        if reason:
            refused.append(reason)
        else:
            by_seed.setdefault(row["seed"], []).append(row[table.said["quantity"]])
    for seed, values in by_seed.items():
        if len(values) > 1:
            refused.append(f"seed {seed} is there {len(values)} times: give the results of one run")
    ours = tuple(values[0] for values in by_seed.values() if len(values) == 1)
    return Compared(corpus, encoding, length, number, ours, tuple(dict.fromkeys(refused)))


def refusal(row: Row, table: Published, asked: Asked, hashes: frozenset[str]) -> str | None:
    """Why a row does not answer the table's question; None where it does."""
    wanted = {"train_length": asked.train_length, "step": asked.step, "part": table.said["part"]}
    wanted |= {"windows": table.said["windows"], "start": asked.start}
    for key, value in wanted.items():
        if row.get(key) != value and (key, value) != ("windows", None):
            return f"{key} is {row.get(key)}, the table's is {value}"
    changed = [
        f"{key} {plain(value_of(row, key))}" for key in VARIANT if key != "dtype" and row.get(key)
    ]  # every row has a dtype
    if changed:
        return f"it was evaluated with {', '.join(changed)}"
    if row["config_hash"] not in hashes:
        return f"configuration {row['config_hash']} is none of the sweep's: another size, recipe or text"
    if row.get("corpus_tokens") is None:
        return "the size of its corpus is not known: collect it where the data are"
    if row["corpus_tokens"] < asked.tokens:
        held = f"{row['corpus_tokens'] / 1e6:,.0f} million tokens"
        return f"its corpus holds {held}, training reads {asked.tokens / 1e6:,.0f}: a stand-in, not the paper's"
    if row.get(table.said["quantity"]) is None:
        return row.get("reason") or f"it has no {table.said['quantity']}"
    return None


def render(table: Published, cells: Sequence[Compared]) -> str:
    """The table as text, and beneath it the reasons for empty cells and what any comparison suffers from."""
    body = [_line(cell, table.said.get("seeds")) for cell in cells]
    lines = [f"{table.said['paper']}: {table.said['quantity']}", table.said["provenance"], ""]
    if body:
        widths = [max(map(len, column)) for column in zip(TABLE_HEAD, *body, strict=True)]
        lines += ["  ".join(word.ljust(width) for word, width in zip(line, widths, strict=True)).rstrip()
                  for line in (list(TABLE_HEAD), *body)]  # fmt: skip
    answered = sum(bool(cell.ours) for cell in cells)
    lines += ["", f"{answered} of {len(cells)} cells are there; none is filled in"]
    reasons: dict[str, list[str]] = {}
    for cell in cells:
        for reason in cell.refused:
            reasons.setdefault(reason, []).append(f"{cell.corpus} {cell.encoding} {cell.length}")
    for reason, places in reasons.items():
        shown = ", ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
        lines.append(f"refused: {reason} ({shown})")
    return "\n".join([*lines, *(f"mind: {caveat}" for caveat in table.said["caveats"])])


def _line(cell: Compared, seeds: int | None) -> list[str]:
    paper = cell.paper.note if cell.paper.mean is None else " ± ".join(cell.paper.digits)
    ours = (
        _as_printed(cell.ours, cell.paper.digits)
        if cell.ours
        else "refused"
        if cell.refused
        else "missing"
    )
    errors = cell.standard_errors(seeds)
    return [
        *(cell.corpus, cell.encoding, str(cell.length), paper, ours, str(len(cell.ours) or "")),
        "" if cell.difference is None else f"{cell.difference:+.4g}",
        "" if errors is None else f"{errors:+.1f}",
    ]


def _as_printed(values: Sequence[float], digits: Sequence[str]) -> str:
    """Mean ± standard deviation with as many decimals as the paper's; without its std, those of its mean."""
    decimals = [len(text.partition(".")[2]) for text in digits] or [2]
    mean = f"{statistics.mean(values):.{decimals[0]}f}"
    return mean + (f" ± {statistics.stdev(values):.{decimals[-1]}f}" if len(values) > 1 else "")
