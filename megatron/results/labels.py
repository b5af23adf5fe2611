"""Labels: rows by what they measured, and the label that `--against` means."""

from collections.abc import Hashable, Iterable, Mapping, Sequence

from megatron.errors import UserError
from megatron.results.row import (
    BOOKKEEPING,
    CORPUS_AXIS,
    ENCODING_AXIS,
    FROM_SCRATCH,
    KIND,
    KIND_LABELS,
    LABELS,
    OF_TRAINING,
    SETTING,
    SHOWN_IF_SET,
    TASK,
    TEXT_LABELS,
    TRAINED,
    USUAL,
    VARIANT,
    AnyQuestion,
    Question,
    Row,
    by_text,
    encoding_of,
    identity,
    plain,
    run_of,
    text_of,
    value_of,
    with_facts,
)


def axes_of(rows: Sequence[Question]) -> tuple[str, ...]:
    """The axes of the rows' sweeps that are no keys of a row.

    An axis such as window is called `trained window` if a model was evaluated with another one.
    The corpus to train on counts if models were evaluated on others, too.
    """
    rows_of: dict[str, list[Question]] = {}
    for row in rows:
        for axis in row.get("cell") or {}:
            rows_of.setdefault(axis, []).append(row)
    names: list[str] = []
    for axis, found in rows_of.items():
        trained = [(row.get("cell") or {})[axis] for row in found]
        if axis in VARIANT:
            for row, value in zip(found, trained, strict=True):
                as_trained = with_facts(row, {axis: value})
                if value_of(row, axis) != value_of(as_trained, axis):
                    names.append(f"{TRAINED}{axis}")
                    break
        elif axis == CORPUS_AXIS:
            measured = [row.get("corpus") for row in found]
            pairs = {*zip(map(str, trained), measured, strict=True)}
            if not len(pairs) == len({*map(str, trained)}) == len({*measured}):
                names.append(axis)
        elif axis not in Row.__annotations__:
            names.append(axis)
    return tuple(names)


def runs(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by a label for each run on each text, shortest length first."""
    groups: dict[Hashable, list[Row]] = {}
    for number, of_text in enumerate(by_text(rows)):
        for row in of_text:
            group = groups.setdefault((number, run_of(row)), [])
            group.append(row)
    for group in groups.values():
        group.sort(key=lambda row: row["length"])
    # What labels tell apart does not change with the length.
    first_rows = [group[0] for group in groups.values()]
    return dict(zip(labels_of(first_rows, LABELS), groups.values(), strict=True))


def sections(rows: Sequence[Row], keys: Iterable[str] = SETTING) -> dict[str, list[Row]]:
    """Rows by a heading for each text and protocol, such as "github valid: tail, tail 128".

    A task has the heading "task:copy".

    keys: as `by_text` has them
    """
    texts = by_text(rows, keys)
    examples = [min(text, key=lambda row: (row["length"], str(row.get("text")))) for text in texts]
    names = []
    for row in examples:
        name = f"{text_of(row) or 'a text'}: {row.get('protocol') or 'unknown protocol'}"
        names.append(row.get("corpus", "") if row.get("protocol") == TASK else name)
    headings = labels_of(examples, TEXT_LABELS, (), names=names)
    return dict(zip(headings, texts, strict=True))


def kinds(rows: Sequence[AnyQuestion]) -> dict[str, list[AnyQuestion]]:
    """Rows by a label for each kind: runs that differ in their seed and text alone are one.

    If one seed was measured with several configurations in a setting, or in several checkpoints,
    each of them is a kind of its own.
    """
    axes = axes_of(rows)
    groups: dict[Hashable, list[AnyQuestion]] = {}
    for row in rows:
        groups.setdefault(identity(row, (*KIND, *axes)), []).append(row)
    found = list(groups.values())
    for key in ("config_hash", "checkpoint"):
        parts: dict[Hashable, list[AnyQuestion]] = {}
        for number, group in enumerate(found):
            seeds = {identity(row, (*SETTING, "seed")) for row in group}
            measured = {identity(row, (*SETTING, "seed", key)) for row in group}
            for row in group:
                part = row.get(key) if len(measured) > len(seeds) else None
                parts.setdefault((number, part), []).append(row)
        found = list(parts.values())
    labels = labels_of([group[0] for group in found], KIND_LABELS, axes)
    return dict(zip(labels, found, strict=True))


def axes_beside(rows: Sequence[Question]) -> list[str]:
    """The axes of the rows' sweeps of which a value stands beside several encodings.

    The others only name the encoding, such as a recipe with options of its own.
    """
    axes = []
    for axis in axes_of(rows):
        encodings: dict[object, set[str]] = {}
        for row in rows:
            value = (row.get("cell") or {}).get(axis)
            encoding = plain([row["pos_emb"], row.get("pos_emb_args")])
            encodings.setdefault(value, set()).add(encoding)
        if max(map(len, encodings.values())) > 1:
            axes.append(axis)
    return axes


def other_differences(ours: Question, theirs: Question, axes: Sequence[str]) -> dict[str, str]:
    """What a fair comparison of two encodings has in common and these have not, in words by key.

    Such as "step 7, not 9". A value that a row does not know is no difference.
    axes: of sweeps
    """
    differences = {}
    for key in ("dtype", *OF_TRAINING, *axes):
        first, second = (
            value_of(row, key) or FROM_SCRATCH.get(key) or (row.get("cell") or {}).get(key)
            for row in (ours, theirs)
        )
        if None not in (first, second) and first != second and key != ENCODING_AXIS:
            differences[key] = f"{key} {first}, not {second}"
    return differences


def labels_of(
    rows: Sequence[Question],
    keys: Sequence[str] = KIND_LABELS,
    axes: Sequence[str] | None = None,
    *,
    names: Sequence[str] | None = None,
) -> list[str]:
    """A label for each row: the encoding, then what distinguishes it from others of that name.

    keys: those that may stand in a label: of `LABELS`
    axes: of sweeps, by default `axes_of` these rows. They follow the measured keys.
    names: what labels begin with, by default the encoding

    An unusual value of how a row was evaluated is named wherever rows differ in it, whatever the
    encoding; an unusual kind of layers, gate or optimizer always. An unknown value adds no word.
    """
    if axes is None:
        axes = axes_of(rows)
    labels = list(names or map(encoding_of, rows))
    measured = [key for key in keys if key not in BOOKKEEPING]
    bookkeeping = [key for key in keys if key in BOOKKEEPING]
    for key in (*measured, *axes, *bookkeeping):
        values = [value_of(row, key) for row in rows]
        values_of: dict[str, set[str]] = {}
        for label, value in zip(labels, values, strict=True):
            values_of.setdefault(label, set()).add(plain(value))
        rows_differ = len(set(map(plain, values))) > 1
        for number, value in enumerate(values):
            if value is None:
                continue
            named = rows_differ and key in VARIANT and value != USUAL.get(key)
            named = named or key in SHOWN_IF_SET
            if named or len(values_of[labels[number]]) > 1:
                labels[number] += f", {key} {plain(value)}"
    return labels


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
    found = []
    for label, rows in kinds.items():
        for row in rows:
            text = against
            for fact in sorted(facts_of(row), key=len, reverse=True):
                text = text.replace(f", {fact}", "", 1)
            if text in (row["pos_emb"], encoding_of(row)):
                found.append(label)
                break
    return found


def facts_of(row: Question) -> set[str]:
    """Texts that describe a row, such as "window 512": its labels, axes and single options."""
    options = [*(row.get("cell") or {}).items()]
    for key in LABELS:
        value = row.get(key)
        options += [(key, value), (key, value_of(row, key))]
        if isinstance(value, dict):
            options += value.items()
    return {f"{key} {plain(value)}" for key, value in options}
