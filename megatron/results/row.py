"""The result row: what each key of a line means, its role, and what makes two rows the same."""

import json
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Required, TypedDict


class Row(TypedDict, total=False):
    """One length of one checkpoint: a line of a results file. Losses are means over targets, in nats.

    A key may be absent: older files lack later keys, and most protocols have no numbers of their own.
    """

    # The model: what was trained.
    pos_emb: Required[str]
    pos_emb_args: dict[str, Any]  # the options of the encoding, as in YAML
    train_length: int  # tokens of a training window
    windows_per_step: int | None  # windows that one update reads, over all devices
    seed: int | None
    step: Required[int]  # updates so far
    config_hash: Required[str]  # 12 hex digits of the keys that shape the result
    checkpoint: str  # folder of the checkpoint
    weights: str  # 12 hex digits of the file of weights
    sweep: str  # name of the sweep
    cell: dict[str, Any]  # the point of the sweep's grid: {axis: value}

    # The setting: what was asked.
    corpus: str
    part: str  # train, valid or test
    split: str  # shares of the parts, such as "949,50,1"
    protocol: str
    tokenizer: str | None  # hash of the tokenizer
    length: Required[int]  # tokens of a window
    text: str  # 16 hex digits of the scored targets
    windows: Required[int]
    tokens: Required[int]  # scored targets
    tail: int  # tail: scored targets of a window
    stride: int  # sliding: tokens from one window to the next
    start: int  # paper: first window
    epochs: int  # paper: how often the part was read, where more than once

    # The variant: how these weights were evaluated.
    window: int | str | None  # keys that a query sees, or train_length; None: all
    blockwise: bool  # whether queries see the keys of their own and the previous block only
    logn_scale: bool  # whether scores are scaled by the logarithm of the keys that a query sees
    dtype: str  # of the model's matrices

    # The circumstances: they change speed, not the question.
    attention_backend: str
    device: str
    commit: str
    code: str  # 12 hex digits of the code that shapes a loss
    corpus_documents: int
    corpus_tokens: int
    seconds_per_step: float | None  # of training, median

    # The numbers: what was found.
    loss: Required[float | None]  # None where `reason` says why
    perplexity: Required[float | None]  # exp(loss)
    loss_stderr: float | None  # from the windows, allowing for correlated neighbours
    reason: str | None
    window_losses: list[float]  # [windows], the mean loss of each window
    window_tokens: list[int]  # [windows], scored targets of each, where these differ
    block_losses: list[float]  # [blocks], the mean loss of consecutive blocks of 512 targets
    block_tokens: list[int]  # [blocks], targets of each, where not all have 512
    position_edges: list[int]  # [n + 1], positions between which a mean is taken
    position_losses: list[float]  # [n], mean over positions edges[i] to edges[i + 1] - 1
    seconds: float
    tokens_per_second: float | None  # scored targets


class Role(Enum):
    """Why a row has a key."""

    MODEL = "what was trained"
    VARIANT = "how these weights were evaluated"
    SETTING = "which text and protocol"
    PLACE = "which measurement of that setting"


@dataclass(frozen=True)
class Key:
    """One key that identifies a row.

    run: whether it tells one run from another; kind: whether runs that differ in it are not seeds of one kind;
    label: whether it may stand in a label; default: its value in a row without it, where that is known
    """

    role: Role
    run: bool = False
    kind: bool = False
    label: bool = True
    default: Any = None


# In the order in which labels name what differs: what was measured first, bookkeeping last.
KEYS: dict[str, Key] = {
    "pos_emb": Key(Role.MODEL, run=True, kind=True, label=False),  # every label begins with it
    "pos_emb_args": Key(Role.MODEL, kind=True),
    "window": Key(Role.VARIANT, run=True, kind=True, default="none"),
    "blockwise": Key(Role.VARIANT, run=True, kind=True, default="off"),
    "logn_scale": Key(Role.VARIANT, run=True, kind=True, default="off"),
    "dtype": Key(Role.VARIANT, run=True, kind=True),
    "train_length": Key(Role.MODEL, kind=True),
    "step": Key(Role.MODEL, run=True, kind=True),
    "windows_per_step": Key(Role.MODEL, kind=True),
    "seed": Key(Role.MODEL, run=True),
    "corpus": Key(Role.SETTING, run=True),
    "part": Key(Role.SETTING, run=True),
    "split": Key(Role.SETTING, run=True),
    "protocol": Key(Role.SETTING, run=True),
    "tokenizer": Key(Role.SETTING, run=True),
    "config_hash": Key(Role.MODEL, run=True),
    "checkpoint": Key(Role.MODEL, run=True),
    "length": Key(Role.PLACE, label=False),
    "text": Key(Role.PLACE, label=False),
    "tokens": Key(Role.PLACE, label=False),
    "tail": Key(Role.PLACE, label=False),
    "stride": Key(Role.PLACE, label=False),
    "start": Key(Role.PLACE, label=False),
}
BOOKKEEPING = ("config_hash", "checkpoint")  # axes of a sweep stand before these in a label


def keys_of(role: Role) -> tuple[str, ...]:
    """The keys with a role, in the order of labels."""
    return tuple(name for name, key in KEYS.items() if key.role is role)


RUN = tuple(name for name, key in KEYS.items() if key.run)
KIND = tuple(name for name, key in KEYS.items() if key.kind)
VARIANT = keys_of(Role.VARIANT)
SETTING = keys_of(Role.SETTING)
PLACE = keys_of(Role.PLACE)


def value_of(row: Row, key: str) -> Any:
    """The value that a row has in fact: a window of train_length is that many tokens; None where it is unknown."""
    value = row.get(key)
    if key == "window" and value == "train_length":
        return row.get("train_length") or value
    if value is None or value is False:
        return KEYS[key].default if key in KEYS else None
    return value


def identity(row: Row, keys: Iterable[str]) -> tuple[Hashable, ...]:
    """The values of some keys; two rows with the same identity are the same in these."""
    return tuple(_hashable(value_of(row, key)) for key in keys)


def _hashable(value: Any) -> Hashable:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


def run_of(row: Row) -> tuple[Hashable, ...]:
    """What makes two rows belong to the same line of a table: model, variant and setting."""
    return identity(row, RUN)


def measurement_of(row: Row) -> tuple[Hashable, ...]:
    """What makes one row the repetition of another: the same run, on the same scored targets."""
    return identity(row, (*RUN, *PLACE))


def kind_of(row: Row) -> tuple[Hashable, ...]:
    """What runs share that differ in nothing but their seed and their text."""
    return identity(row, KIND)


def setting_of(row: Row) -> tuple[Hashable, ...]:
    """Corpus, part, split, protocol and tokenizer: only within one setting numbers can be compared."""
    return identity(row, SETTING)


def place_of(row: Row) -> tuple[Hashable, ...]:
    """What must agree for two rows to be compared, beside the text: runs of several seeds may have several texts."""
    return identity(row, (*SETTING, *(key for key in PLACE if key != "text")))


def model_of(row: Row) -> Hashable:
    """The same for all rows of one trained model, whether a sweep measured it or a user."""
    return row.get("weights") or row.get("checkpoint")


def last_of_each(rows: Iterable[Row]) -> list[Row]:
    """Of a run that scored several texts of one length the last, so that a mean is over seeds alone."""
    return [*{(run_of(row), row["length"]): row for row in rows}.values()]


def runs(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by a label for each run, shortest length first."""
    groups: dict[tuple[Hashable, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(run_of(row), []).append(row)
    labels = labels_of([group[0] for group in groups.values()], label_keys(with_seed=True))
    return {
        label: sorted(group, key=lambda row: row["length"])
        for label, group in zip(labels, groups.values(), strict=True)
    }


def label_keys(axes: Iterable[str] = (), *, with_seed: bool = False) -> tuple[str, ...]:
    """Keys that may tell two labels apart, the most telling first; `axes` are those of sweeps."""
    measured = [
        name
        for name, key in KEYS.items()
        if key.label and name not in BOOKKEEPING and (with_seed or name != "seed")
    ]
    return (*measured, *axes, *BOOKKEEPING)


def labels_of(rows: Sequence[Row], keys: Iterable[str]) -> list[str]:
    """A label for each of some rows: the encoding, and those of the keys that tell it from others of that name.

    A row in which a key is unknown gets no word for it.
    """
    labels = [row["pos_emb"] for row in rows]
    for key in keys:
        values = [plain(value_of(row, key)) for row in rows]
        known: dict[str, set[Any]] = {}
        for label, value in zip(labels, values, strict=True):
            if value is not None:
                known.setdefault(label, set()).add(value)
        for number, value in enumerate(values):
            label = labels[number]
            if value is not None and len(known[label]) > 1:
                labels[number] = f"{label}, {key} {value}"
    return labels


def with_axes(rows: Sequence[Row], without: Collection[str] = ()) -> tuple[list[Row], list[str]]:
    """Rows of a sweep with what their cells say beside them, such as size: wide, and the names of these axes."""
    points: list[dict[str, str]] = []
    for row in rows:
        cell = row.get("cell") or {}
        points.append(
            {
                axis: str(value)
                for axis, value in cell.items()
                if axis not in row and axis not in without
            }
        )
    axes = [*dict.fromkeys(axis for point in points for axis in point)]
    return [{**row, **point} for row, point in zip(rows, points, strict=True)], axes  # pyright: ignore[reportReturnType]


def plain(value: Any) -> Any:
    """Options of an encoding as a short text, such as kernels [exp, gaussian]; on, off; all else as it is."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, dict):
        return value
    options = [f"{key} {json.dumps(option)}" for key, option in value.items()]
    return " ".join(options).replace('"', "") or "defaults"
