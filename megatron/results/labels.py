"""Labels: rows by what they measured, and the labels that options of commands mean.

names.yml is the table of display names of all plots, tables and pages.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.errors import UserError
from megatron.results.row import (
    BOOKKEEPING,
    CORPUS_AXIS,
    ENCODING_AXIS,
    FROM_SCRATCH,
    KIND,
    OF_TRAINING,
    PLACE,
    RUN,
    SETTING,
    SHOWN_IF_SET,
    TASK,
    TRAINED,
    USUAL,
    VARIANT,
    AnyQuestion,
    Question,
    Row,
    by_text,
    cell_of,
    encoding_of,
    grouped,
    identity,
    plain,
    text_of,
    value_of,
    with_facts,
)

NAMES: dict[str, dict[str, str]] = yaml.safe_load(
    Path(__file__).with_name("names.yml").read_text(encoding="utf-8")
)


# --- Display names ---


def word_of(key: str, value: Any, *, whole: bool = False) -> str:
    """How labels, titles and notes write a value: "window 512", "YaRN ×2".

    whole: a method with all of its options
    """
    text = plain(value)
    if key == "method":
        name, _, options = text.partition(",")
        factor = re.match(r"factor=(?!1,|1$)([\d.]+)", options)
        more = f" ({options})" if whole else f" ×{factor[1]}" if factor else ""
        text = NAMES["methods"].get(name, name) + more
    return NAMES["keys"].get(key, f"{key} {{}}").replace("{}", text)


def in_words(heading: str) -> str:
    """A heading of `sections` with what the protocol scores in place of its key."""
    words = NAMES["protocols"]
    return re.sub(r"(?<=: )\w+", lambda key: words.get(key[0], key[0]), heading, count=1)


# --- Rows by label ---


def axes_of(rows: Sequence[Question]) -> tuple[str, ...]:
    """The axes of the rows' sweeps that are no keys of a row.

    An axis such as window is called `trained window`: a model may be evaluated with another one.
    The corpus to train on counts if models were evaluated on others, too.
    """
    names = []
    for axis in dict.fromkeys(axis for row in rows for axis in cell_of(row)):
        if axis in VARIANT:
            names.append(f"{TRAINED}{axis}")
        elif axis == CORPUS_AXIS:
            pairs = {(str(cell_of(row).get(axis)), row.get("corpus")) for row in rows}
            trained, texts = (len(set(values)) for values in zip(*pairs, strict=True))
            if not trained == texts == len(pairs):
                names.append(axis)
        elif axis not in Row.__annotations__:
            names.append(axis)
    return tuple(names)


def runs(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by a label for each run and step on each text, shortest length first."""
    groups = [
        sorted(group, key=lambda row: row["length"])
        for text in by_text(rows)
        for group in grouped(text, RUN)
    ]
    keys = (*KIND, "seed", *SETTING, *axes_of(rows), *BOOKKEEPING, *PLACE)
    # What labels tell apart does not change with the length.
    return dict(zip(labels_of([group[0] for group in groups], keys), groups, strict=True))


def sections(rows: Sequence[Row], keys: Sequence[str] = SETTING) -> dict[str, list[Row]]:
    """Rows by a heading for each text and protocol, such as "github valid: tail, tail 128".

    A task has the heading "task:copy".

    keys: as `by_text` has them
    """
    texts = by_text(rows, keys)
    examples = [min(text, key=lambda row: row["length"]) for text in texts]
    names = []
    for row in examples:
        name = f"{text_of(row) or 'a text'}: {row.get('protocol') or 'unknown protocol'}"
        names.append(row.get("corpus", "") if row.get("protocol") == TASK else name)
    return dict(zip(labels_of(examples, (*SETTING, *PLACE), names), texts, strict=True))


def kinds(rows: Sequence[AnyQuestion]) -> dict[str, list[AnyQuestion]]:
    """Rows by a label for each kind: runs that differ in their seed and text alone are one.

    If one seed was measured with several configurations in a setting, or in several checkpoints,
    each of them is a kind of its own.
    """
    axes = axes_of(rows)
    groups = grouped(rows, ("pos_emb", *KIND, *axes, "sweep"))
    for key in ("config_hash", "checkpoint"):
        split = []
        for group in groups:
            measured = {identity(row, (*SETTING, "seed", key)) for row in group}
            several = len(measured) > len({values[:-1] for values in measured})
            split += grouped(group, [key]) if several else [group]
        groups = split
    labels = labels_of([group[0] for group in groups], (*KIND, *axes, *BOOKKEEPING))
    return dict(zip(labels, groups, strict=True))


def labels_of(
    rows: Sequence[Question], keys: Sequence[str], names: Sequence[str] | None = None
) -> list[str]:
    """A label for each row: the encoding, then what distinguishes it from others of that name.

    keys: those that may stand in a label, in its order
    names: what labels begin with, by default the encoding

    What all rows share is named by `table.setting`. Where rows differ in how they were evaluated,
    or in the kind of layers, gate, softmax or optimizer, an unusual value is named whatever the
    encoding. A usual or an unknown value adds no word.
    """
    labels = list(names or (row.get("label") or encoding_of(row) for row in rows))
    for key in keys:
        values = [value_of(row, key) for row in rows]
        named = {plain(value): word_of(key, value) for value in values}
        times = Counter(named.values())
        labelled = {*zip(labels, map(plain, values), strict=True)}
        values_of = Counter(label for label, _ in labelled)
        for number, (label, value) in enumerate(zip(labels, values, strict=True)):
            # An encoding's defaults need no word, if no row lacks its options.
            if value in (None, USUAL.get(key)) or (value == {} and (label, "None") not in labelled):
                continue
            is_named = len(named) > 1 and key in (*VARIANT, *SHOWN_IF_SET)
            if (is_named and not rows[number].get("label")) or values_of[label] > 1:
                several = times[named[plain(value)]] > 1
                labels[number] += f", {word_of(key, value, whole=several)}"
    return labels


# --- Comparisons of two kinds ---


def other_differences(ours: Question, theirs: Question) -> dict[str, str]:
    """What a fair comparison of two encodings has in common and these have not, in words by key.

    Such as "step 7, not 9". A value that a row does not know is no difference.
    """
    differences = {}
    for key in ("dtype", *OF_TRAINING, *axes_of([ours, theirs])):
        first, second = (
            value_of(row, key) or FROM_SCRATCH.get(key) or cell_of(row).get(key)
            for row in (ours, theirs)
        )
        if None not in (first, second) and first != second and key != ENCODING_AXIS:
            differences[key] = f"{key} {first}, not {second}"
    return differences


# --- What a user calls rows ---


def arranged(rows: Sequence[Row], only: Sequence[str], names: Sequence[str]) -> list[Row]:
    """The rows of some labels in their order, by default of all; names: texts old=new.

    Raises UserError for what is no label here.
    """
    groups = kinds(rows)

    def meant(text: str, option: str) -> list[str]:
        return matching(text, groups) or [select(text, groups, option)]

    new_names = {}
    for text in names:
        old, _, new = text.rpartition("=")
        new_names |= dict.fromkeys(meant(old, "--names"), new)
    labels = [label for text in only for label in meant(text, "--only")]
    shown = []
    for label in dict.fromkeys(labels or groups):
        name = {"label": new_names.get(label, "")}
        shown += [with_facts(row, name) for row in groups[label]]
    return shown


def select(against: str, kinds: Mapping[str, Sequence[Question]], option: str = "--against") -> str:
    """The label that an option means among rows by label; UserError for none and for several."""
    labels = matching(against, kinds)
    if len(labels) == 1:
        return labels[0]
    choices = ", ".join(repr(label) for label in labels or kinds)
    problem = "means several encodings" if labels else "is no encoding of these results"
    raise UserError(f"{option}: {against!r} {problem} - choose one of {choices}")


def matching(against: str, kinds: Mapping[str, Sequence[Question]]) -> list[str]:
    """The labels that a text may mean: that label itself, or all with a row that it describes.

    A text describes a row by the encoding and any of its facts, such as `mep_free, window none`.
    The label need not mention them.
    """
    if against in kinds:
        return [against]
    facts = against.split(", ")
    return [
        label
        for label, rows in kinds.items()
        if any(facts_of(row).issuperset(facts) for row in rows)
    ]


def facts_of(row: Question) -> set[str]:
    """Texts that describe a row: "rotary", "github", "tail", "window 512", axes, single options.

    Encodings of layers that differ are joined by a stroke.
    """
    corpus = row.get("corpus") or ""
    facts = {corpus, corpus.removeprefix("task:"), row.get("part", ""), row.get("protocol", "")}
    facts |= {name.replace(", ", "/") for name in (row["pos_emb"], encoding_of(row))}
    options = [*cell_of(row).items()]
    for key in (*KIND, "seed", *SETTING, *BOOKKEEPING, *PLACE):
        value = row.get(key)
        options += [(key, value), (key, value_of(row, key))]
        if isinstance(value, dict):
            options += value.items()
    return facts | {f"{key} {plain(value)}" for key, value in options}
