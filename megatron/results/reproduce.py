"""Our numbers beside a paper's: the difference in standard errors, or why there is none."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.results.columns import in_columns
from megatron.results.published import Number, Published
from megatron.results.row import CORPUS_AXIS, Row, value_of
from megatron.results.table import attention_inputs

TABLE_HEAD = ("corpus", "pos_emb", "length", "paper", "ours", "seeds", "difference", "std errors")
SHOWN = 3  # places of a refusal that are listed


@dataclass(frozen=True)
class Requirements:
    """What a row must be to answer a table's question.

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

    ours: one value for each seed, empty where there are no rows or all are refused
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
        if not self.ours or self.paper.mean is None:
            return None
        return statistics.mean(self.ours) - self.paper.mean

    def standard_errors(self, seeds: int | None) -> float | None:
        """difference / sqrt(s² / n + s_paper² / seeds); None where either spread is unknown."""
        if self.difference is None or len(self.ours) < 2 or self.paper.std is None or not seeds:
            return None
        our_variance = statistics.variance(self.ours) / len(self.ours)
        paper_variance = self.paper.std**2 / seeds
        error = math.sqrt(our_variance + paper_variance)
        return self.difference / error if error else None


def compare(table: Published, rows: Sequence[Row], required: Requirements) -> list[Compared]:
    """Every cell of the table with the rows that answer its question; others are refused."""
    found = []
    for corpus, encoding, length, number in _numbers(table):
        place = (corpus, encoding, length, table.protocol)
        own = [row for row in rows if _place_of(row) == place]
        hashes = required.hashes.get((corpus, encoding), frozenset())
        values, refused = _values_by_seed(table, own, required, hashes)
        found.append(Compared(corpus, encoding, length, number, values, refused))
    return found


def unmatched(table: Published, rows: Sequence[Row]) -> int:
    """How many rows belong to no cell: another corpus, encoding, length or protocol."""
    places = {(*place, table.protocol) for *place, _ in _numbers(table)}
    return len([row for row in rows if _place_of(row) not in places])


def _numbers(table: Published) -> Iterator[tuple[str, str, int, Number]]:
    for corpus, encodings in table.cells.items():
        for encoding, numbers in encodings.items():
            for length, number in numbers.items():
                yield corpus, encoding, length, number


def _place_of(row: Row) -> tuple[object, ...]:
    return corpus_of(row), row["pos_emb"], row["length"], row.get("protocol")


def corpus_of(row: Row) -> str | None:
    """The corpus as the sweep names it, else as the row does."""
    return (row.get("cell") or {}).get(CORPUS_AXIS, row.get("corpus"))


def _values_by_seed(
    table: Published, rows: Sequence[Row], required: Requirements, hashes: frozenset[str]
) -> tuple[tuple[float, ...], tuple[str, ...]]:
    """One value for each seed that has exactly one, and why other rows are not taken."""
    by_seed: dict[int | None, list[float]] = {}
    refused: dict[str, None] = {}
    for row in rows:
        reason = refusal(row, table, required, hashes)
        if reason:
            refused[reason] = None
        else:
            by_seed.setdefault(row.get("seed"), []).append(value_of(row, table.quantity))
    for seed, values in by_seed.items():
        if len(values) > 1:
            reason = f"seed {seed} has {len(values)} rows: give the results of one run"
            refused[reason] = None
    single = [values[0] for values in by_seed.values() if len(values) == 1]
    return tuple(single), tuple(refused)


def refusal(
    row: Row, table: Published, required: Requirements, hashes: frozenset[str]
) -> str | None:
    """Why a row does not answer the table's question; None where it does."""
    other = _other_question(row, table, required)
    if other:
        return other
    if row["config_hash"] not in hashes:
        return (
            f"configuration {row['config_hash']} is none of the sweep's:"
            " another size, recipe or text"
        )
    corpus_tokens = row.get("corpus_tokens")
    if corpus_tokens is None:
        return "the size of its corpus is not known: collect it where the data are"
    if corpus_tokens < required.tokens:
        has, reads = f"{corpus_tokens / 1e6:,.0f}", f"{required.tokens / 1e6:,.0f}"
        return (
            f"its corpus has {has} million tokens, training reads {reads}:"
            " a stand-in, not the paper's"
        )
    if value_of(row, table.quantity) is None:
        return row.get("reason") or f"it has no {table.quantity}"
    return None


def _other_question(row: Row, table: Published, required: Requirements) -> str | None:
    wanted = {
        "train_length": required.train_length,
        "step": required.step,
        "part": table.part,
        "start": required.start,
    }
    if table.windows is not None:
        wanted["windows"] = table.windows
    for key, value in wanted.items():
        if row.get(key) != value:
            return f"{key} is {row.get(key)}, the table's is {value}"
    changed = attention_inputs([row])
    if changed:
        return f"it was evaluated with {', '.join(changed)}"
    return None


# --- Text ---


def render(table: Published, cells: Sequence[Compared]) -> str:
    """The table as text; beneath it the reasons of refusals, and the table's caveats."""
    lines = [f"{table.paper}: {table.quantity}", table.provenance, ""]
    if cells:
        lines += in_columns([TABLE_HEAD, *(_line(cell, table.seeds) for cell in cells)])
    answered = len([cell for cell in cells if cell.ours])
    lines += ["", f"{answered} of {len(cells)} cells have our numbers"]
    lines += _refusals(cells)
    lines += [f"caveat: {caveat}" for caveat in table.caveats]
    return "\n".join(lines)


def _refusals(cells: Sequence[Compared]) -> list[str]:
    places_of: dict[str, list[str]] = {}
    for cell in cells:
        for reason in cell.refused:
            place = f"{cell.corpus} {cell.encoding} {cell.length}"
            places_of.setdefault(reason, []).append(place)
    lines = []
    for reason, places in places_of.items():
        lines.append(f"refused: {reason} ({first_of(places)})")
    return lines


def first_of(names: Sequence[str]) -> str:
    """Names as a list of at most `SHOWN`, such as "a, b, c and 2 more"."""
    shown = ", ".join(names[:SHOWN])
    more = len(names) - SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def _line(cell: Compared, seeds: int | None) -> list[str]:
    paper = " ± ".join(cell.paper.digits) if cell.paper.digits else cell.paper.note
    count = str(len(cell.ours)) if cell.ours else ""
    difference, errors = cell.difference, cell.standard_errors(seeds)
    return [
        cell.corpus,
        cell.encoding,
        str(cell.length),
        paper,
        _ours(cell),
        count,
        "" if difference is None else f"{difference:+.4g}",
        "" if errors is None else f"{errors:+.1f}",
    ]


def _ours(cell: Compared) -> str:
    """Mean ± standard deviation with as many decimals as the paper's; else why there is none.

    Where the paper has no standard deviation, ours has the decimals of its mean.
    """
    if not cell.ours:
        return "refused" if cell.refused else "missing"
    decimals = [len(text.partition(".")[2]) for text in cell.paper.digits] or [2]
    mean = f"{statistics.mean(cell.ours):.{decimals[0]}f}"
    if len(cell.ours) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(cell.ours):.{decimals[-1]}f}"
