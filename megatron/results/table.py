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
    LONGPPL,
    MEAN,
    NOTES,
    PIECES,
    PLACE_OPTIONS,
    SETTING,
    SETTING_OPTIONS,
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
FEW_KEYS = 1000  # key tokens, below which a perplexity is known to 15 % at best
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
        lines = [self.head, *self.body]
        columns = zip(*lines, strict=True)
        first_width, *widths = [max(map(len, column)) for column in columns]
        texts = []
        for first, *others in lines:
            padded = [first.ljust(first_width)]
            for word, width in zip(others, widths, strict=True):
                padded.append(word.rjust(width))
            texts.append("  ".join(padded))
        head, *body = texts
        rule = "-" * len(head)
        table = [head.rstrip(), rule, *body]
        if self.title:
            table.insert(0, self.title)
        else:
            table.append("")
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


def in_columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """A text line for each line of words. Every column begins at the same place in all of them."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    texts = []
    for words in lines:
        padded = [word.ljust(width) for word, width in zip(words, widths, strict=True)]
        texts.append("  ".join(padded).rstrip())
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


def percent(number: float | None) -> str:
    """A percentage for a table."""
    return "n/a" if number is None else f"{number:.1f}"


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


PERPLEXITY = Quantity("perplexity", "perplexity", cell)
BITS = Quantity("bits_per_byte", "bits per byte", bits)
TOKENS_RIGHT = Quantity("token_accuracy", "token accuracy: % of answer tokens right", percent, 100)
ANSWERS_RIGHT = Quantity("accuracy", "accuracy: % of answers right in every token", percent, 100)


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
    keys, known = SETTING, rows
    if bits_per_byte:
        keys = tuple(key for key in SETTING if key != "tokenizer")
        known = with_bits(rows)
        if not known:
            raise UserError(f"--bits-per-byte: none of these rows has them - {MEASURE_AGAIN}")
    texts = sections(known, keys)
    parts = []
    for heading, group in texts.items():
        if len(texts) > 1:
            parts.append(heading)
        for quantity in [BITS] if bits_per_byte else quantities_of(group):
            one = table_of_text(group, quantity, over_seeds=over_seeds)
            parts.append(one.markdown() if markdown else one.text())
    if len(known) < len(rows):
        left_out = len(rows) - len(known)
        parts.append(f"left out: {left_out} rows without bits per byte - {MEASURE_AGAIN}")
    return "\n\n".join(parts)


def table_of_text(rows: Sequence[Row], quantity: Quantity, *, over_seeds: bool = False) -> Table:
    """The table of rows of one text, as `by_text` groups them."""
    groups = kinds(rows) if over_seeds else runs(rows)
    lengths = sorted({row["length"] for row in rows})
    body = []
    for label, group in groups.items():
        line = [label]
        if over_seeds:
            seeds = {row.get("seed") for row in group}
            line.append(str(len(seeds)))
        for length in lengths:
            values = [quantity.of(row) for row in group if row["length"] == length]
            mean, std = mean_and_std(values)
            line.append(with_spread(quantity.form(mean), std) if values else "")
        body.append(line)
    head = ["pos_emb"]
    if over_seeds:
        head.append("seeds")
    head += starred(rows, lengths)
    notes = []
    if quantity in (PERPLEXITY, TOKENS_RIGHT):
        notes += _notes(rows, groups, quantity, each=not over_seeds)
    elif quantity is BITS:
        counts = {}
        for label, group in groups.items():
            sizes = [row.get("bytes", 0) for row in group]
            least, most = min(sizes), max(sizes)
            size = from_to(f"{least:,.0f}", f"{most:,.0f}")
            ways = {}
            for row in group:
                way = row.get("bytes_from", "")
                ways[way] = COUNTED.get(way, f"bytes from {way}")
            how = "; ".join(ways.values())
            counts[label] = f"{size} bytes scored, {how}"
        different = {*counts.values()}
        if len(counts) > 1 and len(different) == 1:
            counts = {"each": different.pop()}

        notes += [f"{label}: {count}" for label, count in counts.items()]
        tokenizers = {row.get("tokenizer") for row in rows}
        if len(tokenizers) > 1:
            notes.append(OTHER_TOKENIZERS)
    if over_seeds and any(line[1] != "1" for line in body):
        notes.append("mean ± standard deviation over seeds")
    return Table(head, body, notes, title=f"{quantity.name} on {setting(rows)}")


def starred(rows: Sequence[Row], lengths: Iterable[int]) -> list[str]:
    """Headings of lengths, with a star at those of a training."""
    trained = {trained_length(row) for row in rows}
    return [f"{length}*" if length in trained else str(length) for length in lengths]


def by_length(rows: Sequence[Row], lengths: Iterable[int]) -> list[Row]:
    """The rows, where a row with losses by position becomes one row for each of `lengths`.

    Such a row measured all shorter lengths, too: the mean over the first positions of its windows.
    """
    lengths = list(lengths)
    found = []
    for row in rows:
        if row["loss"] is None or "position_edges" not in row:
            found.append(row)
            continue
        losses = row.get("position_losses", [])
        curve = prefix_curve(row["position_edges"], losses)
        # Losses of windows and blocks, and their bytes, are those of the whole windows.
        whole = (*PIECES, *BYTES)
        beginning = cast("Row", {key: row[key] for key in row if key not in whole})
        for length in lengths:
            loss = curve[length]
            numbers = {
                "length": length,
                "tokens": row["windows"] * length,
                "loss": loss,
                "perplexity": perplexity_of(loss),
            }
            kept = beginning if length < row["length"] else row
            found.append(with_facts(kept, numbers))
    return found


def with_bits(rows: Sequence[Row]) -> list[Row]:
    """The rows that have bits per byte: older ones have none."""
    return [row for row in rows if row.get("bits_per_byte") is not None]


# --- Notes ---


def _notes(
    rows: Sequence[Row], lines_of: Mapping[str, Sequence[Row]], quantity: Quantity, *, each: bool
) -> list[str]:
    """Notes: each run, why cells are empty, and what cannot be compared.

    lines_of: the rows of each line of the table; each: a line for the facts of each run
    """
    lengths = {row["length"] for row in rows}
    groups = runs(rows)
    shared = []
    if len(groups) > 1:
        shared = [key for key in NOTES if len({row.get(key) for row in rows}) == 1]
    own = [key for key in NOTES if key not in shared]

    lines = []
    if facts := _facts(rows[0], shared):
        lines.append(f"each: {facts}")
    if rows[0].get("protocol") in OTHER_TEXT and len(lengths) > 1:
        lines.append(OTHER_TEXT_NOTE)
    if guess := GUESSES.get(rows[0].get("corpus") or ""):
        lines.append(f"guessing has {guess} % right")
    epochs_of = {row["length"]: row.get("epochs") for row in rows if row.get("epochs")}
    for length, epochs in sorted(epochs_of.items()):
        lines.append(REPEATED_TEXT.format(length=length, epochs=epochs))
    trained: dict[int | None, list[str]] = {}
    for label, group in lines_of.items():
        trained.setdefault(trained_length(group[0]), []).append(label)
    for length in sorted(lengths & trained.keys()):
        of_some = f" {length} of {'; '.join(trained[length])}" if len(trained) > 1 else ""
        lines.append(f"* training length{of_some}")
    for label, group in lines_of.items():
        numbers = []
        for length in sorted(lengths):
            of_all = [row.get("all_perplexity") for row in group if row["length"] == length]
            mean, std = mean_and_std(of_all)
            if mean is not None:
                numbers.append(f"{with_spread(cell(mean), std)} at {length}")
        if numbers:
            lines.append(f"{label}: over all targets, key tokens or not: {', '.join(numbers)}")
    for label, group in groups.items():
        facts = _facts(group[0], own)
        if each and facts:
            lines.append(f"{label}: {facts}")
        refused = [row for row in group if quantity.of(row) is None]
        if refused:
            at = ", ".join(str(row["length"]) for row in refused)
            reason = refused[0].get("reason") or "no reason given"
            lines.append(f"{label}: n/a at {at}: {reason}")
    return lines


def _facts(row: Row, keys: Iterable[str]) -> str:
    """Some of the noted keys of a row, such as "float32, step 1000, seed 1234"."""
    facts = [(key, shown_fact(row, key)) for key in keys]
    return ", ".join(NOTES[key].format(value) for key, value in facts if value is not None)


def setting(rows: Sequence[Row]) -> str:
    """Text, tokens, windows and protocol of rows of one text, and how they were evaluated.

    A window of a task is a problem, and its tokens are those of the answer.
    """
    first = rows[0]
    facts = []
    if text := text_of(first):
        facts.append(text)

    tokens = [row["tokens"] for row in rows]
    fewest, most = min(tokens), max(tokens)
    counts = from_to(f"{fewest:,}", f"{most:,}")
    by_length = sorted(rows, key=lambda row: row["length"])
    sizes = [f"{row['windows']} x {row['length']}" for row in by_length]
    windows = from_to(sizes[0], sizes[-1])
    protocol = first.get("protocol")
    if protocol == TASK:
        problems = first["windows"]
        facts.append(f"{problems} problems of the largest size that fits, {counts} answer tokens")
    else:
        facts.append(f"{counts} tokens ({windows})")

    if protocol:
        facts.append(f"protocol {protocol}")
    if protocol == LONGPPL and most < FEW_KEYS:
        facts.append(f"few key tokens: {counts} of {first.get('all_tokens', 0):,} targets")
    for key in ("task_args", *PLACE_OPTIONS, *SETTING_OPTIONS):
        values = {identity(row, (key,)) for row in rows}
        value = first.get(key)
        if len(values) == 1 and value is not None and (key, value) != ("start", 0):
            facts.append(f"{key} {plain(value)}")
    facts += variant_of(rows)
    return ", ".join(facts)


def from_to(first: object, last: object) -> str:
    """Two ends, such as "2 to 13", or one if they are the same."""
    return str(first) if first == last else f"{first} to {last}"


def variant_of(rows: Sequence[Row], keys: Iterable[str] = VARIANT) -> list[str]:
    """How all rows were evaluated, where that is unusual, such as "window 512".

    Labels contain only what differs between rows.
    """
    changes = []
    for key in keys:
        values = {value_of(row, key) for row in rows}
        value = values.pop()
        if not values and value not in (None, USUAL[key]):
            changes.append(f"{key} {plain(value)}")
    return changes
