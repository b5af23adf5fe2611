"""The result row: what each key means, its role, and what makes two rows the same.

A line of a results file is a `Row`. `KEYS` gives each of its keys a role. Identity, labels
(labels.py), notes and columns are derived from that table, and from nothing else.
"""

import json
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Required, TypedDict, TypeVar, cast

Facts = dict[str, Any]  # some keys of a row
CORPUS_AXIS = "data"  # the axis of a sweep that names the corpus to train on
TRAINED = "trained "  # before the name of an axis that evaluation may change, such as window

# Scored targets of a block, where a row does not say otherwise. Files rely on it: never change it.
BLOCK = 512


class Question(TypedDict, total=False):
    """What is known of a line before anything is measured: model, text and manner.

    A key may be absent: older files lack later keys.
    """

    # The model.
    pos_emb: Required[str]
    pos_emb_args: dict[str, Any]  # options of the encoding, as in YAML
    train_length: int  # tokens of a training window
    windows_per_step: int | None  # windows that one update reads, over all devices
    seed: int | None
    step: Required[int]  # updates so far
    config_hash: Required[str]  # 12 hex digits of the keys that shape the result
    checkpoint: str  # folder of the checkpoint
    weights: str  # 12 hex digits of the file of weights
    parent: dict[str, Any]  # {path, step, config_hash, weights} that a fine-tuning started from
    trained_on: str  # corpora of a blend and their weights; none: one corpus
    parent_model: str  # its encoding and step, such as "rotary step 700"; none: from scratch
    sweep: str  # name of the sweep that trained the model
    cell: dict[str, Any]  # the point of the sweep's grid: {axis: value}

    # The variant: how these weights were evaluated.
    window: int | str | None  # keys that a query attends to, or train_length; None: all
    blockwise: bool  # queries attend to their own block of keys and the one before
    logn_scale: bool  # scores are scaled by the logarithm of the number of visible keys
    paper_precision: bool  # positions and biases are rounded to bfloat16, as in the forks
    reset_attention_mask: bool  # tokens attend to their own document alone
    reset_position_ids: bool  # positions begin again at each document
    sinks: int | None  # first keys that stay visible beside the window (StreamingLLM); None: none
    clip_distance: int | None  # from here on a table keeps its value; None: nowhere
    method: str | None  # for longer texts, such as "rerope,window=256"; None: none
    dtype: str  # of the model's matrices

    # The setting: text and protocol.
    corpus: str
    part: str  # train, valid or test
    split: str  # shares of the parts, such as "949,50,1"
    protocol: str
    tokenizer: str | None  # hash of the tokenizer

    # The circumstances: they change speed, not the question.
    attention_backend: str
    device: str
    commit: str | None
    code: str  # 12 hex digits of the code that shapes a loss


class Row(Question, total=False):
    """One length of one checkpoint. Losses are means over targets, in nats."""

    # The place: which measurement of the setting.
    length: Required[int]  # tokens of a window
    text: str  # 16 hex digits of the scored targets
    tokens: Required[int]  # scored targets
    tail: int  # tail: scored targets of a window
    stride: int  # sliding: tokens from one window to the next
    start: int  # paper: first window

    # The numbers.
    windows: Required[int]
    epochs: int  # paper: how often the part was read, where more than once
    loss: Required[float | None]  # None where `reason` says why
    perplexity: Required[float | None]  # exp(loss)
    loss_stderr: float | None  # from the windows, allowing for correlated neighbours
    reason: str | None
    bytes: float  # UTF-8 bytes of the scored targets; the end of a document has none
    bytes_from: str  # tokenizer: counted exactly; card: tokens times the corpus's bytes per token
    bits_per_byte: float | None  # loss * tokens / (ln 2 * bytes)
    position_edges: list[int]  # [n + 1], positions between which a mean is taken
    position_losses: list[float]  # [n], mean over positions edges[i] to edges[i + 1] - 1
    seconds: float
    tokens_per_second: float | None  # scored targets

    # The pieces: numbers of parts of the text, in text order.
    window_losses: list[float] | None  # [windows], mean loss of each; None where loss is None
    window_tokens: list[int]  # [windows], scored targets of each, where these differ
    block_losses: list[float]  # [blocks], mean loss of consecutive blocks of up to 512 targets
    block_tokens: list[int]  # [blocks], scored targets of each, where not every block has 512

    # What a sweep adds when it collects its rows.
    corpus_documents: int
    corpus_tokens: int
    seconds_per_step: float | None  # of training, median


class Role(Enum):
    """Why a row has a key. Notes keep this order."""

    MODEL = "what was trained"
    VARIANT = "how these weights were evaluated"
    SETTING = "which text and protocol"
    PLACE = "which measurement of that setting"
    CIRCUMSTANCE = "where and by which code"
    NUMBER = "what came out"
    PIECE = "what came out for each part of the text"
    COLLECTED = "what a sweep adds"


@dataclass(frozen=True)
class Key:
    """The use of one key.

    run: rows with different values are different runs
    kind: runs with different values are not seeds of one kind
    label: it may stand in a label
    default: its value in a row without it, where that is known
    column: its heading in a table of runs; empty: no column
    note: how the notes beneath a table write it, such as "step {}"; empty: not at all
    """

    role: Role
    run: bool = False
    kind: bool = False
    label: bool = False
    default: Any = None
    column: str = ""
    note: str = ""


# Labels and columns keep this order: what was measured stands first, bookkeeping last.
KEYS: dict[str, Key] = {
    "pos_emb": Key(Role.MODEL, run=True, kind=True, column="pos_emb"),  # every label begins with it
    "pos_emb_args": Key(Role.MODEL, kind=True, label=True, column="options"),
    "window": Key(Role.VARIANT, run=True, kind=True, label=True, default="none"),
    "blockwise": Key(Role.VARIANT, run=True, kind=True, label=True, default="off"),
    "logn_scale": Key(Role.VARIANT, run=True, kind=True, label=True, default="off"),
    "paper_precision": Key(Role.VARIANT, run=True, kind=True, label=True, default="off"),
    "reset_attention_mask": Key(Role.VARIANT, run=True, kind=True, label=True, default="off"),
    "reset_position_ids": Key(Role.VARIANT, run=True, kind=True, label=True, default="off"),
    "sinks": Key(Role.VARIANT, run=True, kind=True, label=True, default="none"),
    "clip_distance": Key(Role.VARIANT, run=True, kind=True, label=True, default="none"),
    "method": Key(Role.VARIANT, run=True, kind=True, label=True, default="none"),
    "dtype": Key(Role.VARIANT, run=True, kind=True, label=True, column="dtype", note="{}"),
    "train_length": Key(Role.MODEL, kind=True, label=True, column="trained at"),
    "step": Key(Role.MODEL, run=True, kind=True, label=True, column="step", note="step {}"),
    "windows_per_step": Key(Role.MODEL, kind=True, label=True),
    "trained_on": Key(Role.MODEL, kind=True, label=True, column="trained on", note="trained on {}"),
    "parent_model": Key(Role.MODEL, kind=True, label=True, column="from", note="from {}"),
    "seed": Key(Role.MODEL, run=True, label=True, column="seed", note="seed {}"),
    "corpus": Key(Role.SETTING, run=True, label=True),
    "part": Key(Role.SETTING, run=True, label=True),
    "split": Key(Role.SETTING, run=True, label=True),
    "protocol": Key(Role.SETTING, run=True, label=True),
    "tokenizer": Key(Role.SETTING, run=True, label=True, column="tokenizer"),
    # The axes of sweeps stand here in a label.
    "sweep": Key(Role.MODEL, kind=True, label=True),
    "config_hash": Key(Role.MODEL, run=True, label=True, column="config", note="config {}"),
    "checkpoint": Key(Role.MODEL, run=True, label=True, column="checkpoint"),
    "weights": Key(Role.MODEL),
    "parent": Key(Role.MODEL),
    "cell": Key(Role.MODEL),
    "attention_backend": Key(Role.CIRCUMSTANCE, note="attention {}"),
    "device": Key(Role.CIRCUMSTANCE, note="on {}"),
    "commit": Key(Role.CIRCUMSTANCE, column="commit", note="commit {}"),
    "code": Key(Role.CIRCUMSTANCE),
    "length": Key(Role.PLACE),
    "text": Key(Role.PLACE),
    "tokens": Key(Role.PLACE),
    "tail": Key(Role.PLACE),
    "stride": Key(Role.PLACE),
    "start": Key(Role.PLACE),
    "windows": Key(Role.NUMBER),
    "epochs": Key(Role.NUMBER),
    "loss": Key(Role.NUMBER),
    "perplexity": Key(Role.NUMBER),
    "loss_stderr": Key(Role.NUMBER),
    "reason": Key(Role.NUMBER),
    "bytes": Key(Role.NUMBER),
    "bytes_from": Key(Role.NUMBER),
    "bits_per_byte": Key(Role.NUMBER),
    "position_edges": Key(Role.NUMBER),
    "position_losses": Key(Role.NUMBER),
    "seconds": Key(Role.NUMBER),
    "tokens_per_second": Key(Role.NUMBER),
    "window_losses": Key(Role.PIECE),
    "window_tokens": Key(Role.PIECE),
    "block_losses": Key(Role.PIECE),
    "block_tokens": Key(Role.PIECE),
    "corpus_documents": Key(Role.COLLECTED),
    "corpus_tokens": Key(Role.COLLECTED),
    "seconds_per_step": Key(Role.COLLECTED),
}


def keys_of(role: Role) -> tuple[str, ...]:
    """The keys with a role."""
    return tuple(name for name, key in KEYS.items() if key.role is role)


RUN = tuple(name for name, key in KEYS.items() if key.run)
KIND = tuple(name for name, key in KEYS.items() if key.kind)
VARIANT = keys_of(Role.VARIANT)
SETTING = keys_of(Role.SETTING)
PLACE = keys_of(Role.PLACE)
PIECES = keys_of(Role.PIECE)
COLLECTED = keys_of(Role.COLLECTED)
BYTES = ("bytes", "bytes_from", "bits_per_byte")
EXACT, MEAN = "tokenizer", "card"  # values of bytes_from
# What widens or narrows attention. Every row has a dtype, so it is no change to report.
ATTENTION_INPUTS = tuple(key for key in VARIANT if key != "dtype")
NEEDED = tuple(key for key in Row.__annotations__ if key in Row.__required_keys__)
COLUMNS = {name: key.column for name, key in KEYS.items() if key.column}
NOTES = {name: KEYS[name].note for role in Role for name in keys_of(role) if KEYS[name].note}
BOOKKEEPING = ("sweep", "config_hash", "checkpoint")
LABELS = tuple(name for name, key in KEYS.items() if key.label)
KIND_LABELS = tuple(
    name for name, key in KEYS.items() if key.label and (key.kind or name in BOOKKEEPING)
)

AnyQuestion = TypeVar("AnyQuestion", bound=Question)


# --- Values and identity ---


def value_of(row: Question, key: str) -> Any:
    """The value that a row has in fact, of a key or of an axis of its sweep; None: unknown.

    A window of train_length is that many tokens. An axis that repeats the corpus has no value.
    """
    if key not in KEYS:
        return _value_on_axis(row, key)
    value = row.get(key)
    if key == "window" and value == "train_length":
        return row.get("train_length") or value
    if value is None or value is False:
        return KEYS[key].default
    return value


def _value_on_axis(row: Question, axis: str) -> str | None:
    value = (row.get("cell") or {}).get(axis.removeprefix(TRAINED))
    if value is None or value == row.get("corpus"):
        return None
    return str(value)


def plain(value: Any) -> str:
    """A value as a label has it: options as kernels [exp, gaussian], switches as on and off."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if not isinstance(value, dict):
        return str(value)
    options = [f"{key} {json.dumps(option)}" for key, option in value.items()]
    return " ".join(options).replace('"', "") or "defaults"


def identity(row: Question, keys: Iterable[str]) -> tuple[Hashable, ...]:
    """The values of some keys or axes. Two rows with equal identity are the same in these."""
    return tuple(_hashable(value_of(row, key)) for key in keys)


def _hashable(value: Any) -> Hashable:
    return json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value


def run_of(row: Question) -> tuple[Hashable, ...]:
    """What makes two rows belong to the same line of a table: model, variant and setting."""
    return identity(row, RUN)


def measurement_of(row: Row) -> tuple[Hashable, ...]:
    """What makes one row the repetition of another: the same run on the same scored targets."""
    return identity(row, (*RUN, *PLACE))


def kind_of(row: Question, axes: Iterable[str] = ()) -> tuple[Hashable, ...]:
    """What runs share that differ in seed and text alone; `axes` as `axes_of` returns them."""
    return identity(row, (*KIND, *axes))


def setting_of(row: Question) -> tuple[Hashable, ...]:
    """Corpus, part, split, protocol, tokenizer: numbers are comparable within one setting only."""
    return identity(row, SETTING)


def place_of(row: Row) -> tuple[Hashable, ...]:
    """What must agree for two rows to be compared, beside the text.

    Runs of several seeds may have a text each.
    """
    place = [key for key in PLACE if key != "text"]
    return identity(row, (*SETTING, *place))


def model_of(row: Question) -> Hashable:
    """The same for all rows of one trained model, whoever measured it; None: unknown."""
    return row.get("weights") or row.get("checkpoint")


def agrees(row: Mapping[str, Any], question: Mapping[str, Any]) -> bool:
    """Whether a row has every fact of a question, so that it is its answer."""
    return all(key in row and _same(row, question, key) for key in question)


def _same(row: Any, question: Any, key: str) -> bool:
    if key in VARIANT:
        return value_of(row, key) == value_of(question, key)
    return row[key] == question[key]


def with_facts(row: AnyQuestion, facts: Mapping[str, Any]) -> AnyQuestion:
    """The row with other values of some keys."""
    return cast("AnyQuestion", {**row, **facts})


# --- Rows together ---


def by_setting(rows: Iterable[AnyQuestion]) -> dict[tuple[Hashable, ...], list[AnyQuestion]]:
    """Rows by corpus, part, split, protocol and tokenizer."""
    groups: dict[tuple[Hashable, ...], list[AnyQuestion]] = {}
    for row in rows:
        groups.setdefault(setting_of(row), []).append(row)
    return groups


def last_of_each(rows: Iterable[Row]) -> list[Row]:
    """The last row of each run at each length, so that a mean is over seeds alone.

    A run may have scored several texts of one length.
    """
    last = {(run_of(row), row["length"]): row for row in rows}
    return list(last.values())
