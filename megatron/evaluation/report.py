"""What the measurements of one or several checkpoints look like: JSON lines, a table."""

import json
import os
from collections.abc import Collection, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from megatron.errors import UserError
from megatron.evaluation.statistics import perplexity_of, prefix_curve

Row = dict[str, Any]  # one length of one checkpoint: a line of the results file
PICTURES = (".png", ".svg", ".pdf")
NEEDED = ("pos_emb", "length", "windows", "tokens", "loss", "perplexity", "step", "config_hash")
# What must be equal for perplexities to be comparable, and how the note beneath a table calls it.
SETTING = {"corpus": "corpus", "part": "part", "split": "split", "protocol": "protocol", "tokenizer": "tokenizer"}
# What a token sees, where that was changed, and how it is computed: a run of its own in every table.
SEEN = ("window", "blockwise", "logn_scale", "dtype")
# Numbers of a protocol: with another one the same length is another measurement.
NUMBERS = ("tokens", "tail", "stride", "start")
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


def check_output(path: Path) -> None:
    """UserError, before anything is measured, where results could not be written or would replace something else."""
    if path.suffix.lower() in PICTURES:
        raise UserError(f"--output: {path} is the name of a picture - name the lines {path.with_suffix('.jsonl')}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as fault:
        raise UserError(f"--output: {path.parent} cannot be made ({fault.strerror}) - choose another place") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"--output: {path} cannot be written - choose another place")
    _check_replaceable(path)


def write_results(path: Path, rows: Sequence[Row]) -> None:
    """One JSON object per line, the whole file at once. Results that are there stay, but for the same measurement done
    again; UserError where another kind of file is in the way."""
    _check_replaceable(path)
    there = read_results([path]) if path.exists() and path.stat().st_size else []
    merged = {measurement_of(row): row for row in [*there, *rows]}
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in merged.values())
    with Beside(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _check_replaceable(path: Path) -> None:
    if path.exists() and path.stat().st_size:
        try:
            read_results([path])
        except UserError as fault:
            raise UserError(
                f"--output: {path} is there and holds something else - choose another name ({fault})"
            ) from None


class Beside:
    """A temporary file in the same folder that takes `path`'s place when the `with` block ends well."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return self.temporary

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            os.replace(self.temporary, self.path)
        self.temporary.unlink(missing_ok=True)


def read_results(paths: Iterable[str | Path]) -> list[Row]:
    """The lines of several results files, in order; of two lines for the same measurement the later counts."""
    rows: dict[tuple, Row] = {}
    for path in map(Path, paths):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            raise UserError(f"{path}: there is no such results file - evaluate.py writes one") from None
        except (OSError, UnicodeDecodeError) as fault:
            raise UserError(f"{path}: cannot be read as text ({fault})") from None
        if not lines:
            raise UserError(f"{path}: is empty - leave it out, or write results with evaluate.py")
        for number, line in enumerate(lines, 1):
            row = _row(line, f"{path}, line {number}")
            rows[measurement_of(row)] = row
    return list(rows.values())


def _row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = None
    missing = [key for key in NEEDED if key not in row] if isinstance(row, dict) else list(NEEDED)
    if not isinstance(row, dict) or missing:
        raise UserError(f"{where}: is no result of evaluate.py, it lacks {', '.join(missing)}")
    return row


def last_of_each(rows: Iterable[Row]) -> list[Row]:
    """Of a run that scored several texts of one length the last, so that a mean is over seeds alone."""
    return [*{(run_of(row), row["length"]): row for row in rows}.values()]


def run_of(row: Row) -> tuple:
    """What makes two lines belong to the same row of a table."""
    keys = ("pos_emb", "config_hash", "step", "seed", "checkpoint", *SEEN, *SETTING)
    return tuple(row.get(key) for key in keys)


def measurement_of(row: Row) -> tuple:
    """What makes one line the repetition of another: the same run and length, on the same scored targets."""
    return (*run_of(row), row["length"], row.get("text"), *(row.get(key) for key in NUMBERS))


def runs(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by a short label for each run: the encoding, and what else is needed to tell the runs apart."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(run_of(row), []).append(row)
    keys = ("pos_emb_args", "train_length", *SEEN, "seed", "step", *SETTING, "config_hash", "checkpoint")
    labels = labels_of([group[0] for group in groups.values()], keys)
    return {
        label: sorted(group, key=lambda row: row["length"])
        for label, group in zip(labels, groups.values(), strict=True)
    }


def labels_of(rows: Sequence[Row], keys: Iterable[str]) -> list[str]:
    """A label for each of some rows: the encoding, and those of the keys that tell it from others of that name."""
    labels = [row["pos_emb"] for row in rows]
    for key in keys:
        said = [row.get(key) for row in rows]
        switch = any(isinstance(value, bool) for value in said)  # a row without it has it off
        values = [plain(bool(value) if switch else value) for value in said]
        twins = {
            label for label in labels if len({v for v, other in zip(values, labels, strict=True) if other == label}) > 1
        }
        labels = [f"{label}, {key} {v}" if label in twins else label for label, v in zip(labels, values, strict=True)]
    return labels


def with_axes(rows: Sequence[Row], without: Collection[str] = ()) -> tuple[list[Row], list[str]]:
    """Rows of a sweep with what their cells say beside them, such as size: wide, and the names of that."""
    told = [{axis: str(value) for axis, value in (row.get("cell") or {}).items() if axis not in row} for row in rows]
    axes = [axis for axis in dict.fromkeys(axis for one in told for axis in one) if axis not in without]
    return [row | {axis: one.get(axis) for axis in axes} for row, one in zip(rows, told, strict=True)], axes


def plain(value: Any) -> Any:
    """Options of an encoding as a short text, such as kernels [exp, gaussian]; none, off, on; all else as it is."""
    if value is None or isinstance(value, bool):
        return {None: "none", False: "off", True: "on"}[value]
    if not isinstance(value, dict):
        return value
    return " ".join(f"{key} {json.dumps(option)}" for key, option in value.items()).replace('"', "") or "defaults"


OTHER_TEXT = ("paper", "position")  # protocols whose lengths are not scored on the same targets
OF_WINDOWS = ("window_losses", "window_tokens")  # of windows as long as they were measured


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
            whole = {key: value for key, value in row.items() if length == row["length"] or key not in OF_WINDOWS}
            found.append(whole | {"length": length, "tokens": tokens, "loss": loss, "perplexity": perplexity_of(loss)})
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


def by_setting(rows: Sequence[Row]) -> dict[tuple, list[Row]]:
    """Rows by corpus, part, split, protocol and tokenizer: only within one of these numbers can be compared."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(key) for key in SETTING), []).append(row)
    return found


def cell(perplexity: float | None) -> str:
    """Three digits or more that matter, and no wider than a column."""
    if perplexity is None:
        return "n/a"
    limits = {99.995: ".2f", 999.95: ".1f", 99999.5: ".0f"}
    return format(perplexity, next((form for limit, form in limits.items() if perplexity < limit), ".1e"))


def spread(mean: str, std: float) -> str:
    """± a standard deviation with the decimals of a mean that `cell` wrote."""
    return f"± {std:.2g}" if "e" in mean else f"± {std:.{len(mean.partition('.')[2])}f}"


def aligned(head: list[str], body: list[list[str]]) -> list[str]:
    """Lines of a table for the terminal."""
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    lines = [
        "  ".join(
            [line[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in (head, *body)
    ]
    return [lines[0].rstrip(), "-" * len(lines[0]), *lines[1:]]


def in_markdown(head: list[str], body: list[list[str]]) -> list[str]:
    """The same in Markdown."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(text.replace("*", "\\*") for text in line) + " |" for line in (head, rule, *body)]


def notes(rows: Sequence[Row], *, each_run: bool = True) -> list[str]:
    """The protocol of the measurements, what each run was, why cells are empty, and what makes rows incomparable."""
    groups = runs(rows)
    shared = {key for key in FACTS if len({row.get(key) for row in rows}) == 1}
    lines = [f"perplexity on {setting(rows)}"]
    lines += ["each: " + _facts(rows[0], shared)] if len(groups) > 1 and _facts(rows[0], shared) else []
    if rows[0].get("protocol") in OTHER_TEXT and len({row["length"] for row in rows}) > 1:
        lines.append("every length has other text: compare encodings at a length, not one encoding at two")
    for length, epochs in sorted({(row["length"], row["epochs"]) for row in rows if row.get("epochs")}):
        told = f"the part is short and was read up to {epochs} times: windows repeat text, intervals are too narrow"
        lines.append(f"length {length}: {told}")
    lines += ["* training length"] if any(row["length"] == row.get("train_length") for row in rows) else []
    for label, group in groups.items():
        own = _facts(group[0], FACTS.keys() - shared if len(groups) > 1 else FACTS)
        lines += [f"{label}: {own}"] if own and each_run else []
        lines += _refusals(label, group)
    return lines + _differences(rows)


def _facts(row: Row, keys: Collection[str]) -> str:
    return ", ".join(
        f"{name} {row[key]}".strip() for key, name in FACTS.items() if key in keys and row.get(key) is not None
    )


def _differences(rows: Sequence[Row]) -> list[str]:
    found = []
    for key, name in SETTING.items():
        values = list(dict.fromkeys(str(row.get(key)) for row in rows))
        if len(values) > 1:
            found.append(f"not comparable: {name} is {' for some and '.join(values)} for others")
    for length, key in product(sorted({row["length"] for row in rows}), NUMBERS):
        counts = sorted({row.get(key, 0) for row in rows if row["length"] == length})
        if len(counts) > 1:
            name = "tokens were scored" if key == "tokens" else f"is the {key}"
            found.append(f"not comparable: {counts[0]:,} to {counts[-1]:,} {name} at length {length}")
    for label, group in runs(rows).items():
        measured = [row["length"] for row in group]
        twice = [length for length in dict.fromkeys(measured) if measured.count(length) > 1]
        found += [f"{label}: several texts were scored at length {length}; the last is shown" for length in twice]
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
    windows = [f"{row['windows']} x {row['length']}" for row in (min(rows, key=_length), max(rows, key=_length))]
    counted = " to ".join(f"{count:,}" for count in dict.fromkeys((tokens[0], tokens[-1])))
    facts = [f"{counted} tokens ({' to '.join(dict.fromkeys(windows))})"]
    facts += [f"protocol {first['protocol']}"] if first.get("protocol") else []
    numbers = [
        key for key in NUMBERS if key != "tokens" and first.get(key) and len({row.get(key) for row in rows}) == 1
    ]
    facts += [*(f"{key} {first[key]}" for key in numbers), *sight(rows)]
    source = " ".join(str(first[key]) for key in ("corpus", "part") if first.get(key))
    return ", ".join([source, *facts] if source else facts)


def sight(rows: Sequence[Row]) -> list[str]:
    """What was changed in what a token sees, alike for all rows: labels say only what differs."""
    shared = [key for key in SEEN if key != "dtype" and len({row.get(key) for row in rows}) == 1]
    return [f"{key} {plain(rows[0][key])}" for key in shared if rows[0].get(key)]


def _length(row: Row) -> int:
    return row["length"]
