"""Protocols of evaluation: which windows, and which of their targets count (docs/evaluation.md)."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.samples import build_split, split_documents
from megatron.data.tasks import TaskText
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.results.row import BLOCK, TASK
from megatron.splits import TASK_PREFIX

logger = logging.getLogger(__name__)

ROUNDING = 1e-5  # nats: losses in float32 differ by less between batch sizes
BUCKET = 64  # positions that share one mean in the protocol position; the first 64 are cut finer


@dataclass(frozen=True)
class Windows:
    """Windows of one length, in the order of the text.

    length: inputs of a window, in tokens
    ids: [windows] of [length + 1] tokens, mostly views of the text; the last is a target only
    first_scored: [windows], the position from which on a window's targets are scored
    stretches: [windows], the number of the stretch of text that a window's scored targets are in;
        the scored targets of one stretch follow each other. Empty if all are one stretch.
    edges: [buckets + 1] positions between which a mean loss of its own is wanted; empty for none
    about: keys of the protocol for the row, such as {"tail": 256}
    answers: [windows] of the positions of a task's answers or of key tokens, which alone are
        scored, in place of first_scored; empty for a text
    starts: [windows], the place in the corpus of each window's first token; empty for windows that
        are drawn and not cut, as in paper and task
    rule: protocol longppl, which of the targets are key tokens
    """

    length: int
    ids: Sequence[np.ndarray]
    first_scored: Sequence[int] = ()
    stretches: Sequence[int] = ()
    edges: tuple[int, ...] = ()
    about: dict[str, Any] = field(default_factory=dict)
    answers: Sequence[np.ndarray] = ()
    starts: Sequence[int] = ()
    rule: "KeyRule | None" = None

    @cached_property
    def scored(self) -> Sequence[np.ndarray | slice]:
        """The positions of the scored targets: [windows], slices where they follow each other."""
        if self.answers:
            return self.answers
        return [slice(first, self.length) for first in self.first_scored]

    @cached_property
    def counts(self) -> np.ndarray:
        """The scored targets of each window: [windows] int64."""
        if self.answers:
            return np.array([len(positions) for positions in self.answers], dtype=np.int64)
        return self.length - np.asarray(self.first_scored, dtype=np.int64)

    @property
    def targets(self) -> Iterable[np.ndarray]:
        """The scored targets of each window: [windows] of [count] tokens."""
        for ids, positions in zip(self.ids, self.scored, strict=True):
            yield ids[1:][positions]

    @cached_property
    def text(self) -> str:
        """16 hex digits of what is scored: two rows can be paired only where these agree.

        Of a text these are the targets, of a task the whole problems.
        """
        digest = hashlib.sha256()
        for targets in self.ids if self.answers else self.targets:
            digest.update(targets.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def region(self) -> str:
        """16 hex digits of the scored targets in reading order: their tokens and their places.

        So rows of other lengths or protocols that score the same targets agree. Windows without
        places count whole.
        """
        positions = np.arange(self.length)
        parts = list(self.targets)
        for start, scored in zip(self.starts, self.scored, strict=False):
            parts.append(start + 1 + positions[scored])
        if not self.starts:
            parts = list(self.ids)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part.astype("<i8").tobytes())
        return digest.hexdigest()[:16]

    def whole(self, targets: int) -> int:
        """So many targets that they fill windows, at least the first: `targets` or fewer."""
        ends = self.counts.cumsum()
        return int(max(ends[0], ends[ends <= targets].max(initial=0)))

    @property
    def block_starts(self) -> list[int]:
        """Numbers of the scored targets that begin a block of 512, in text order.

        A block may span several short windows, and a long window holds several. A new stretch
        begins a new block, so the targets of a block follow each other in the text.
        """
        starts: list[int] = []
        stretches = self.stretches or [0] * len(self.ids)
        sizes = np.bincount(stretches, weights=self.counts).astype(np.int64)
        for end, size in zip(sizes.cumsum().tolist(), sizes.tolist(), strict=True):
            starts += range(end - size, end, BLOCK)
        return starts


@dataclass(frozen=True)
class KeyRule:
    """The rule of LongPPL (arXiv 2410.23771) for key tokens, by the losses of a judge in nats.

    alpha: a key token's loss after a short context is more than this above that after a long one,
        beyond rounding
    beta: its loss after the long context is below -beta
    trunc_len: tokens of the short context at least; targets with fewer tokens before them never are
        key tokens
    sliding_window: targets after which a short context begins anew; it has up to trunc_len +
        sliding_window - 1 tokens
    """

    alpha: float
    beta: float
    trunc_len: int
    sliding_window: int

    def short_windows(self, windows: Windows) -> list[Windows]:
        """Windows that give each target a short context once, in the order of the targets.

        Target t of a text, counted from 0, follows the tokens from
        floor((t - trunc_len) / sliding_window) · sliding_window on.
        """
        found = []
        for start in range(0, windows.length + 1 - self.trunc_len, self.sliding_window):
            end = min(start + self.trunc_len + self.sliding_window, windows.length + 1)
            ids = [text[start:end] for text in windows.ids]
            found.append(Windows(end - start - 1, ids, [self.trunc_len - 1] * len(ids)))
        return found

    def places(self, long: np.ndarray, short: Sequence[np.ndarray]) -> np.ndarray:
        """Positions of the key tokens of a window: [keys].

        long: losses of all targets [length]; short: those after short contexts, piece by piece
        """
        first = self.trunc_len - 1
        after_long = long[first:]
        gain = np.concatenate([np.empty(0), *short]) - after_long
        # Where far context changes nothing, the batch size would decide at alpha 0.
        gains_enough = gain > self.alpha + ROUNDING
        return first + np.flatnonzero(gains_enough & (after_long < -self.beta))


@dataclass(frozen=True)
class Request:
    """A request to measure: a part of a corpus at several lengths, and the options of protocols.

    tokens: the corpus
    lengths: inputs of a window, in tokens; `ordered_lengths` has them in order
    split: shares of the parts, such as "949,50,1"
    part: train, valid or test
    eval_tokens: targets of the region, at most
    seed: of the training. Protocol paper: it shuffles documents and windows
    windows: protocols paper and task, windows of each length
    start: protocol paper, number of the first window
    tail: protocol tail, scored targets at the end of a window
    stride: protocol sliding, tokens from one window to the next; None for half of each length
    rule: protocol longppl, which targets are key tokens
    judge: protocol longppl, the name of the model that says so; self: the model as it was trained
    """

    tokens: TokenFile
    lengths: Iterable[int]
    split: str = "949,50,1"
    part: str = "valid"
    eval_tokens: int = 327680
    seed: int = 1234
    windows: int = 320
    start: int = 0
    tail: int = 256
    stride: int | None = None
    rule: KeyRule | None = None
    judge: str = "self"

    @cached_property
    def ordered_lengths(self) -> list[int]:
        """The lengths, each once, shortest first."""
        return sorted(set(self.lengths))

    @cached_property
    def documents(self) -> range:
        """Numbers of the documents of the part."""
        return split_documents(self.tokens, self.split, self.part)

    @property
    def available(self) -> int:
        """Targets in the part: all of its tokens but the first."""
        sizes = self.tokens.sizes[self.documents.start : self.documents.stop]
        return int(np.sum(sizes, dtype=np.int64)) - 1

    @cached_property
    def region(self) -> np.ndarray:
        """The first text of the part, the same for every length: [targets + 1] tokens.

        Documents stand in file order, each with the EOD that ends it. The number of targets is a
        multiple of the longest length. Raises UserError if there is not one window of that length.
        """
        available = self.available
        longest = self.ordered_lengths[-1]
        if min(self.eval_tokens, available) < longest:
            limit = f"eval_tokens is {self.eval_tokens}"
            if available < self.eval_tokens:
                limit = f"the {self.part} part of the corpus has {max(available, 0)}"
            raise UserError(
                f"eval_lengths: one window of length {longest} needs {longest} tokens to predict;"
                f" {limit} - give shorter lengths, more eval_tokens, a larger corpus,"
                f" or another split than {self.split}"
            )
        targets = min(self.eval_tokens, available) // longest * longest
        if available < self.eval_tokens:
            logger.info("eval_tokens: the %s part has %d: %d", self.part, available, targets)
        return first_tokens(self.tokens, self.documents, targets + 1)

    def place(self, document: int) -> int:
        """The place in the corpus of a document's first token."""
        return int(self.tokens.sizes[:document].sum(dtype=np.int64))

    def cut(self, length: int, step: int, start: int = 0) -> Windows:
        """Windows of the region from `start` on, `step` tokens apart, as far as whole ones go."""
        place = self.place(self.documents.start) + start
        return _cut(self.region[start:], length, step, place)


class WithoutText(Request):
    """A request before its text is there: it refuses what no text allows, and has no windows."""

    @cached_property
    def documents(self) -> range:
        return range(0)

    @property
    def available(self) -> int:
        return self.eval_tokens


def first_tokens(tokens: TokenFile, documents: range, count: int) -> np.ndarray:
    """The first `count` tokens of some documents: [count], or fewer if they have fewer."""
    pieces = [np.empty(0, dtype=tokens.dtype)]
    for document in documents:
        size = int(tokens.sizes[document])
        piece = tokens.read(document, 0, min(count, size))
        pieces.append(piece)
        count -= len(piece)
        if count == 0:
            break
    return np.concatenate(pieces)


def equal_tokens(request: Request) -> list[Windows]:
    """Cut the region into windows. Lengths that divide the longest score the same targets."""
    return [request.cut(length, length) for length in request.ordered_lengths]


def paper(request: Request) -> list[Windows]:
    """Measure as KERPLE and MEP did: the same number of windows at every length, across documents.

    The windows are those of the reference's dataset, in its order. So every length and every seed
    scores other text. The reference starts at window (iteration // eval_interval) * eval_iters,
    which is 16000 after 50000 iterations, modulo the number of windows.
    """
    count, start = request.windows, request.start
    by_length = []
    for length in request.ordered_lengths:
        samples = build_split(
            request.tokens, request.split, request.part, length, request.seed, count
        )
        numbers = range(start, start + count)
        ids = [samples[number % len(samples)] for number in numbers]
        about = {"start": start}
        scored = count * length
        epochs = -(-scored // max(request.available, 1))
        if epochs > 1:
            about["epochs"] = epochs
        windows = Windows(length, ids, [0] * count, stretches=range(count), about=about)
        by_length.append(windows)
    return by_length


def tail(request: Request) -> list[Windows]:
    """Score the same ends of windows at every length: what more context gives these targets.

    The first block ends at the longest length, and the others follow at a quarter of it each, so
    that every length has all of its context.
    """
    size = request.tail
    lengths = request.ordered_lengths
    longest = lengths[-1]
    _check_within("--tail", size, lengths[0], "the shortest length")
    apart = max(size, longest // 4)
    by_length = []
    for length in lengths:
        windows = request.cut(length, apart, longest - length)
        count = len(windows.ids)
        first_scored = [length - size] * count
        about = {"tail": size}
        own = replace(windows, first_scored=first_scored, stretches=range(count), about=about)
        by_length.append(own)
    return by_length


def position(request: Request) -> list[Windows]:
    """Cut the region by the longest length alone, and ask for the losses by position."""
    longest = request.ordered_lengths[-1]
    fine = [0, *(2**power for power in range(6))]
    edges = {*fine, *range(BUCKET, longest, BUCKET), *request.ordered_lengths}
    edges_in_window = sorted(edge for edge in edges if edge <= longest)
    return [replace(request.cut(longest, longest), edges=tuple(edges_in_window))]


def sliding(request: Request) -> list[Windows]:
    """Move windows by `stride` and score the last `stride` targets of each; the first scores all.

    Every target after the first window has a context of length - stride tokens or more.
    """
    by_length = []
    for length in request.ordered_lengths:
        stride = max(1, length // 2) if request.stride is None else request.stride
        _check_within("--stride", stride, length, "the length of a window")
        windows = request.cut(length, stride)
        first_scored = [0] + [length - stride] * (len(windows.ids) - 1)
        by_length.append(replace(windows, first_scored=first_scored, about={"stride": stride}))
    return by_length


def within_document(request: Request) -> list[Windows]:
    """Cut single documents, so that no window crosses from one to the next.

    Documents with at least one window of the longest length count, each from its start as far as
    such windows go, until eval_tokens are reached. Every length scores the same targets.
    """
    longest = request.ordered_lengths[-1]
    wanted = request.eval_tokens // longest  # windows of the longest length
    chunks: list[tuple[int, np.ndarray]] = []  # with their places
    for document in request.documents:
        size = int(request.tokens.sizes[document])
        in_document = (size - 1) // longest
        count = min(wanted, in_document)
        if count > 0:
            chunk = request.tokens.read(document, 0, count * longest + 1)
            chunks.append((request.place(document), chunk))
            wanted -= count
    if not chunks:
        size = max(int(request.tokens.sizes[document]) for document in request.documents)
        raise UserError(
            f"within_document: no document of the {request.part} part has {longest + 1} tokens, the"
            f" longest has {size}, and eval_tokens is {request.eval_tokens}"
            f" - give lengths up to {max(size - 1, 1)} and as many tokens"
        )
    by_length = []
    for length in request.ordered_lengths:
        ids: list[np.ndarray] = []
        starts: list[int] = []
        stretches: list[int] = []
        for number, (place, chunk) in enumerate(chunks):
            windows = _cut(chunk, length, length, place)
            ids += windows.ids
            starts += windows.starts
            stretches += [number] * len(windows.ids)
        windows = Windows(length, ids, [0] * len(ids), stretches=stretches, starts=starts)
        by_length.append(windows)
    return by_length


def task(request: Request) -> list[Windows]:
    """The largest problems of a task that fit, each in a window: answers alone are scored."""
    text = request.tokens
    if not isinstance(text, TaskText):
        raise UserError(
            f"--protocol task: {text.prefix} is no task - give data_path=task:NAME, or another"
            " protocol"
        )
    by_length = []
    for length in request.ordered_lengths:
        ids, marks = text.windows(request.part, length, request.windows).swapaxes(0, 1)
        answers = [np.flatnonzero(of_window[1:]) for of_window in marks]
        about = {"task_args": text.changed_options} if text.changed_options else {}
        stretches = range(len(ids))
        by_length.append(Windows(length, list(ids), (), stretches, about=about, answers=answers))
    return by_length


def longppl(request: Request) -> list[Windows]:
    """Cut the region as `equal_tokens` does, and count the key tokens of each window alone."""
    rule = request.rule
    assert rule is not None
    about = {"judge": request.judge, **asdict(rule)}
    by_length = []
    for windows in equal_tokens(request):
        stretches = range(len(windows.ids))
        by_length.append(replace(windows, stretches=stretches, about=about, rule=rule))
    return by_length


OF_DOCUMENTS = ("paper", "within_document", TASK)
"""Protocols that need more of a text than its region."""


def usual_protocol(prefix: Path | str | None) -> str:
    """The protocol of a text or a task, where none is asked for."""
    return TASK if str(prefix).startswith(TASK_PREFIX) else "equal_tokens"


PROTOCOLS: dict[str, Callable[[Request], list[Windows]]] = {
    "equal_tokens": equal_tokens,
    "paper": paper,
    "tail": tail,
    "position": position,
    "sliding": sliding,
    "within_document": within_document,
    "longppl": longppl,
    TASK: task,
}


def _cut(text: np.ndarray, length: int, step: int, place: int) -> Windows:
    """Windows that begin `step` tokens apart, as far as whole ones go.

    text: [targets + 1]; place: of its first token in the corpus
    """
    starts = range(0, len(text) - length, step)
    ids = [text[start : start + length + 1] for start in starts]
    return Windows(length, ids, [0] * len(ids), starts=[place + start for start in starts])


def _check_within(option: str, value: int, most: int, what: str) -> None:
    if not 1 <= value <= most:
        raise UserError(
            f"{option} {value}: must be 1 to {most}, {what}"
            " - give another number, or longer lengths"
        )
