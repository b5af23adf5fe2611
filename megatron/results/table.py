"""Tables as text and as Markdown, and those of perplexity, bits and accuracies by length."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from megatron.errors import UserError
from megatron.results.labels import kinds, runs, sections
from megatron.results.row import (
    BYTES,
    EXACT,
    MEAN,
    NOTES,
    PIECES,
    PROTOCOL_OPTIONS,
    SETTING,
    SHOWN_IF_SET,
    TASK,
    USUAL,
    VARIANT,
    Row,
    identity,
    plain,
    shown_fact,
    text_of,
    trained_length,
    value_of,
    with_facts,
)
from megatron.results.statistics import perplexity_of, prefix_curve

# Protocols that score other text at each length.
OTHER_TEXT = ("paper", "position")
OTHER_TEXT_NOTE = (
    "each length has its own text: compare encodings at a length, not one encoding at two"
)
REPEATED_TEXT = (
    "length {length}: the part is short and was read up to {epochs} times:"
    " windows repeat text, intervals are too narrow"
)
COUNTED = {
    EXACT: "bytes counted by the tokenizer",
    MEAN: "bytes estimated: tokens times the mean of the whole corpus",
}
OTHER_TOKENIZERS = (
    "tokenizers differ: the same number of tokens is not the same text, so compare runs"
    " that scored about the same bytes of the same part"
)
MEASURE_AGAIN = "measure again with evaluate.py where the tokenizer's files or a new card exist"
# Token accuracy of guessing, in percent, where answers have few values.
GUESSES = {"task:parity": 50, "task:flip_flop": 50}


# --- One table, as text and as Markdown; the page's template writes it as HTML ---


@dataclass
class Table:
    """Headings, lines of cells and the notes beneath; title: a line above them."""

    head: Sequence[str]
    body: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    title: str = ""

    def text(self) -> str:
        """For the terminal: the first column to the left, others to the right."""
        head, *body = in_columns([self.head, *self.body], numbers=True)
        width = len(head)
        table = [head.rstrip(), "-" * width, *body]
        table = [self.title, *table] if self.title else [*table, ""]
        return "\n".join([*table, *self.notes])

    def markdown(self) -> str:
        """The same table in Markdown."""
        rule = ["---"] + ["---:"] * (len(self.head) - 1)
        lines = [self.title, ""] if self.title else []
        for words in (self.head, rule, *self.body):
            cells = [word.replace("|", "\\|") for word in words]
            text = " | ".join(cells).replace("*", "\\*")
            lines.append(f"| {text} |")
        if self.notes:
            lines += ["", "  \n".join(self.notes).replace("*", "\\*")]
        return "\n".join(lines)


def in_columns(lines: Sequence[Sequence[str]], *, numbers: bool = False) -> list[str]:
    """A text line for each line of words. Every column begins at the same place in all of them.

    numbers: all columns but the first end at the same place, and no line is shorter than others
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for words in lines:
        padded = [word.ljust(width) for word, width in zip(words, widths, strict=True)]
        if numbers:
            right = zip(words[1:], widths[1:], strict=True)
            padded[1:] = [word.rjust(width) for word, width in right]
        text = "  ".join(padded)
        texts.append(text if numbers else text.rstrip())
    return texts


def cell(perplexity: float | None) -> str:
    """A perplexity with three significant digits or more, no wider than a column."""
    if perplexity is None:
        return "n/a"
    if perplexity < 99.995:
        return f"{perplexity:.2f}"
    if perplexity < 999.95:
        return f"{perplexity:.1f}"
    if perplexity < 99999.5:
        return f"{perplexity:.0f}"
    return f"{perplexity:.1e}"


def bits(number: float | None) -> str:
    """Bits per byte for a table."""
    return "n/a" if number is None else f"{number:.4f}"


def mean_and_std(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation over seeds; (None, None) if a seed has no number.

    The standard deviation of one seed is None.
    """
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return None, None
    std = statistics.stdev(numbers) if len(numbers) > 1 else None
    return statistics.fmean(numbers), std


def with_spread(mean: str, std: float | None) -> str:
    """A mean as a cell shows it, ± a standard deviation with as many decimals."""
    if std is None:
        return mean
    if "e" in mean:
        return f"{mean} ± {std:.2g}"
    decimals = len(mean.partition(".")[2])
    return f"{mean} ± {std:.{decimals}f}"


# --- Perplexity, bits per byte and accuracy by length ---


@dataclass(frozen=True)
class Quantity:
    """A number of rows: its key, its name above and below a table, and how a cell shows it."""

    key: str
    name: str
    form: Callable[[float | None], str]
    scale: int = 1

    def of(self, row: Row) -> float | None:
        """The number of a row; None if it has none."""
        value = cast("Mapping[str, float | None]", row).get(self.key)
        return None if value is None else self.scale * value

    def cells(self, rows: Sequence[Row]) -> dict[int, str]:
        """The cell of each length: the mean over rows, ± their standard deviation."""
        values: dict[int, list[float | None]] = {}
        for row in rows:
            values.setdefault(row["length"], []).append(self.of(row))
        spreads = {length: mean_and_std(numbers) for length, numbers in values.items()}
        return {
            length: with_spread(self.form(mean), std) for length, (mean, std) in spreads.items()
        }


def _percent(number: float | None) -> str:
    return "n/a" if number is None else f"{number:.1f}"


PERPLEXITY = Quantity("perplexity", "perplexity", cell)
BITS = Quantity("bits_per_byte", "bits per byte", bits)
TOKENS_RIGHT = Quantity("token_accuracy", "token accuracy: % of answer tokens right", _percent, 100)
ANSWERS_RIGHT = Quantity("accuracy", "accuracy: % of answers right in every token", _percent, 100)


def quantities_of(rows: Sequence[Row]) -> list[Quantity]:
    """What tables of rows of one text show: perplexity, and of a task the accuracy.

    Whole answers have a table of their own if they differ from single tokens.
    """
    if rows[0].get("protocol") != TASK:
        return [PERPLEXITY]
    differ = any(TOKENS_RIGHT.of(row) != ANSWERS_RIGHT.of(row) for row in rows)
    return [TOKENS_RIGHT, ANSWERS_RIGHT] if differ else [TOKENS_RIGHT]


def table(
    rows: Sequence[Row],
    *,
    over_seeds: bool = False,
    bits_per_byte: bool = False,
    markdown: bool = False,
) -> str:
    """Tables for each text and protocol: one line per run, one column per length, notes beneath.

    Several have headings: numbers are comparable within one table only.
    over_seeds: one line per encoding, mean ± standard deviation
    bits_per_byte: in place of others, whatever the tokenizers; UserError if no row has any
    """
    keys, shown = SETTING, rows
    if bits_per_byte:
        keys = tuple(key for key in SETTING if key != "tokenizer")
        shown = with_bits(rows)
        if not shown:
            raise UserError(f"--bits-per-byte: none of these rows has them - {MEASURE_AGAIN}")
    texts = sections(shown, keys)
    parts = []
    for heading, group in texts.items():
        if len(texts) > 1:
            parts.append(heading)
        for quantity in [BITS] if bits_per_byte else quantities_of(group):
            shown_table = table_of_text(group, quantity, over_seeds=over_seeds)
            parts.append(shown_table.markdown() if markdown else shown_table.text())
    if left_out := len(rows) - len(shown):
        parts.append(f"left out: {left_out} rows without bits per byte - {MEASURE_AGAIN}")
    return "\n\n".join(parts)


def table_of_text(rows: Sequence[Row], quantity: Quantity, *, over_seeds: bool = False) -> Table:
    """The table of rows of one text, as `by_text` groups them."""
    groups = kinds(rows) if over_seeds else runs(rows)
    lengths = sorted({row["length"] for row in rows})
    head = ["pos_emb", *starred(rows, lengths)]
    body = []
    for label, group in groups.items():
        cells = quantity.cells(group)
        body.append([label, *(cells.get(length, "") for length in lengths)])
    notes = []
    if quantity in (PERPLEXITY, TOKENS_RIGHT):
        notes = _notes(rows, groups, quantity, each=not over_seeds)
    elif quantity is BITS:
        notes = _notes_on_bytes(rows, groups)
    if over_seeds:
        counts = [len({row.get("seed") for row in group}) for group in groups.values()]
        head.insert(1, "seeds")
        for line, count in zip(body, counts, strict=True):
            line.insert(1, str(count))
        if max(counts) > 1:
            notes.append("mean ± standard deviation over seeds")
    return Table(head, body, notes, title=f"{quantity.name} on {setting(rows)}")


def starred(rows: Sequence[Row], lengths: Iterable[int]) -> list[str]:
    """Headings of lengths, with a star at those of a training."""
    trained = {trained_length(row) for row in rows}
    return [f"{length}*" if length in trained else str(length) for length in lengths]


def by_length(rows: Sequence[Row], lengths: Sequence[int]) -> list[Row]:
    """The rows, where a row with losses by position becomes one row for each of `lengths`.

    Such a row measured all shorter lengths, too: the mean over the first positions of its windows.
    """
    cut = []
    for row in rows:
        losses = row.get("position_losses")
        if not losses:
            cut.append(row)
            continue
        curve = prefix_curve(row.get("position_edges", []), losses)
        # Losses of windows and blocks, and their bytes, are those of the whole windows.
        beginning = cast("Row", {key: row[key] for key in row if key not in (*PIECES, *BYTES)})
        for length in lengths:
            loss = curve[length]
            numbers = {"length": length, "tokens": row["windows"] * length}
            numbers |= {"loss": loss, "perplexity": perplexity_of(loss)}
            cut.append(with_facts(beginning if length < row["length"] else row, numbers))
    return cut


def with_bits(rows: Sequence[Row]) -> list[Row]:
    """The rows that have bits per byte: older ones have none."""
    return [row for row in rows if row.get("bits_per_byte") is not None]


# --- Notes ---


def _notes_on_bytes(rows: Sequence[Row], lines: Mapping[str, Sequence[Row]]) -> list[str]:
    """How many bytes the rows of each line scored, and how these were counted."""
    counts = {}
    for label, group in lines.items():
        sizes = [row.get("bytes", 0) for row in group]
        size = from_to(f"{min(sizes):,.0f}", f"{max(sizes):,.0f}")
        ways = dict.fromkeys(row.get("bytes_from", "") for row in group)
        how = "; ".join(COUNTED.get(way, f"bytes from {way}") for way in ways)
        counts[label] = f"{size} bytes scored, {how}"
    if len(counts) > 1 and len({*counts.values()}) == 1:
        counts = {"each": next(iter(counts.values()))}
    notes = [f"{label}: {count}" for label, count in counts.items()]
    if len({row.get("tokenizer") for row in rows}) > 1:
        notes.append(OTHER_TOKENIZERS)
    return notes


def _notes(
    rows: Sequence[Row], lines: Mapping[str, Sequence[Row]], quantity: Quantity, *, each: bool
) -> list[str]:
    """Notes: each run, why cells are empty, and what cannot be compared.

    lines: the rows of each line of the table; each: a line for the facts of each run
    """
    groups = runs(rows)
    differing = [key for key in NOTES if len({row.get(key) for row in rows}) > 1]
    if len(groups) == 1:
        differing = [*NOTES]

    def facts(row: Row, keys: Iterable[str], label: str = "") -> str:
        words = []
        for key in keys:
            value = shown_fact(row, key)
            if value is not None and f", {key} {plain(value)}," not in f"{label},":
                words.append(NOTES[key].format(value))
        return ", ".join(words)

    notes = []
    if shared := facts(rows[0], [key for key in NOTES if key not in differing]):
        notes.append(f"each: {shared}")
    lengths = {row["length"] for row in rows}
    if rows[0].get("protocol") in OTHER_TEXT and len(lengths) > 1:
        notes.append(OTHER_TEXT_NOTE)
    if guess := GUESSES.get(rows[0].get("corpus") or ""):
        notes.append(f"guessing has {guess} % right")
    epochs_of = {row["length"]: row.get("epochs") for row in rows if row.get("epochs")}
    for length, epochs in sorted(epochs_of.items()):
        notes.append(REPEATED_TEXT.format(length=length, epochs=epochs))
    trained: dict[int | None, list[str]] = {}
    for label, group in lines.items():
        trained.setdefault(trained_length(group[0]), []).append(label)
    for length in sorted(lengths & trained.keys()):
        which = f" {length} of {'; '.join(trained[length])}" if len(trained) > 1 else ""
        notes.append(f"* training length{which}")
    for label, group in groups.items():
        if each and (words := facts(group[0], differing, label)):
            notes.append(f"{label}: {words}")
        refused = [row for row in group if quantity.of(row) is None]
        if refused:
            at = ", ".join(str(row["length"]) for row in refused)
            notes.append(f"{label}: n/a at {at}: {refused[0].get('reason') or 'no reason given'}")
    return notes


def setting(rows: Sequence[Row]) -> str:
    """Text, tokens, windows and protocol of rows of one text, and how they were evaluated.

    A window of a task is a problem, and its tokens are those of the answer.
    """
    first = rows[0]
    protocol = first.get("protocol")
    facts = [text_of(first)]
    counts = sorted(row["tokens"] for row in rows)
    tokens = from_to(f"{counts[0]:,}", f"{counts[-1]:,}")
    by_length = sorted(rows, key=lambda row: row["length"])
    sizes = [f"{row['windows']} x {row['length']}" for row in by_length]
    if protocol == TASK:
        problems = first["windows"]
        facts.append(f"{problems} problems of the largest size that fits, {tokens} answer tokens")
    else:
        facts.append(f"{tokens} tokens ({from_to(sizes[0], sizes[-1])})")
    if protocol and len({row.get("protocol") for row in rows}) == 1:
        facts.append(f"protocol {protocol}")
    for key in PROTOCOL_OPTIONS:
        value = first.get(key)
        shared = len({identity(row, [key]) for row in rows}) == 1
        if shared and value is not None and (key, value) != ("start", 0):
            facts.append(f"{key} {plain(value)}")
    return ", ".join([*filter(None, facts), *variant_of(rows, (*VARIANT, *SHOWN_IF_SET))])


def from_to(first: object, last: object) -> str:
    """Two ends, such as "2 to 13", or one if they are the same."""
    return str(first) if first == last else f"{first} to {last}"


def variant_of(rows: Sequence[Row], keys: Iterable[str] = VARIANT) -> list[str]:
    """How all rows were evaluated, or their models built, where it is unusual: "window 512".

    Labels contain only what differs between rows.
    """
    changes = []
    for key in keys:
        values = {value_of(row, key) for row in rows}
        value = values.pop()
        if not values and value not in (None, USUAL.get(key)):
            changes.append(f"{key} {plain(value)}")
    return changes
