"""Perplexity of a model at several lengths, on the same text."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from megatron.data.samples import build_split, split_documents
from megatron.data.tokens import TokenFile
from megatron.errors import UserError

logger = logging.getLogger(__name__)

Windows = Sequence[np.ndarray]  # each [length + 1]: the inputs, and one token more as the last target
Advance = Callable[[int, int, int], None]  # length, windows done, windows in all


@dataclass(frozen=True)
class Measurement:
    """One length. loss is the mean over tokens in nats, perplexity its exp; both None where `reason` says why."""

    length: int
    windows: int
    tokens: int
    loss: float | None
    perplexity: float | None
    seconds: float
    tokens_per_second: float | None
    reason: str | None = None


def measure(
    model: nn.Module, windows_of: dict[int, Windows], *, batch_tokens: int = 16384, advance: Advance | None = None
) -> list[Measurement]:
    """All that `measurements` gives."""
    return list(measurements(model, windows_of, batch_tokens=batch_tokens, advance=advance))


def measurements(
    model: nn.Module, windows_of: dict[int, Windows], *, batch_tokens: int = 16384, advance: Advance | None = None
) -> Iterator[Measurement]:
    """Perplexity on the windows of each length, shortest first, each as soon as it is known.

    model: model(ids [batch, length], labels [batch, length]) -> losses [batch, length];
    windows_of: from `equal_tokens` or `paper`; batch_tokens: tokens per forward pass, one window at least
    A length that the model cannot compute gets a measurement with the reason, and the others go on.
    """
    training = model.training
    model.eval()
    try:
        for length in sorted(windows_of):
            yield _measured(model, length, windows_of[length], max(1, batch_tokens // length), advance or _nothing)
    finally:
        model.train(training)


def _nothing(length: int, done: int, windows: int) -> None:
    pass


def _measured(model: nn.Module, length: int, windows: Windows, batch: int, advance: Advance) -> Measurement:
    tokens, start = len(windows) * length, time.perf_counter()
    try:
        loss = _summed_loss(model, length, windows, batch, advance) / tokens
    except UserError as refusal:
        return Measurement(length, len(windows), tokens, None, None, time.perf_counter() - start, None, str(refusal))
    except torch.OutOfMemoryError:
        raise UserError(
            f"eval_batch_tokens: {batch} x {length} tokens do not fit into the device's memory;"
            + (" make it smaller" if batch > 1 else " leave this length out with --lengths, or use a larger device")
        ) from None
    seconds = time.perf_counter() - start
    if not math.isfinite(loss):
        return Measurement(length, len(windows), tokens, None, None, seconds, tokens / seconds, f"the loss is {loss}")
    perplexity = math.exp(loss) if loss < math.log(torch.finfo(torch.float64).max) else None
    reason = None if perplexity is not None else f"exp({loss:g}) is too large for a number"
    return Measurement(length, len(windows), tokens, loss, perplexity, seconds, tokens / seconds, reason)


@torch.inference_mode()
def _summed_loss(model: nn.Module, length: int, windows: Windows, batch: int, advance: Advance) -> float:
    device = next(model.parameters()).device
    total = torch.zeros((), dtype=torch.float64, device=device)
    advance(length, 0, len(windows))
    for first in range(0, len(windows), batch):
        ids = torch.from_numpy(np.stack(windows[first : first + batch]).astype(np.int64)).to(device)
        total += model(ids[:, :-1], ids[:, 1:]).sum(dtype=torch.float64)
        advance(length, min(first + batch, len(windows)), len(windows))
    return total.item()


def equal_tokens(
    tokens: TokenFile, lengths: Iterable[int], *, split: str, part: str = "valid", eval_tokens: int = 327680
) -> dict[int, Windows]:
    """Protocol equal_tokens: the first text of a part, the same for every length, cut into windows: {length: windows}.

    The documents of the part in file order, with the EOD that ends each; a multiple of the longest length is used, so
    lengths that divide it are scored on exactly the same targets.
    """
    lengths = checked_lengths(lengths)
    documents = split_documents(tokens, split, part)
    available = int(np.sum(tokens.sizes[documents.start : documents.stop], dtype=np.int64)) - 1
    longest = lengths[-1]
    if eval_tokens < longest:
        raise UserError(
            f"eval_tokens: {eval_tokens} is less than one window of the longest length, {longest};"
            f" write eval_tokens={longest} or more, or leave that length out"
        )
    if available < longest:
        raise UserError(
            f"eval_part: the {part} part of the corpus has {max(available, 0)} tokens to predict, and one window of"
            f" length {longest} needs {longest}; use a larger corpus, another split than {split}, or shorter lengths"
        )
    count = min(eval_tokens, available) // longest * longest
    if available < eval_tokens:
        logger.info(
            "eval_tokens: %d are wanted, the %s part has %d: %d are measured", eval_tokens, part, available, count
        )
    text = _text(tokens, documents, count + 1)
    return {
        length: [text[start : start + length + 1] for start in range(0, count - length + 1, length)]
        for length in lengths
    }


def _text(tokens: TokenFile, documents: range, count: int) -> np.ndarray:
    """The first `count` tokens of some documents: [count]."""
    pieces = []
    for document in documents:
        pieces.append(tokens.read(document, 0, min(count, int(tokens.sizes[document]))))
        count -= len(pieces[-1])
        if count == 0:
            break
    return np.concatenate(pieces)


def paper(
    tokens: TokenFile,
    lengths: Iterable[int],
    *,
    split: str,
    part: str = "valid",
    seed: int,
    windows: int = 320,
    start: int = 0,
) -> dict[int, Windows]:
    """Protocol paper, as KERPLE and MEP evaluated: the same number of windows at every length, in the order of the
    reference's dataset, so every length and every seed scores other text: {length: windows}.

    start: first window; the reference resumes at (iteration // eval_interval) * eval_iters, that is 16000 after 50000
    iterations, modulo the number of windows.
    """
    if windows < 1 or start < 0:
        raise UserError(f"--windows {windows} --start {start}: give at least 1 window and a start of at least 0")
    found: dict[int, Windows] = {}
    for length in checked_lengths(lengths):
        samples = build_split(tokens, split=split, part=part, length=length, seed=seed, num_samples=windows)
        found[length] = [samples[(start + i) % len(samples)] for i in range(windows)]
    return found


def checked_lengths(lengths: Iterable[int]) -> list[int]:
    """The lengths, each once, shortest first; UserError where one is no length."""
    found = sorted(set(lengths))
    wrong = [length for length in found if length < 1]
    if wrong or not found:
        raise UserError(f"eval_lengths: {wrong or 'none given'} - give one or more lengths of at least 1, as 512 1024")
    return found
