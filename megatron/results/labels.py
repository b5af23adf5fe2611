"""Labels: rows by what they measured, and the label that `--against` means."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from megatron.errors import UserError
from megatron.results.row import (
    BOOKKEEPING,
    CORPUS_AXIS,
    KEYS,
    KIND,
    KIND_LABELS,
    LABELS,
    TRAINED,
    VARIANT,
    AnyQuestion,
    Facts,
    Question,
    Row,
    kind_of,
    model_of,
    plain,
    run_of,
    value_of,
    with_facts,
)


def with_sweeps(rows: Sequence[AnyQuestion]) -> list[AnyQuestion]:
    """The rows, with `sweep` and `cell` also where a user measured a model of a sweep.

    Such a row names the same weights as a row of the sweep or, in old files, the same checkpoint.
    """
    origins: dict[Hashable, Facts] = {}
    for row in rows:
        if not row.get("cell"):
            continue
        origin: Facts = {"sweep": row.get("sweep"), "cell": row.get("cell")}
        for model in (row.get("weights"), row.get("checkpoint")):
            if model is not None:
                origins.setdefault(model, origin)
    found: list[AnyQuestion] = []
    for row in rows:
        known = row.get("cell") or model_of(row) not in origins
        found.append(row if known else with_facts(row, origins[model_of(row)]))
    return found


def axes_of(rows: Sequence[Question]) -> tuple[str, ...]:
    """The axes of the rows' sweeps that say more than the keys of the rows do.

    An axis such as window is called `trained window` if a model was evaluated with another one.
    """
    names: list[str] = []
    for axis in dict.fromkeys(axis for row in rows for axis in row.get("cell") or {}):
        if axis in VARIANT and any(_was_changed(axis, row) for row in rows):
            names.append(f"{TRAINED}{axis}")
        elif axis not in KEYS and not _repeats_a_key(axis, rows):
            names.append(axis)
    return tuple(names)


def _was_changed(axis: str, row: Question) -> bool:
    """Whether a row was evaluated with another value than that of its cell."""
    cell = row.get("cell") or {}
    if axis not in cell:
        return False
    as_trained = with_facts(row, {axis: cell[axis]})
    return value_of(row, axis) != value_of(as_trained, axis)


def _repeats_a_key(axis: str, rows: Sequence[Question]) -> bool:
    """Whether an axis is a key of the rows under another name, such as seq_length: train_length."""
    with_axis: list[Question] = []
    points: list[str] = []
    for row in rows:
        cell = row.get("cell") or {}
        if axis in cell:
            with_axis.append(row)
            points.append(str(cell[axis]))
    if axis == CORPUS_AXIS:
        corpora = [row.get("corpus") for row in with_axis]
        return _one_to_one(points, corpora)
    for key in KIND:
        values = [plain(value_of(row, key)) for row in with_axis]
        if values == points:
            return True
    return False


def _one_to_one(first: Sequence[Hashable], second: Sequence[Hashable]) -> bool:
    pairs = set(zip(first, second, strict=True))
    return len(pairs) == len(set(first)) == len(set(second))


def runs(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by a label for each run, shortest length first."""
    groups: dict[tuple[Hashable, ...], list[Row]] = {}
    for row in with_sweeps(rows):
        groups.setdefault(run_of(row), []).append(row)
    labels = labels_of([group[0] for group in groups.values()], LABELS)
    ordered = [sorted(group, key=lambda row: row["length"]) for group in groups.values()]
    return dict(zip(labels, ordered, strict=True))


def kinds(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by a label for each kind: runs of several seeds, and texts, are one."""
    rows = with_sweeps(rows)
    axes = axes_of(rows)
    groups: dict[tuple[Hashable, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(kind_of(row, axes), []).append(row)
    labels = labels_of([group[0] for group in groups.values()], KIND_LABELS, axes)
    return dict(zip(labels, groups.values(), strict=True))


def labels_of(
    rows: Sequence[Question],
    keys: Sequence[str] = KIND_LABELS,
    axes: Sequence[str] | None = None,
) -> list[str]:
    """A label for each row: the encoding, then what distinguishes it from others of that name.

    keys: those that may stand in a label: `LABELS` for runs, `KIND_LABELS` where seeds are one.
    axes: of sweeps, by default `axes_of` these rows. They follow the measured keys.
    An unknown value adds no word.
    """
    if axes is None:
        axes = axes_of(rows)
    measured = [key for key in keys if key not in BOOKKEEPING]
    bookkeeping = [key for key in keys if key in BOOKKEEPING]
    labels = [row["pos_emb"] for row in rows]
    for key in (*measured, *axes, *bookkeeping):
        labels = _with_words(labels, key, [value_of(row, key) for row in rows])
    return labels


def _with_words(labels: Sequence[str], key: str, values: Sequence[Any]) -> list[str]:
    """The labels, with `key value` added to those that rows with several values share."""
    values_of: dict[str, set[str]] = {}
    for label, value in zip(labels, values, strict=True):
        values_of.setdefault(label, set()).add(plain(value))
    longer = []
    for label, value in zip(labels, values, strict=True):
        words = f", {key} {plain(value)}"
        is_shared = len(values_of[label]) > 1
        longer.append(label + words if is_shared and value is not None else label)
    return longer


def select(against: str, kinds: Mapping[str, Sequence[Question]]) -> str:
    """The label that `--against` means among rows by label; UserError for none and for several."""
    found = matching(against, kinds)
    if len(found) == 1:
        return found[0]
    choices = ", ".join(repr(label) for label in found or kinds)
    problem = "means several encodings" if found else "is no encoding of these results"
    raise UserError(f"--against: {against!r} {problem} - choose one of {choices}")


def matching(against: str, kinds: Mapping[str, Sequence[Question]]) -> list[str]:
    """The labels that a text may mean: that label itself, or all with a row that it describes.

    A text describes a row by the encoding and any of its facts, such as `mep_free, window none`.
    The label need not mention them.
    """
    if against in kinds:
        return [against]
    return [label for label, rows in kinds.items() if any(_describes(against, r) for r in rows)]


def _describes(text: str, row: Question) -> bool:
    name = row["pos_emb"]
    return text.startswith(name) and _are_facts(text.removeprefix(name), _facts(row))


def _are_facts(text: str, facts: Sequence[str]) -> bool:
    """Whether a text such as ", window 512, seed 1" consists of nothing but these facts."""
    if not text:
        return True
    starts = [f", {fact}" for fact in facts if text.startswith(f", {fact}")]
    return any(_are_facts(text.removeprefix(start), facts) for start in starts)


def _facts(row: Question) -> list[str]:
    """Everything that a label could mention of a row, as it would."""
    facts = [f"{axis} {value}" for axis, value in (row.get("cell") or {}).items()]
    for key in LABELS:
        for value in (value_of(row, key), row.get(key)):
            if value is not None:
                facts.append(f"{key} {plain(value)}")
    return facts
