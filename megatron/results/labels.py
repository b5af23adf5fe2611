"""Labels: rows by what they measured, and the label that `--against` means."""

from collections.abc import Iterable, Mapping, Sequence

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
    RUN,
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
    cell_of,
    encoding_of,
    grouped,
    identity,
    plain,
    text_of,
    value_of,
    with_facts,
)


def axes_of(rows: Sequence[Question]) -> tuple[str, ...]:
    """The axes of the rows' sweeps that are no keys of a row.

    An axis such as window is called `trained window` if a model was evaluated with another one.
    The corpus to train on counts if models were evaluated on others, too.
    """
    names: list[str] = []
    for axis in dict.fromkeys(axis for row in rows for axis in cell_of(row)):
        members = [row for row in rows if axis in cell_of(row)]
        pairs = {(plain(cell_of(row)[axis]), row.get("corpus")) for row in members}
        if axis in VARIANT:
            as_trained = [with_facts(row, {axis: cell_of(row)[axis]}) for row in members]
            if [value_of(row, axis) for row in members] != [
                value_of(row, axis) for row in as_trained
            ]:
                names.append(f"{TRAINED}{axis}")
        elif axis == CORPUS_AXIS:
            if {len({trained for trained, _ in pairs}), len({text for _, text in pairs})} != {
                len(pairs)
            }:
                names.append(axis)
        elif axis not in Row.__annotations__:
            names.append(axis)
    return tuple(names)


def runs(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by a label for each run on each text, shortest length first."""
    groups = [group for text in by_text(rows) for group in grouped(text, RUN)]
    groups = [sorted(group, key=lambda row: row["length"]) for group in groups]
    # What labels tell apart does not change with the length.
    return dict(zip(labels_of([group[0] for group in groups], LABELS), groups, strict=True))


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
    groups = grouped(rows, (*KIND, *axes))
    for key in ("config_hash", "checkpoint"):
        parts = []
        for group in groups:
            measured = {identity(row, (*SETTING, "seed", key)) for row in group}
            several = len(measured) > len({values[:-1] for values in measured})
            parts += grouped(group, [key]) if several else [group]
        groups = parts
    labels = labels_of([group[0] for group in groups], KIND_LABELS, axes)
    return dict(zip(labels, groups, strict=True))


def axes_beside(rows: Sequence[Question]) -> list[str]:
    """The axes of the rows' sweeps of which a value stands beside several encodings.

    The others only name the encoding, such as a recipe with options of its own.
    """
    encoding = ("pos_emb", "pos_emb_args")
    axes = []
    for axis in axes_of(rows):
        values = grouped(rows, [axis])
        if len(grouped(rows, [axis, *encoding])) > len(values):
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
            value_of(row, key) or FROM_SCRATCH.get(key) or cell_of(row).get(key)
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

    What all rows share is named by `table.setting`. Where rows differ in how they were evaluated,
    or in the kind of layers, gate, softmax or optimizer, the unusual value is named whatever the
    encoding; of usual values one, where nothing else distinguishes a row from others of its name.
    An unknown value adds no word.
    """
    names = names or [encoding_of(row) for row in rows]
    labels, short, usual = [*names], [*names], [""] * len(rows)
    axes = axes_of(rows) if axes is None else axes
    for key in sorted((*keys, *axes), key=lambda key: (key in BOOKKEEPING, key not in keys)):
        values = [value_of(row, key) for row in rows]
        words = [plain(value) for value in values]
        if len({*words}) == 1:
            continue
        words_of: dict[str, set[str]] = {}
        for label, word in zip(labels, words, strict=True):
            words_of.setdefault(label, set()).add(word)
        for number, value in enumerate(values):
            is_usual = key in VARIANT and value == USUAL.get(key)
            unusual = key in SHOWN_IF_SET or (key in VARIANT and not is_usual)
            if value is not None and (unusual or len(words_of[labels[number]]) > 1):
                word = f", {key} {words[number]}"
                labels[number] += word
                if is_usual:
                    usual[number] = word
                else:
                    short[number] += word
    for number, name in enumerate(names):
        if short[number] == name:
            short[number] += usual[number]
    return short if len({*short}) == len({*labels}) else labels


def select(against: str, kinds: Mapping[str, Sequence[Question]]) -> str:
    """The label that `--against` means among rows by label; UserError for none and for several."""
    labels = matching(against, kinds)
    if len(labels) == 1:
        return labels[0]
    choices = ", ".join(repr(label) for label in labels or kinds)
    problem = "means several encodings" if labels else "is no encoding of these results"
    raise UserError(f"--against: {against!r} {problem} - choose one of {choices}")


def matching(against: str, kinds: Mapping[str, Sequence[Question]]) -> list[str]:
    """The labels that a text may mean: that label itself, or all with a row that it describes.

    A text describes a row by the encoding and any of its facts, such as `mep_free, window none`.
    The label need not mention them.
    """

    def describes(row: Question) -> bool:
        text = against
        for fact in sorted(facts_of(row), key=len, reverse=True):
            text = text.replace(f", {fact}", "", 1)
        return text in (row["pos_emb"], encoding_of(row))

    if against in kinds:
        return [against]
    return [label for label, rows in kinds.items() if any(map(describes, rows))]


def facts_of(row: Question) -> set[str]:
    """Texts that describe a row, such as "window 512": its labels, axes and single options."""
    options = [*cell_of(row).items()]
    for key in LABELS:
        value = row.get(key)
        options += [(key, value), (key, value_of(row, key))]
        if isinstance(value, dict):
            options += value.items()
    return {f"{key} {plain(value)}" for key, value in options}
