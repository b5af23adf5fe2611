"""Evaluation protocols: which windows are used, and which of their targets count
(docs/evaluation.md).

A protocol is a class, and its fields are its options. The command line of evaluate.py, the keys of
sweeps and rows, and the notes below tables follow from them.
"""

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.errors import UserError
from megatron.splits import SPLIT, TASK_PREFIX

logger = logging.getLogger(__name__)

BUCKET = 64  # positions that share a mean in the protocol position; the first 64 are cut finer
# Scored targets in a block, unless a row says otherwise. Files rely on it: never change it.
BLOCK = 512
MOST_TOKENS = 2**24  # beyond this, positions are not exact in float32
MOST = 10**12


@dataclass(frozen=True)
class Windows:
    """Windows of one length, in the order of the text.

    length: inputs of a window, in tokens
    ids: [windows] of [length + 1] tokens, mostly views of the text; the last one is only a target
    scored: [windows] of the positions of the targets that count
    starts: [windows], the place in the corpus of each window's first token; empty for protocols
        that sample windows (paper and task)
    separate: whether each window has its own blocks; else a block of 512 scored targets may span
        windows, if its targets follow each other in the text
    facts: keys of the protocol for the row that depend on the length, such as {"stride": 256}
    answers: whether it also counts how often the argmax is right, as in a task
    """

    length: int
    ids: Sequence[np.ndarray]
    scored: Sequence[np.ndarray]
    starts: Sequence[int] = ()
    separate: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    answers: bool = False

    @cached_property
    def counts(self) -> np.ndarray:
        """The number of scored targets of each window: [windows] int64."""
        return np.array([len(positions) for positions in self.scored], dtype=np.int64)

    @property
    def targets(self) -> list[np.ndarray]:
        """The scored targets of each window: [windows] of [count] tokens."""
        pairs = zip(self.ids, self.scored, strict=True)
        return [ids[1:][positions] for ids, positions in pairs]

    @property
    def places(self) -> list[np.ndarray]:
        """The places in the corpus of the scored targets: [windows] of [count]."""
        pairs = zip(self.starts, self.scored, strict=True)
        return [start + 1 + positions for start, positions in pairs]

    @cached_property
    def text(self) -> str:
        """16 hex digits that identify the scored targets; for a task, the whole problems."""
        return digits(self.ids if self.answers else self.targets)

    @cached_property
    def region(self) -> str:
        """16 hex digits from the scored targets in reading order: their tokens and places.

        So rows of different lengths or protocols agree if they score the same targets. For
        protocols that sample windows, the hash covers the whole window.
        """
        if not self.starts:
            return digits(self.ids)
        return digits([*self.targets, *self.places])

    def whole(self, targets: int) -> int:
        """A number of targets that fills whole windows: at most `targets`, but at least one
        window."""
        ends = self.counts.cumsum()
        return int(max(ends[0], ends[ends <= targets].max(initial=0)))

    @property
    def block_starts(self) -> list[int]:
        """Indices of the scored targets that begin a block of 512, in text order.

        A block may span several short windows, and a long window has several blocks. The targets of
        a block follow each other in the text.
        """
        ends = self.counts.cumsum()
        firsts = ends - self.counts
        if self.starts and not self.separate:
            gaps = np.diff(np.concatenate(self.places)) != 1
            firsts = np.array([0, *np.flatnonzero(gaps) + 1])
        starts: list[int] = []
        for first, end in zip(firsts, [*firsts[1:], ends[-1]], strict=True):
            starts += range(first, end, BLOCK)
        return starts


def digits(parts: Iterable[np.ndarray]) -> str:
    """16 hex digits from whole numbers, however they are divided into pieces."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.astype("<i8").tobytes())
    return digest.hexdigest()[:16]


# --- What is measured ---


@dataclass(frozen=True)
class Request:
    """The request for a measurement on a part of a corpus, as far as it is known without the text.

    lengths: inputs of a window, in tokens, each once, shortest first
    eval_tokens: targets of the region, at most
    split: shares of the parts, such as "949,50,1"
    train_length: of the model
    """

    lengths: Sequence[int]
    eval_tokens: int = 327680
    part: str = "valid"
    split: str = SPLIT
    train_length: int = 512

    @property
    def longest(self) -> int:
        return self.lengths[-1]

    @property
    def available(self) -> int:
        """Targets that the part has; without a text, the requested number."""
        return self.eval_tokens

    @property
    def targets(self) -> int:
        """Targets of the region: a multiple of the longest length, or a UserError."""
        longest, available = self.longest, self.available
        targets = min(self.eval_tokens, available) // longest * longest
        if targets > 0:
            return targets
        limit = f"eval_tokens is {self.eval_tokens}"
        if available < self.eval_tokens:
            limit = f"the {self.part} part of the corpus has {max(available, 0)}"
        raise UserError(
            f"eval_lengths: a window of length {longest} needs {longest} tokens to predict; {limit}"
            " - use shorter lengths, more eval_tokens, a larger corpus, or another split than"
            f" {self.split}"
        )


@dataclass(frozen=True, kw_only=True)
class HeldOutText(Request):
    """A request with its text.

    tokens: the corpus, a TokenFile; or a TaskText for the protocol task
    documents: numbers of the documents of the part
    samples: (length=, num_samples=) -> the samples of a training on this part
    """

    tokens: Any
    documents: range = range(0)
    samples: Callable[..., Any]

    @property
    def available(self) -> int:
        """Targets in the part: all of its tokens except the first."""
        return self.place(self.documents.stop) - self.place(self.documents.start) - 1

    @cached_property
    def region(self) -> np.ndarray:
        """The beginning of the part, the same for every length: [targets + 1] tokens.

        Documents are in file order, each with its final EOD.
        """
        targets = self.targets
        if self.available < self.eval_tokens:
            logger.info("eval_tokens: the %s part has %d: %d", self.part, self.available, targets)
        return first_tokens(self.tokens, self.documents, targets + 1)

    def place(self, document: int) -> int:
        """The place in the corpus of a document's first token."""
        return int(self.tokens.sizes[:document].sum(dtype=np.int64))

    def cut(self, length: int, step: int, start: int = 0) -> Windows:
        """Windows of the region from `start` on, `step` tokens apart; all targets count."""
        pieces = [(self.place(self.documents.start) + start, self.region[start:])]
        return windows_of(pieces, length, step)

    @cached_property
    def long_documents(self) -> list[tuple[int, np.ndarray]]:
        """Documents with at least a window of the longest length, up to eval_tokens: [place,
        tokens].

        Each is cut to whole windows of that length, plus one token.
        """
        missing = self.eval_tokens // self.longest  # windows of the longest length
        pieces = []
        for document in self.documents:
            count = min(missing, (int(self.tokens.sizes[document]) - 1) // self.longest)
            if count > 0:
                ids = self.tokens.read(document, 0, count * self.longest + 1)
                pieces.append((self.place(document), ids))
                missing -= count
        if not pieces:
            size = max(int(self.tokens.sizes[document]) for document in self.documents)
            raise UserError(
                f"within_document: no document of the {self.part} part has {self.longest + 1}"
                f" tokens; the longest has {size}, and eval_tokens is {self.eval_tokens} - use"
                f" lengths up to {max(size - 1, 1)}, and at least as many eval_tokens"
            )
        return pieces


def windows_of(pieces: Iterable[tuple[int, np.ndarray]], length: int, step: int) -> Windows:
    """Windows from pieces of text, each with its place; only whole windows are used."""
    ids: list[np.ndarray] = []
    starts: list[int] = []
    for place, text in pieces:
        for start in range(0, len(text) - length, step):
            ids.append(text[start : start + length + 1])
            starts.append(place + start)
    return Windows(length, ids, [np.arange(length)] * len(ids), starts)


def first_tokens(tokens: Any, documents: Iterable[int], count: int) -> np.ndarray:
    """The first `count` tokens of some documents: [count], or fewer if they have fewer."""
    pieces = [np.empty(0, dtype=tokens.dtype)]
    for document in documents:
        piece = tokens.read(document, 0, min(count, int(tokens.sizes[document])))
        pieces.append(piece)
        count -= len(piece)
        if count == 0:
            break
    return np.concatenate(pieces)


# --- Protocols ---


class Option(NamedTuple):
    """An option of a protocol: `--name N` of evaluate.py, and the key `name` of sweeps and rows.

    readers: the protocols that have it as a field; most: its largest value
    row: setting: a key of rows, which are only compared if it is equal; place: a key that may
        differ between the lengths of a table; none: no key
    """

    readers: tuple[str, ...]
    help: str
    most: int
    least: int = 1
    row: str = "setting"


TASK = "task"  # the protocol for problems with answers
OPTIONS = {
    "windows": Option(
        ("paper", TASK), "paper and task: windows per length; default: 320", 10**6, row="none"
    ),
    "start": Option(("paper",), "paper: first window; default: 0", MOST, least=0),
    "tail": Option(("tail",), "tail: scored tokens of a window; default: 256", MOST_TOKENS),
    "stride": Option(
        ("sliding",),
        "sliding: tokens that windows move by; default: half of each",
        MOST_TOKENS,
        row="place",
    ),
}


@dataclass(frozen=True)
class Protocol:
    """A protocol: the windows of each length, and the options that make them.

    Report pages show the first paragraph of its docstring.
    """

    def check(self, request: Request) -> None:
        """Raises UserError if the request cannot be measured."""
        _ = request.targets

    def lengths(self, request: Request) -> Sequence[int]:
        """The lengths that get a row."""
        return request.lengths

    def tokens(self, request: Request, length: int) -> int:
        """About how many targets are scored at a length."""
        return request.eval_tokens

    def windows_at(self, text: HeldOutText, length: int) -> Windows:
        """The windows of one length. The text has been checked."""
        raise NotImplementedError

    @property
    def facts(self) -> dict[str, Any]:
        """The keys of every row: the options that are part of the setting."""
        names = [option.name for option in fields(self)]
        return {name: getattr(self, name) for name in names if OPTIONS[name].row == "setting"}


class EqualTokens(Protocol):
    """The same held-out tokens for every model and length, cut into windows.

    Tokens near the start of a window have little context. Lengths that divide the longest one score
    the same targets.
    """

    def windows_at(self, text: HeldOutText, length: int) -> Windows:
        return text.cut(length, length)


@dataclass(frozen=True)
class Drawn(Protocol):
    """The same number of windows at every length, from different places."""

    windows: int = 320

    def check(self, request: Request) -> None:
        """These protocols need no region."""

    def tokens(self, request: Request, length: int) -> int:
        return self.windows * length


@dataclass(frozen=True)
class Paper(Drawn):
    """As in the KERPLE and MEP papers: the same number of windows at every length, shuffled with
    the run's seed. The text differs between lengths and between seeds.

    The windows come from the reference's dataset and cross documents. It starts at window
    (iteration // eval_interval) * eval_iters, which is 16000 after 50000 iterations, modulo the
    number of windows.
    """

    start: int = 0

    def windows_at(self, text: HeldOutText, length: int) -> Windows:
        count = self.windows
        samples = text.samples(length=length, num_samples=count)
        ids = [samples[number % len(samples)] for number in range(self.start, self.start + count)]
        epochs = -(-count * length // max(text.available, 1))
        facts = {"epochs": epochs} if epochs > 1 else {}
        return Windows(length, ids, [np.arange(length)] * count, separate=True, facts=facts)


@dataclass(frozen=True)
class Tail(Protocol):
    """Only the last tokens of each window are scored. These are the same tokens at every length,
    with more context at longer lengths.

    The first block ends at the longest length, and the others follow at steps of a quarter of it,
    so that every length has its full context.
    """

    tail: int = 256

    def check(self, request: Request) -> None:
        super().check(request)
        check_within("--tail", self.tail, request.lengths[0], "the shortest length")

    def windows_at(self, text: HeldOutText, length: int) -> Windows:
        apart = max(self.tail, text.longest // 4)
        windows = text.cut(length, apart, text.longest - length)
        scored = np.arange(length - self.tail, length)
        return replace(windows, scored=[scored] * len(windows.ids), separate=True)


class Position(EqualTokens):
    """One pass over the longest windows. The result of a shorter length is the mean over their
    first tokens."""

    def lengths(self, request: Request) -> Sequence[int]:
        return [request.longest]

    def windows_at(self, text: HeldOutText, length: int) -> Windows:
        edges = {0, 1, 2, 4, 8, 16, 32, *range(BUCKET, length, BUCKET), *text.lengths}
        facts = {"position_edges": sorted(edge for edge in edges if edge <= length)}
        return replace(super().windows_at(text, length), facts=facts)


@dataclass(frozen=True)
class Sliding(Protocol):
    """Windows overlap. Each one scores only its new tokens, so nearly all tokens have a long
    context.

    Windows move by `stride`. In the first window all targets count, in the others the last
    `stride`. Every target after the first window has a context of length - stride tokens or more.
    """

    stride: int | None = None

    def stride_at(self, length: int) -> int:
        return self.stride or max(1, length // 2)

    def check(self, request: Request) -> None:
        super().check(request)
        for length in request.lengths:
            check_within("--stride", self.stride_at(length), length, "the length of a window")

    def windows_at(self, text: HeldOutText, length: int) -> Windows:
        stride = self.stride_at(length)
        windows = text.cut(length, stride)
        last = np.arange(length - stride, length)
        scored = [np.arange(length), *[last] * (len(windows.ids) - 1)]
        return replace(windows, scored=scored, facts={"stride": stride})


class WithinDocument(Protocol):
    """Every window is inside one document.

    We use documents with at least one window of the longest length, each from its start to the end
    of its last such window, until eval_tokens are reached. Every length scores the same targets.
    """

    def check(self, request: Request) -> None:
        """The documents decide."""

    def windows_at(self, text: HeldOutText, length: int) -> Windows:
        return windows_of(text.long_documents, length, length)


class TaskProblems(Drawn):
    """Small problems that need distant tokens. Each length has its own problems, of the largest
    size that fits; they are the same for every model. Only tokens of answers are counted.
    """

    def windows_at(self, text: HeldOutText, length: int) -> Windows:
        problems = text.tokens.windows(text.part, length, self.windows)
        ids, marks = problems.swapaxes(0, 1)
        scored = [np.flatnonzero(marks_of_window[1:]) for marks_of_window in marks]
        changed = text.tokens.changed_options
        facts = {"task_args": changed} if changed else {}
        return Windows(length, list(ids), scored, separate=True, facts=facts, answers=True)


PROTOCOLS: dict[str, type[Protocol]] = {
    "equal_tokens": EqualTokens,
    "paper": Paper,
    "tail": Tail,
    "position": Position,
    "sliding": Sliding,
    "within_document": WithinDocument,
    TASK: TaskProblems,
}


def protocol_of(name: str, options: Mapping[str, Any]) -> Protocol:
    """The protocol with this name, with those options that it has."""
    keys = [key for key, option in OPTIONS.items() if name in option.readers and key in options]
    read = {key: options[key] for key in keys}
    return PROTOCOLS[name](**read)


def description(name: str) -> str:
    """A page's description of a protocol; a fixed sentence for an unknown protocol."""
    if name not in PROTOCOLS:
        return "This page has no description of this protocol."
    paragraph, *_ = inspect.cleandoc(PROTOCOLS[name].__doc__ or "").split("\n\n")
    return paragraph.replace("\n", " ")


def usual_protocol(prefix: Path | str | None) -> str:
    """The protocol for a text or a task if none is requested."""
    return TASK if str(prefix).startswith(TASK_PREFIX) else "equal_tokens"


def check_within(option: str, value: int, most: int, what: str) -> None:
    if not 1 <= value <= most:
        raise UserError(
            f"{option} {value}: must be 1 to {most}, {what}"
            " - choose another number, or longer lengths"
        )
