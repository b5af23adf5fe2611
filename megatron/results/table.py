"""Tables of perplexity with what was measured beneath them."""

from collections.abc import Collection, Iterable, Sequence
from itertools import product

from megatron.results.labels import runs
from megatron.results.row import PIECES, PLACE, SETTING, VARIANT, Row, plain, value_of
from megatron.results.statistics import perplexity_of, prefix_curve

NUMBERS = tuple(key for key in PLACE if key not in ("length", "text"))
# What is said about a run beneath the table, in this order.
FACTS = {
    "step": "step",
    "config_hash": "config",
    "seed": "seed",
    "dtype": "",
    "attention_backend": "attention",
    "device": "on",
    "commit": "commit",
}

OTHER_TEXT = ("paper", "position")  # protocols whose lengths are not scored on the same targets


def by_length(rows: Sequence[Row], lengths: Iterable[int]) -> list[Row]:
    """The rows, and instead of one with losses by position a row for each length that it covers: its prefix curve."""
    found = []
    for row in rows:
        if row["loss"] is None or "position_edges" not in row:
            found.append(row)
            continue
        curve = prefix_curve(row["position_edges"], row["position_losses"])
        for length in lengths:
            loss, tokens = curve[length], row["windows"] * length
            whole = {
                key: value
                for key, value in row.items()
                if length == row["length"] or key not in PIECES
            }
            found.append(
                whole
                | {
                    "length": length,
                    "tokens": tokens,
                    "loss": loss,
                    "perplexity": perplexity_of(loss),
                }
            )
    return found


def table(rows: Sequence[Row], *, markdown: bool = False) -> str:
    """Perplexity: one line per run, one column per length, and beneath it what was measured and why cells are empty."""
    lengths = sorted({row["length"] for row in rows})
    trained = {row.get("train_length") for row in rows}
    head = ["pos_emb", *(f"{length}*" if length in trained else str(length) for length in lengths)]
    body = []
    for label, group in runs(rows).items():
        cells = {row["length"]: cell(row["perplexity"]) for row in group}
        body.append([label, *(cells.get(length, "") for length in lengths)])
    return with_notes(head, body, notes(rows), markdown=markdown)


def with_notes(head: list[str], body: list[list[str]], below: list[str], *, markdown: bool) -> str:
    """A table and what is said beneath it."""
    lines = in_markdown(head, body) if markdown else aligned(head, body)
    told = "  \n".join(below).replace("*", "\\*") if markdown else "\n".join(below)
    return "\n".join([*lines, "", told])


def cell(perplexity: float | None) -> str:
    """Three digits or more that matter, and no wider than a column."""
    if perplexity is None:
        return "n/a"
    limits = {99.995: ".2f", 999.95: ".1f", 99999.5: ".0f"}
    return format(
        perplexity, next((form for limit, form in limits.items() if perplexity < limit), ".1e")
    )


def spread(mean: str, std: float) -> str:
    """± a standard deviation with the decimals of a mean that `cell` wrote."""
    return f"± {std:.2g}" if "e" in mean else f"± {std:.{len(mean.partition('.')[2])}f}"


def aligned(head: list[str], body: list[list[str]]) -> list[str]:
    """Lines of a table for the terminal."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = [
        "  ".join(
            [
                line[0].ljust(widths[0]),
                *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True)),
            ]
        )
        for line in (head, *body)
    ]
    return [lines[0].rstrip(), "-" * len(lines[0]), *lines[1:]]


def in_markdown(head: list[str], body: list[list[str]]) -> list[str]:
    """The same in Markdown."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [
        "| " + " | ".join(text.replace("*", "\\*") for text in line) + " |"
        for line in (head, rule, *body)
    ]


def notes(rows: Sequence[Row], *, each_run: bool = True) -> list[str]:
    """The protocol of the measurements, what each run was, why cells are empty, and what makes rows incomparable."""
    groups = runs(rows)
    shared = {key for key in FACTS if len({row.get(key) for row in rows}) == 1}
    lines = [f"perplexity on {setting(rows)}"]
    lines += (
        ["each: " + _facts(rows[0], shared)] if len(groups) > 1 and _facts(rows[0], shared) else []
    )
    if rows[0].get("protocol") in OTHER_TEXT and len({row["length"] for row in rows}) > 1:
        lines.append(
            "every length has other text: compare encodings at a length, not one encoding at two"
        )
    for length, epochs in sorted(
        {(row["length"], row["epochs"]) for row in rows if row.get("epochs")}
    ):
        told = f"the part is short and was read up to {epochs} times: windows repeat text, intervals are too narrow"
        lines.append(f"length {length}: {told}")
    lines += (
        ["* training length"]
        if any(row["length"] == row.get("train_length") for row in rows)
        else []
    )
    for label, group in groups.items():
        own = _facts(group[0], FACTS.keys() - shared if len(groups) > 1 else FACTS)
        lines += [f"{label}: {own}"] if own and each_run else []
        lines += _refusals(label, group)
    return lines + _differences(rows)


def _facts(row: Row, keys: Collection[str]) -> str:
    return ", ".join(
        f"{name} {row[key]}".strip()
        for key, name in FACTS.items()
        if key in keys and row.get(key) is not None
    )


def _differences(rows: Sequence[Row]) -> list[str]:
    found = []
    for key in SETTING:
        values = list(dict.fromkeys(str(row.get(key)) for row in rows))
        if len(values) > 1:
            found.append(f"not comparable: {key} is {' for some and '.join(values)} for others")
    for length, key in product(sorted({row["length"] for row in rows}), NUMBERS):
        counts = sorted({row.get(key, 0) for row in rows if row["length"] == length})
        if len(counts) > 1:
            name = "tokens were scored" if key == "tokens" else f"is the {key}"
            found.append(
                f"not comparable: {counts[0]:,} to {counts[-1]:,} {name} at length {length}"
            )
    for label, group in runs(rows).items():
        measured = [row["length"] for row in group]
        twice = [length for length in dict.fromkeys(measured) if measured.count(length) > 1]
        found += [
            f"{label}: several texts were scored at length {length}; the last is shown"
            for length in twice
        ]
    return found


def _refusals(label: str, group: Sequence[Row]) -> list[str]:
    missing = [row for row in group if row["perplexity"] is None]
    if not missing:
        return []
    lengths = ", ".join(str(row["length"]) for row in missing)
    return [f"{label}: n/a at {lengths}: {missing[0].get('reason') or 'no reason given'}"]


def setting(rows: Sequence[Row]) -> str:
    """Corpus, part, protocol, tokens and windows in one line, and changes to what a token sees that all rows share."""
    first = rows[0]
    tokens = sorted({row["tokens"] for row in rows})
    windows = [
        f"{row['windows']} x {row['length']}"
        for row in (min(rows, key=_length), max(rows, key=_length))
    ]
    counted = " to ".join(f"{count:,}" for count in dict.fromkeys((tokens[0], tokens[-1])))
    facts = [f"{counted} tokens ({' to '.join(dict.fromkeys(windows))})"]
    facts += [f"protocol {first['protocol']}"] if first.get("protocol") else []
    numbers = [
        key
        for key in NUMBERS
        if key != "tokens" and first.get(key) and len({row.get(key) for row in rows}) == 1
    ]
    facts += [*(f"{key} {first[key]}" for key in numbers), *sight(rows)]
    source = " ".join(str(first[key]) for key in ("corpus", "part") if first.get(key))
    return ", ".join([source, *facts] if source else facts)


def sight(rows: Sequence[Row]) -> list[str]:
    """What was changed in what a token sees, alike for all rows: labels say only what differs."""
    shared = [
        key for key in VARIANT if key != "dtype" and len({value_of(row, key) for row in rows}) == 1
    ]
    return [f"{key} {plain(value_of(rows[0], key))}" for key in shared if rows[0].get(key)]


def _length(row: Row) -> int:
    return row["length"]
