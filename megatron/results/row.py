"""The result row: what each key means, what identifies it, and which rows belong together.

A line of a results file is a `Row`. Its keys stand in groups by their role. Identity and labels
(labels.py) follow from these groups, so a new option of a measurement or of a protocol is part of
every row's identity and of every label.
"""

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Required, TypeVar, cast

from pydantic import Field
from typing_extensions import TypedDict  # pydantic checks rows by these types

from megatron.protocols import OPTIONS, TASK

Facts = dict[str, Any]  # some keys of a row
Count = Annotated[int, Field(ge=1)]
Loss = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
CORPUS_AXIS = "data"  # the axis of a sweep that names the corpus to train on
ENCODING_AXIS = (
    "encoding"  # the axis of a sweep whose names stand for encodings in tables and figures
)
DRAWN = ("paper", TASK)  # protocols whose windows are drawn, others for each length
TRAINED = "trained "  # before the name of an axis that evaluation may change, such as window
# Options of protocols that are keys of rows.
PROTOCOL_OPTIONS = tuple(name for name, option in OPTIONS.items() if option.row != "none")


class Variant(TypedDict, total=False):
    """How these weights were evaluated."""

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
    float32_matmul_precision: str  # of a float32 model on a GPU, by torch's names; none: highest


OPTION_TYPES = dict.fromkeys(PROTOCOL_OPTIONS, int)
ProtocolOptions = TypedDict("ProtocolOptions", OPTION_TYPES, total=False)  # pyright: ignore


class Setting(TypedDict, total=False):
    """The text and the protocol."""

    corpus: str
    part: str  # train, valid or test
    split: str  # shares of the parts, such as "949,50,1"
    protocol: str
    tokenizer: str | None  # hash of the tokenizer
    task_args: dict[str, Any]  # task: options of the problems that are not the defaults


class Question(Variant, Setting, ProtocolOptions, total=False):
    """The facts of a line before anything is measured: model, text and manner.

    A key may be absent: older files lack later keys.
    """

    # The model.
    pos_emb: Required[str]
    pos_emb_args: dict[str, Any]  # options of the encoding, as in YAML
    train_length: int  # tokens of a training window
    stage_length: int  # the same in the stage of its step, of a context that grows
    stage_ends: list[int]  # last steps of the stages
    windows_per_step: int | None  # windows that one update reads, over all devices
    seed: int | None
    step: Required[int]  # updates so far
    config_hash: Required[str]  # 12 hex digits of the keys that shape the result
    checkpoint: str  # folder of the checkpoint
    weights: str  # 12 hex digits of the file of weights
    parent: dict[str, Any]  # {path, step, config_hash, weights} that a fine-tuning started from
    bos_token: str  # stands before each text, as the tokenizer of an import asks; none: nothing
    trained_on: str  # corpora of a blend and their weights; none: one corpus
    layer_kinds: str  # kinds of layers, such as "3 gated_delta + 1 attention"; none: attention
    linear_pos_emb: str  # encoding of layers with a state, such as "rotary (base: 1000000)"
    attention_gate: str  # head or element; none: no gate
    softmax_type: str  # off-by-one or learnable; none: vanilla
    optimizer_type: str  # none: Adam
    origin: str  # Hugging Face's class of an imported model, whose seed is unknown
    parent_model: str  # its encoding and step, such as "rotary step 700"; none: from scratch
    sweep: str  # name of the sweep that trained the model
    cell: dict[str, Any]  # the point of the sweep's grid: {axis: value}

    # The circumstances: they change speed, not the question.
    attention_backend: str
    device: str
    commit: str | None
    code: str  # 12 hex digits of the code that shapes a loss


class Pieces(TypedDict, total=False):
    """Numbers of parts of the text, in text order."""

    # [windows], mean loss of each that has scored targets; None if loss is None
    window_losses: list[float] | None
    window_tokens: list[Count]  # [windows], scored targets of each, if these differ
    token_losses: list[float]  # of the targets of the first windows, if they were asked for
    block_losses: list[float]  # [blocks], mean loss of consecutive blocks of up to 512 targets
    block_tokens: list[Count]  # [blocks], scored targets of each, if not every block has 512


class Answers(TypedDict, total=False):
    """Numbers of a task's answers: shares that the argmax has right. None if loss is None."""

    accuracy: Share | None  # of the windows, those with every token right
    token_accuracy: Share | None  # of all tokens of answers
    window_accuracies: list[Share] | None  # [windows], of the tokens of each


class Collected(TypedDict, total=False):
    """Keys that a sweep adds when it collects its rows."""

    corpus_documents: int
    corpus_tokens: int
    seconds_per_step: float | None  # of training, median


class Row(Question, Pieces, Answers, Collected, total=False):
    """One length of one checkpoint. Losses are means over targets, in nats."""

    # The place: which measurement of the setting.
    length: Required[Count]  # tokens of a window
    text: str  # 16 hex digits of the scored targets
    tokens: Required[Annotated[int, Field(ge=0)]]  # scored targets
    # 16 hex digits of the scored targets, by token and place in the corpus, in reading order: equal
    # for rows of any length and protocol that score the same ones.
    region: str

    # The numbers.
    windows: Required[Count]
    epochs: int  # paper: how often the part was read, if more than once
    loss: Required[Loss | None]  # None if `reason` says why
    perplexity: Required[float | None]  # exp(loss)
    loss_stderr: float | None  # from the windows, allowing for correlated neighbours
    reason: str | None
    label: str  # a name that show_results.py --names gave; no file has it
    bytes: float  # UTF-8 bytes of the scored targets; the end of a document has none
    bytes_from: str  # tokenizer: counted exactly; card: tokens times the corpus's bytes per token
    bits_per_byte: float | None  # loss * tokens / (ln 2 * bytes)
    position_edges: list[int]  # [n + 1], positions between which a mean is taken
    position_losses: list[float]  # [n], mean over positions edges[i] to edges[i + 1] - 1
    seconds: float
    tokens_per_second: float | None  # scored targets


VARIANT = tuple(Variant.__annotations__)
SETTING = (*Setting.__annotations__, *PROTOCOL_OPTIONS)
EXACT, MEAN = "tokenizer", "card"  # values of bytes_from
# What widens or narrows attention: all but the numbers' format, which is no change to report.
FORMAT = ("dtype", "float32_matmul_precision")
ATTENTION_INPUTS = tuple(key for key in VARIANT if key not in FORMAT)
# How a missing value of a variant reads: a switch is off, a number is none. Labels leave these out.
USUAL = {key: "off" if kind is bool else "none" for key, kind in Variant.__annotations__.items()}
USUAL |= {"dtype": "float32", "float32_matmul_precision": "highest"}
FROM_SCRATCH = {"trained_on": "one corpus", "parent_model": "none"}  # what no value means

# What makes measurements different, beside the encoding and the length, in the order of labels:
# the model and how it was evaluated, its seed, the text and the protocol, and bookkeeping.
# A row has the keys of SHOWN_IF_SET only where the model differs from the default.
SHOWN_IF_SET = (
    *("layer_kinds", "linear_pos_emb", "attention_gate", "softmax_type"),
    "optimizer_type",
)
OF_TRAINING = (
    *("train_length", "stage_length", "step", "windows_per_step", "trained_on", "parent_model"),
)
KIND = ("pos_emb_args", *VARIANT, "bos_token", *SHOWN_IF_SET, *OF_TRAINING)
PLACE = ("tokens", "text")
BOOKKEEPING = ("sweep", "config_hash", "checkpoint")
# Equal for rows of one line of a table. The hash of a configuration stands for the model.
RUN = ("pos_emb", "config_hash", "checkpoint", "bos_token", "step", "seed", *VARIANT, *SETTING)

# What the notes beneath a table say, and the columns of a table of models.
NOTES = (
    *("step", "stage_length", "trained_on", "parent_model", "seed", "config_hash", "dtype"),
    *("attention_backend", "device", "commit"),
)
COLUMNS = (
    *("pos_emb", "pos_emb_args", *SHOWN_IF_SET, "dtype", "train_length", "step", "trained_on"),
    *("parent_model", "seed", "tokenizer", "config_hash", "commit"),
)

AnyQuestion = TypeVar("AnyQuestion", bound=Question)


# --- Values and identity ---


def value_of(row: Question, key: str) -> Any:
    """The value that a row has in fact, of a key or of an axis of its sweep, or None if unknown.

    A window of train_length is that many tokens. An axis that repeats the corpus has no value, nor
    has a stride that is half of the window, as usual.
    """
    if key not in Row.__annotations__:
        value = cell_of(row).get(key.removeprefix(TRAINED))
        if value is None or value == row.get("corpus"):
            return None
        return str(value)
    value = row.get(key)
    if key == "window" and value == "train_length":
        return row.get("train_length") or value
    if key == "stride" and value and 2 * value == row.get("length"):
        return None
    if value is None or value is False:
        return USUAL.get(key)
    return value


def cell_of(row: Question) -> Facts:
    """The point of its sweep's grid that a row belongs to: {axis: value}; {} without a sweep."""
    return row.get("cell") or {}


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
    values = [value_of(row, key) for key in keys]
    return tuple(
        json.dumps(value, sort_keys=True) if isinstance(value, dict | list) else value
        for value in values
    )


def measurement_of(row: Row) -> tuple[Hashable, ...]:
    """The run and the scored targets: equal for a row and its repetition."""
    return identity(row, (*RUN, "length", *PLACE))


def agrees(row: Mapping[str, Any], question: Mapping[str, Any]) -> bool:
    """Whether a row has every fact of a question, so that it is its answer."""
    for key, value in question.items():
        if key in VARIANT:
            value, answer = (value_of(cast("Question", facts), key) for facts in (question, row))
        else:
            answer = row.get(key)
        if key not in row or answer != value:
            return False
    return True


def text_of(row: Question) -> str:
    """The name of the text that was scored, such as "github valid"."""
    return " ".join(word for word in (row.get("corpus"), row.get("part")) if word)


def encoding_of(row: Question) -> str:
    """The encoding's name in tables and figures, such as p_rope: a sweep's own, or `pos_emb`."""
    return cell_of(row).get(ENCODING_AXIS) or row["pos_emb"]


def shown_fact(row: Question, key: str) -> Any:
    """A fact as notes and pages show it: the seed of an imported model's configuration is none."""
    return None if key == "seed" and "origin" in row else row.get(key)


def trained_length(row: Question) -> int | None:
    """The tokens of a window in training at its step; None before the first, or if unknown."""
    return row.get("stage_length", row.get("train_length")) if row["step"] > 0 else None


def with_facts(row: AnyQuestion, facts: Mapping[str, Any]) -> AnyQuestion:
    """The row with other values of some keys."""
    return cast("AnyQuestion", {**row, **facts})


# --- Rows together ---


def grouped(rows: Iterable[AnyQuestion], keys: Iterable[str]) -> list[list[AnyQuestion]]:
    """Rows with equal values of some keys or axes, in the order of their first rows."""
    groups: dict[Hashable, list[AnyQuestion]] = {}
    keys = tuple(keys)
    for row in rows:
        groups.setdefault(identity(row, keys), []).append(row)
    return list(groups.values())


def by_text(rows: Sequence[Row], keys: Sequence[str] = SETTING) -> list[list[Row]]:
    """Rows of one setting and one text each: only their numbers stand in one table or figure.

    keys: the setting; without the tokenizer for numbers that can be compared between tokenizers

    One text is one region. `paper` and `task` draw windows for each length, `paper` for each seed:
    there as many windows are one text.
    """
    texts = []
    for group in grouped(rows, keys):
        is_drawn = group[0].get("protocol") in DRAWN
        if "tokenizer" in keys:
            texts += grouped(group, ["windows" if is_drawn else "region"])
        else:
            texts.append(group)
    return texts
