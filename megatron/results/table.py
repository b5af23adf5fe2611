"""Tables for the terminal, Markdown and LaTeX: perplexity, bits and accuracies by length."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from megatron.errors import UserError, visible
from megatron.results.labels import kinds, runs, sections, word_of
from megatron.results.row import (
    EXACT,
    MEAN,
    NOTES,
    PROTOCOL_OPTIONS,
    SETTING,
    SHOWN_IF_SET,
    TASK,
    USUAL,
    VARIANT,
    Pieces,
    Row,
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
COUNTED = {
    EXACT: "counted by the tokenizer",
    MEAN: "estimated: tokens times the mean of the whole corpus",
}
OTHER_TOKENIZERS = (
    "tokenizers differ: the same number of tokens is not the same text, so compare runs"
    " that scored about the same bytes of the same part"
)
IN_LATEX = str.maketrans({"±": r"$\pm$", "†": r"\textdagger{}", "‡": r"\textdaggerdbl{}"})
# Token accuracy of guessing, in percent, where answers have few values.
GUESSES = {"task:parity": 50, "task:flip_flop": 50}


# --- One table in each form; the page's template writes it as HTML ---


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
        name_width, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = []
        for name, *words in lines:
            numbers = [word.rjust(width) for word, width in zip(words, widths, strict=True)]
            texts.append("  ".join([name.ljust(name_width), *numbers]).rstrip())
        head, *body = texts
        title = [self.title] if self.title else []
        rule = "-" * max(map(len, [head, *body]))
        return visible("\n".join([*title, head, rule, *body, *self.notes]))

    def markdown(self) -> str:
        """The same table in Markdown."""
        rule = ["---"] + ["---:"] * (len(self.head) - 1)
        lines = [self.title, ""] if self.title else []
        for words in (self.head, rule, *self.body):
            cells = [word.replace("|", "\\|").replace("*", "\\*") for word in words]
            lines.append(f"| {' | '.join(cells)} |")
        notes = "  \n".join(self.notes).replace("*", "\\*")
        return "\n".join([*lines, "", notes] if notes else lines)

    def latex(self) -> str:
        """The same table for LaTeX with the package booktabs; title and notes are comments."""
        lines = [f"% {self.title}", rf"\begin{{tabular}}{{l{'r' * (len(self.head) - 1)}}}"]
        lines.append(r"\toprule")
        for number, words in enumerate((self.head, *self.body)):
            cells = [re.sub(r"([&%$#_{}])", r"\\\1", word) for word in words]
            lines.append(" & ".join(cells).translate(IN_LATEX) + r" \\")
            if number == 0:
                lines.append(r"\midrule")
        lines += [r"\bottomrule", r"\end{tabular}"]
        return "\n".join([*lines, *(f"% {note}" for note in self.notes)])

    def written(self, form: str) -> str:
        """The table as "text", "markdown" or "latex"."""
        return {"text": self.text, "markdown": self.markdown, "latex": self.latex}[form]()


def cell(perplexity: float) -> str:
    """A perplexity with three significant digits or more, no wider than a column."""
    if perplexity < 99.995:
        return f"{perplexity:.2f}"
    if perplexity < 999.95:
        return f"{perplexity:.1f}"
    return f"{perplexity:.0f}" if perplexity < 99999.5 else f"{perplexity:.1e}"


def mean_and_std(values: Sequence[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation over seeds; (None, None) if a seed has no number.

    The standard deviation of one seed is None.
    """
    if not values or None in values:
        return None, None
    numbers = np.array(values, dtype=np.float64)
    return float(numbers.mean()), float(numbers.std(ddof=1)) if len(numbers) > 1 else None


def with_spread(form: Callable[[float], str], mean: float | None, std: float | None) -> str:
    """A mean as a cell shows it, ± a standard deviation with as many decimals."""
    if mean is None:
        return "n/a"
    text = form(mean)
    decimals = len(text.partition("e")[0].partition(".")[2])
    return text if std is None else f"{text} ± {std:.{decimals}f}"


# --- Perplexity, bits per byte and accuracy by length ---


class Quantity(NamedTuple):
    """A number of rows: its key, its name above and below a table, and how a cell shows it."""

    key: str
    name: str
    form: Callable[[float], str]
    scale: int = 1

    def of(self, row: Row) -> float | None:
        """The number of a row; None if it has none."""
        value = cast("Mapping[str, float | None]", row).get(self.key)
        return None if value is None else self.scale * value

    def cell(self, rows: Sequence[Row]) -> str:
        """The mean over rows, ± their standard deviation."""
        return with_spread(self.form, *mean_and_std([self.of(row) for row in rows]))


PERPLEXITY = Quantity("perplexity", "perplexity", cell)
BITS = Quantity("bits_per_byte", "bits per byte", "{:.4f}".format)
TOKENS_RIGHT = Quantity(
    "token_accuracy", "token accuracy: % of answer tokens right", "{:.1f}".format, 100
)
ANSWERS_RIGHT = Quantity(
    "accuracy", "accuracy: % of answers right in every token", "{:.1f}".format, 100
)


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
    form: str = "text",
) -> str:
    """Tables for each text and protocol: one line per run, one column per length, notes beneath.

    Several have headings: numbers are comparable within one table only.
    over_seeds: one line per encoding, mean ± standard deviation
    bits_per_byte: in place of others, whatever the tokenizers; UserError if no row has any
    form: text, markdown or latex
    """
    texts = sections(rows)
    if bits_per_byte:
        rows = with_bits(rows)
        if not rows:
            raise UserError(
                "--bits-per-byte: none of these rows has them - measure again with evaluate.py"
                " where the tokenizer's files or a new card exist"
            )
        texts = sections(rows, [key for key in SETTING if key != "tokenizer"])
    tables = []
    for heading, group in texts.items():
        if len(texts) > 1:
            tables.append(heading)
        for quantity in [BITS] if bits_per_byte else quantities_of(group):
            tables.append(table_of_text(group, quantity, over_seeds=over_seeds).written(form))
    return "\n\n".join(tables)


def table_of_text(rows: Sequence[Row], quantity: Quantity, *, over_seeds: bool) -> Table:
    """The table of rows of one text, as `by_text` groups them."""
    groups = kinds(rows) if over_seeds else runs(rows)
    lengths = sorted({row["length"] for row in rows})
    head = ["pos_emb", *starred(rows, lengths)]
    body = []
    for label, group in groups.items():
        line = [label]
        for length in lengths:
            measured = [row for row in group if row["length"] == length]
            line.append(quantity.cell(measured) if measured else "")
        body.append(line)
    notes = []
    if quantity in (PERPLEXITY, TOKENS_RIGHT):
        notes = _notes(rows, groups, quantity, each=not over_seeds)
    elif quantity is BITS:
        sizes = sorted(row.get("bytes", 0) for row in rows)
        ways = sorted({COUNTED[row.get("bytes_from", MEAN)] for row in rows})
        size = from_to(f"{sizes[0]:,.0f}", f"{sizes[-1]:,.0f}")
        notes = [f"{size} bytes scored, {'; '.join(ways)}"]
        if len({row.get("tokenizer") for row in rows}) > 1:
            notes.append(OTHER_TOKENIZERS)
    if over_seeds:
        head.insert(1, "seeds")
        for line, group in zip(body, groups.values(), strict=True):
            line.insert(1, str(len({row.get("seed") for row in group})))
        if len({row.get("seed") for row in rows}) > 1:
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
        of_whole = dict.fromkeys((*Pieces.__annotations__, "bytes", "bits_per_byte"))
        for length in lengths:
            loss = curve[length]
            numbers: dict[str, Any] = {"length": length, "tokens": row["windows"] * length}
            numbers |= {"loss": loss, "perplexity": perplexity_of(loss)}
            cut.append(with_facts(row, of_whole | numbers if length < row["length"] else numbers))
    return cut


def with_bits(rows: Sequence[Row]) -> list[Row]:
    """The rows that have bits per byte."""
    return [row for row in rows if row.get("bits_per_byte") is not None]


# --- Notes ---


def _notes(
    rows: Sequence[Row], lines: Mapping[str, Sequence[Row]], quantity: Quantity, *, each: bool
) -> list[str]:
    """Notes: each run, why cells are empty, and what cannot be compared.

    lines: the rows of each line of the table; each: a line for the facts of each run
    """
    shared = [key for key in NOTES if len({row.get(key) for row in rows}) == 1]
    words = _facts(rows[0], shared)
    notes = [f"each: {', '.join(words)}"] if words else []
    lengths = {row["length"] for row in rows}
    if rows[0].get("protocol") in OTHER_TEXT and len(lengths) > 1:
        notes.append(OTHER_TEXT_NOTE)
    if guess := GUESSES.get(rows[0].get("corpus") or ""):
        notes.append(f"guessing has {guess} % right")
    for length, epochs in sorted({(row["length"], row.get("epochs", 1)) for row in rows}):
        if epochs > 1:
            notes.append(
                f"length {length}: the part is short and was read up to {epochs} times:"
                " windows repeat text, intervals are too narrow"
            )
    if lengths & {trained_length(row) for row in rows}:
        notes.append("* training length")
    for label, group in lines.items():
        words = _facts(group[0], [key for key in NOTES if key not in shared])
        words = [word for word in words if word not in label]
        if each and words:
            notes.append(f"{label}: {', '.join(words)}")
        refused = [row for row in group if quantity.of(row) is None]
        if refused:
            at = ", ".join(str(row["length"]) for row in refused)
            notes.append(f"{label}: n/a at {at}: {refused[0].get('reason')}")
    return notes


def _facts(row: Row, keys: Iterable[str]) -> list[str]:
    """Facts of a row in words, such as "step 2000" and "seed 1234"."""
    values = {key: shown_fact(row, key) for key in keys}
    return [word_of(key, value) for key, value in values.items() if value is not None]


def setting(rows: Sequence[Row]) -> str:
    """Text, tokens, windows and protocol of rows of one text, and how they were evaluated.

    A window of a task is a problem, and its tokens are those of the answer.
    """
    first, *_, last = sorted([rows[0], *rows], key=lambda row: row["length"])
    counts = sorted(row["tokens"] for row in rows)
    tokens = from_to(f"{counts[0]:,}", f"{counts[-1]:,}")
    sizes = from_to(*(f"{row['windows']} x {row['length']}" for row in (first, last)))
    size = f"{tokens} tokens ({sizes})"
    if first.get("protocol") == TASK:
        size = f"{first['windows']} problems of the largest size that fits, {tokens} answer tokens"
    protocol = shared_values(rows, ["protocol"])
    options = shared_values(rows, ("task_args", *PROTOCOL_OPTIONS))
    variant = shared_values(rows, (*VARIANT, *SHOWN_IF_SET))
    facts = [text_of(first), size, *protocol, *options, *variant]
    return ", ".join(fact for fact in facts if fact not in ("", "start 0"))


def from_to(first: object, last: object) -> str:
    """Two ends, such as "2 to 13", or one if they are the same."""
    return str(first) if first == last else f"{first} to {last}"


def shared_values(rows: Sequence[Row], keys: Iterable[str]) -> list[str]:
    """The keys of which all rows have the same value, with it: "tail 128"; not the usual ones."""
    words = []
    for key in keys:
        values = [value_of(row, key) for row in rows]
        if values.count(values[0]) == len(rows) and values[0] not in (None, USUAL.get(key)):
            words.append(word_of(key, values[0]))
    return words
