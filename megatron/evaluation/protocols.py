"""Protocols of evaluation: which windows of which text, and which of their targets count (docs/evaluation.md)."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from megatron.data.samples import build_split, split_documents
from megatron.data.tokens import TokenFile
from megatron.errors import UserError

logger = logging.getLogger(__name__)

BUCKET = 64  # positions that share one mean in the protocol position; the first 64 are cut finer


@dataclass(frozen=True)
class Windows:
    """Windows of one length, in the order of the text.

    ids: of each window [length + 1] tokens, mostly views: the inputs, and one token more as the last target;
    first_scored: of each window the position from which on its targets count;
    edges: positions [n + 1] between which a mean of its own is wanted; about: the protocol's own numbers, for the row
    """

    length: int
    ids: Sequence[np.ndarray]
    first_scored: Sequence[int]
    edges: tuple[int, ...] = ()
    about: dict[str, int] = field(default_factory=dict)

    @property
    def counts(self) -> np.ndarray:
        """Targets that count, by window: [windows] int64."""
        return self.length - np.asarray(self.first_scored, dtype=np.int64)

    @cached_property
    def text(self) -> str:
        """16 hex digits that name the scored targets: losses of two models are pairs only where these are the same."""
        digest = hashlib.sha256()
        for ids, first in zip(self.ids, self.first_scored, strict=True):
            digest.update(ids[1 + first :].astype("<i8").tobytes())
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class Request:
    """What is to be measured: a part of some documents at several lengths, and what single protocols ask beside that.

    eval_tokens: size of the text region; seed, windows, start: paper; tail: tokens of a block; stride: None for half
    of each length
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

    @cached_property
    def checked_lengths(self) -> list[int]:
        """The lengths, each once, shortest first; UserError where one is no length."""
        found = sorted(set(self.lengths))
        wrong = [length for length in found if length < 1]
        if wrong or not found:
            raise UserError(
                f"eval_lengths: {wrong or 'none given'} - give one or more lengths of at least 1, as 512 1024"
            )
        return found

    @cached_property
    def documents(self) -> range:
        return split_documents(self.tokens, self.split, self.part)

    @property
    def available(self) -> int:
        """Targets in the part."""
        return (
            int(
                np.sum(
                    self.tokens.sizes[self.documents.start : self.documents.stop], dtype=np.int64
                )
            )
            - 1
        )

    @cached_property
    def region(self) -> np.ndarray:
        """The first text of the part, the same for every length: [a multiple of the longest length, and one more].

        Documents in file order, with the EOD that ends each.
        """
        available, longest = self.available, self.checked_lengths[-1]
        if self.eval_tokens < longest:
            raise UserError(
                f"eval_tokens: {self.eval_tokens} is less than one window of the longest length, {longest};"
                f" write eval_tokens={longest} or more, or leave that length out"
            )
        if available < longest:
            raise UserError(
                f"eval_part: the {self.part} part of the corpus has {max(available, 0)} tokens to predict, and one"
                f" window of length {longest} needs {longest}; use a larger corpus, another split than {self.split},"
                " or shorter lengths"
            )
        count = min(self.eval_tokens, available) // longest * longest
        if available < self.eval_tokens:
            logger.info(
                "eval_tokens: %d are wanted, the %s part has %d: %d are measured",
                *(self.eval_tokens, self.part, available, count),
            )
        return first_tokens(self.tokens, self.documents, count + 1)


def first_tokens(tokens: TokenFile, documents: range, count: int) -> np.ndarray:
    """The first `count` tokens of some documents, or all that they have."""
    pieces = [np.empty(0, dtype=tokens.dtype)]
    for document in documents:
        if count <= 0:
            break
        pieces.append(tokens.read(document, 0, min(count, int(tokens.sizes[document]))))
        count -= len(pieces[-1])
    return np.concatenate(pieces)


def equal_tokens(request: Request) -> list[Windows]:
    """The region cut into windows: lengths that divide the longest are scored on exactly the same targets."""
    return [_cut(request.region, length) for length in request.checked_lengths]


def _cut(text: np.ndarray, length: int) -> Windows:
    starts = range(0, len(text) - length, length)
    return Windows(
        length, [text[start : start + length + 1] for start in starts], [0] * len(starts)
    )


def paper(request: Request) -> list[Windows]:
    """As KERPLE and MEP evaluated: the same number of windows at every length, across documents, in the order of the
    reference's dataset, so that every length and every seed scores other text.

    start: first window; the reference resumes at (iteration // eval_interval) * eval_iters, that is 16000 after 50000
    iterations, modulo the number of windows.
    """
    count, start = request.windows, request.start
    if count < 1 or start < 0:
        raise UserError(
            f"--windows {count} --start {start}: give at least 1 window and a start of at least 0"
        )
    found = []
    for length in request.checked_lengths:
        samples = build_split(
            request.tokens, request.split, request.part, length, request.seed, count
        )
        ids = [samples[(start + number) % len(samples)] for number in range(count)]
        epochs = -(-count * length // max(request.available, 1))
        about = {"start": start} | ({"epochs": epochs} if epochs > 1 else {})
        found.append(Windows(length, ids, [0] * count, (), about))
    return found


def tail(request: Request) -> list[Windows]:
    """The same blocks of `tail` targets at every length, each at the end of its window: what more context gives.

    Blocks end at each quarter of the longest length, from the longest length on: there all have that much context.
    """
    size, text, longest = request.tail, request.region, request.checked_lengths[-1]
    if not 1 <= size <= request.checked_lengths[0]:
        raise UserError(
            f"--tail {size}: the scored end of a window has 1 to {request.checked_lengths[0]} tokens, the least length"
        )
    ends = range(longest, len(text), max(size, longest // 4))
    return [
        Windows(
            length,
            [text[end - length : end + 1] for end in ends],
            [length - size] * len(ends),
            (),
            {"tail": size},
        )
        for length in request.checked_lengths
    ]


def position(request: Request) -> list[Windows]:
    """Windows of the longest length alone; their losses are also kept by position."""
    longest = request.checked_lengths[-1]
    fine = [0, *(2**power for power in range(6))]
    edges = {*fine, *range(BUCKET, longest, BUCKET), *request.checked_lengths}
    cut = _cut(request.region, longest)
    return [
        Windows(
            longest,
            cut.ids,
            cut.first_scored,
            tuple(sorted(edge for edge in edges if edge <= longest)),
        )
    ]


def sliding(request: Request) -> list[Windows]:
    """Windows that move by `stride`; each scores its last `stride` targets, the first one all: every later target sees
    length - stride tokens or more."""
    found, text = [], request.region
    for length in request.checked_lengths:
        stride = request.stride if request.stride is not None else max(1, length // 2)
        if not 1 <= stride <= length:
            raise UserError(
                f"--stride {stride}: windows of length {length} must move by 1 to {length} tokens"
            )
        starts = range(0, len(text) - length, stride)
        ids = [text[start : start + length + 1] for start in starts]
        first_scored = [0, *[length - stride] * (len(starts) - 1)]
        found.append(Windows(length, ids, first_scored, (), {"stride": stride}))
    return found


def within_document(request: Request) -> list[Windows]:
    """No window crosses documents: those with a window of the longest length, each from its start as far as such
    windows go, cut by every length, until eval_tokens are reached."""
    longest, sizes = request.checked_lengths[-1], request.tokens.sizes
    chunks, left = [], request.eval_tokens // longest
    for document in request.documents:
        count = min(left, (int(sizes[document]) - 1) // longest)
        if count > 0:
            chunks.append(request.tokens.read(document, 0, count * longest + 1))
            left -= count
    if not chunks:
        size = max(int(sizes[document]) for document in request.documents)
        raise UserError(
            f"within_document: no document of the {request.part} part has {longest + 1} tokens, the longest has {size},"
            f" and eval_tokens is {request.eval_tokens}; give lengths up to {max(size - 1, 1)} and as many tokens"
        )
    found = []
    for length in request.checked_lengths:
        ids = [window for chunk in chunks for window in _cut(chunk, length).ids]
        found.append(Windows(length, ids, [0] * len(ids)))
    return found


PROTOCOLS: dict[str, Callable[[Request], list[Windows]]] = {
    "equal_tokens": equal_tokens,
    "paper": paper,
    "tail": tail,
    "position": position,
    "sliding": sliding,
    "within_document": within_document,
}
