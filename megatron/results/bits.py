"""Bits per byte: numbers that can be compared between tokenizers, as perplexities cannot."""

from collections.abc import Callable, Hashable, Mapping, Sequence

from megatron.errors import UserError
from megatron.results.comparison import encodings, mean_and_std
from megatron.results.labels import runs
from megatron.results.row import EXACT, MEAN, SETTING, Row, identity, last_of_each, with_facts
from megatron.results.table import length_headings, setting, with_notes

HOW = {
    EXACT: "bytes counted by the tokenizer",
    MEAN: "bytes estimated: tokens times the mean of the whole corpus",
}
# Without the tokenizer: what these tables are there to compare.
SHARED = tuple(key for key in SETTING if key != "tokenizer")
MEASURE_AGAIN = "measure again with evaluate.py where the tokenizer's files or a new card exist"


def bits(row: Row) -> str:
    """The bits per byte of a row for a table."""
    number = row.get("bits_per_byte")
    return "n/a" if number is None else f"{number:.4f}"


def lines(rows: Sequence[Row]) -> list[str]:
    """A line for each run with its bits per byte at every length; none where no row has any."""
    found = []
    for label, group in runs(with_bits(rows)).items():
        numbers = ", ".join(f"{bits(row)} at {row['length']}" for row in group)
        found.append(f"{label}: bits per byte {numbers} ({how_counted(group)})")
    return found


def with_bits(rows: Sequence[Row]) -> list[Row]:
    """The rows that have bits per byte: older ones have none."""
    return [row for row in rows if row.get("bits_per_byte") is not None]


def by_text(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each text and protocol, whatever their tokenizers."""
    texts: dict[tuple[Hashable, ...], list[Row]] = {}
    for row in rows:
        texts.setdefault(identity(row, SHARED), []).append(row)
    return list(texts.values())


def how_counted(rows: Sequence[Row]) -> str:
    """How the bytes of the rows were counted, in words."""
    ways = dict.fromkeys(row.get("bytes_from", "") for row in rows)
    return "; ".join(HOW.get(way, f"bytes from {way}") for way in ways)


def table(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """A table for each text and protocol: one line per run, whatever its tokenizer.

    UserError where no row has bits per byte.
    """
    return _tables(rows, _table, markdown=markdown)


def over_seeds(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """The same with one line per encoding, mean ± standard deviation."""
    return _tables(rows, _over_seeds, markdown=markdown)


def _tables(rows: Sequence[Row], one_table: Callable[..., str], *, markdown: bool) -> str:
    known = with_bits(rows)
    if not known:
        raise UserError(f"--bits-per-byte: none of these rows has them - {MEASURE_AGAIN}")
    parts = [one_table(group, markdown=markdown) for group in by_text(known)]
    missing = len(rows) - len(known)
    if missing:
        parts.append(f"left out: {missing} rows without bits per byte - {MEASURE_AGAIN}")
    return "\n\n".join(parts)


def _table(rows: Sequence[Row], *, markdown: bool) -> str:
    lengths = sorted({row["length"] for row in rows})
    groups = runs(rows)
    body = []
    for label, group in groups.items():
        cells = {row["length"]: bits(row) for row in group}
        body.append([label, *(cells.get(length, "") for length in lengths)])
    head = ["pos_emb", *length_headings(rows)]
    return with_notes(head, body, _below(rows, groups), markdown=markdown)


def _over_seeds(rows: Sequence[Row], *, markdown: bool) -> str:
    lengths = sorted({row["length"] for row in rows})
    kinds = encodings(last_of_each(rows))
    body = []
    for label, kind in kinds.items():
        line = [label, str(len({row.get("seed") for row in kind}))]
        for length in lengths:
            of_seeds = [row.get("bits_per_byte") for row in kind if row["length"] == length]
            line.append(_mean(of_seeds) if of_seeds else "")
        body.append(line)
    head = ["pos_emb", "seeds", *length_headings(rows)]
    below = [*_below(rows, kinds), "mean ± standard deviation over seeds"]
    return with_notes(head, body, below, markdown=markdown)


def _mean(of_seeds: Sequence[float | None]) -> str:
    mean, std = mean_and_std(of_seeds)
    if mean is None:
        return "n/a"
    return f"{mean:.4f}" if std is None else f"{mean:.4f} ± {std:.4f}"


def _below(rows: Sequence[Row], groups: Mapping[str, Sequence[Row]]) -> list[str]:
    """What was measured, and how the bytes of each line were counted."""
    of_one_setting = [with_facts(row, {"tokenizer": None}) for row in rows]
    below = [f"bits per byte on {setting(of_one_setting)}"]
    counts = {label: f"{_bytes_of(group)}, {how_counted(group)}" for label, group in groups.items()}
    if len(counts) > 1 and len(set(counts.values())) == 1:
        counts = {"each": next(iter(counts.values()))}
    below += [f"{label}: {count}" for label, count in counts.items()]
    if len({row.get("tokenizer") for row in rows}) > 1:
        below.append(
            "tokenizers differ: the same number of tokens is not the same text, so compare runs"
            " that scored about the same bytes of the same part"
        )
    return below


def _bytes_of(rows: Sequence[Row]) -> str:
    """The bytes that were scored, such as "12,000 to 13,000 bytes scored"."""
    sizes = [row.get("bytes", 0) for row in rows]
    ends = dict.fromkeys(f"{size:,.0f}" for size in (min(sizes), max(sizes)))
    return f"{' to '.join(ends)} bytes scored"
