"""Perplexity of a model on the windows of a protocol: the one loop that measures."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import nn

from megatron.errors import UserError
from megatron.evaluation.blocks import Blocks, blocks_of
from megatron.evaluation.protocols import Windows
from megatron.parallel.grid import Grid
from megatron.results.row import BLOCK
from megatron.results.statistics import mean_of, perplexity_of

Advance = Callable[[int, int, int], None]  # length, finished windows, all windows
DIGITS = 6  # of the losses of windows, blocks and positions
OPTIONAL = ("window_tokens", "block_losses", "block_tokens", "position_edges", "position_losses")


class WindowSums(NamedTuple):
    """Summed losses of one window in nats, in float64.

    buckets: [buckets], between neighbouring edges; one sum of all scored targets without edges
    parts: [parts], of the parts of blocks that the window holds
    """

    buckets: list[float]
    parts: list[float]


Sums = dict[int, WindowSums]  # by the number of the window


class Journal(Protocol):
    """Where finished windows are kept until their length is done."""

    def read(self) -> Sums: ...
    def add(self, sums: Sums) -> None: ...


@dataclass(frozen=True)
class Measurement:
    """The numbers of one length; megatron.results.row describes each.

    loss and perplexity are None where `reason` says why. seconds and tokens_per_second are of this
    call, without the windows that an earlier one had finished.
    """

    length: int
    windows: int
    tokens: int
    loss: float | None
    perplexity: float | None
    seconds: float
    tokens_per_second: float | None
    reason: str | None = None
    loss_stderr: float | None = None
    window_losses: list[float] | None = None
    window_tokens: list[int] | None = None
    block_losses: list[float] | None = None
    block_tokens: list[int] | None = None
    position_edges: list[int] | None = None
    position_losses: list[float] | None = None

    def row(self) -> dict[str, Any]:
        """The fields, without those that this measurement does not have."""
        fields = asdict(self)
        absent = [key for key in OPTIONAL if fields[key] is None]
        return {key: value for key, value in fields.items() if key not in absent}


def measure(
    model: nn.Module,
    windows: Iterable[Windows],
    *,
    batch_tokens: int = 16384,
    advance: Advance | None = None,
) -> list[Measurement]:
    """The measurement of each length, shortest first."""
    by_length = sorted(windows, key=lambda one: one.length)
    return [measured(model, one, batch_tokens=batch_tokens, advance=advance) for one in by_length]


def measured(
    model: nn.Module,
    windows: Windows,
    *,
    batch_tokens: int = 16384,
    grid: Grid | None = None,
    journal: Journal | None = None,
    advance: Advance | None = None,
) -> Measurement:
    """Perplexity on the windows of one length.

    model: model(ids [batch, length], labels [batch, length]) -> losses [batch, length]
    batch_tokens: tokens of a forward pass; one window at least
    grid: the processes that share the windows. Each of them calls this and gets the same result.
    journal: the windows that an earlier call finished; new ones are added
    advance: called as windows are finished

    A length that the model refuses with a UserError gets a measurement with that reason.
    UserError where a batch does not fit into the device's memory.
    """
    grid = grid or Grid()
    advance = advance or _ignored
    blocks = blocks_of(windows)
    count = len(windows.ids)
    batch_size = max(1, batch_tokens // windows.length)
    started = time.perf_counter()
    # Every process reads before any goes on, so that all agree on what remains.
    earlier = _joined(grid.gather(journal.read() if journal else {}))
    remaining = [index for index in range(count) if index not in earlier]
    batches = [
        remaining[first : first + batch_size] for first in range(0, len(remaining), batch_size)
    ]
    own_batches = batches[grid.rank :: grid.ranks]

    own: Sums = {}
    refusal = None
    advance(windows.length, len(earlier), count)
    try:
        for finished in _evaluated(model, windows, blocks, own_batches):
            own |= finished
            if journal:
                journal.add(finished)
            # The other processes are about as far as this one.
            everywhere = len(earlier) + len(own) * grid.ranks
            advance(windows.length, min(everywhere, count), count)
    except UserError as fault:
        refusal = str(fault)
    except torch.OutOfMemoryError:
        raise UserError(_too_large(batch_size, windows.length)) from None

    of_ranks = grid.gather((own, refusal))
    refusals = [reason for _, reason in of_ranks if reason]
    seconds = time.perf_counter() - started
    tokens = int(windows.counts[remaining].sum())
    result = Measurement(
        windows.length,
        windows=count,
        tokens=int(windows.counts.sum()),
        loss=None,
        perplexity=None,
        seconds=seconds,
        tokens_per_second=tokens / seconds if remaining else None,
    )
    if refusals:
        return replace(result, reason=refusals[0])
    sums = earlier | _joined(sums for sums, _ in of_ranks)
    return _with_losses(result, windows, blocks, [sums[index] for index in range(count)])


def _ignored(length: int, finished: int, count: int) -> None:
    pass


def _joined(parts: Iterable[Sums]) -> Sums:
    joined: Sums = {}
    for part in parts:
        joined |= part
    return joined


def _too_large(batch_size: int, length: int) -> str:
    if batch_size > 1:
        remedy = "make it smaller"
    else:
        remedy = "leave this length out with --lengths, or use a larger device"
    return (
        f"eval_batch_tokens: {batch_size} x {length} tokens do not fit into the device's memory"
        f" - {remedy}"
    )


def _evaluated(
    model: nn.Module, windows: Windows, blocks: Blocks, batches: Iterable[list[int]]
) -> Iterator[Sums]:
    """The sums of the windows of each batch, as soon as that is computed.

    Each window is summed by itself, so that neither its batch nor its process changes its sums.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        for batch in batches:
            tokens = np.stack([windows.ids[index] for index in batch]).astype(np.int64)
            ids = torch.from_numpy(tokens).to(device)
            with torch.inference_mode():
                losses = model(ids[:, :-1], ids[:, 1:])
            rows = losses.cpu().double().numpy()  # [batch, length]
            sums: Sums = {}
            for index, row in zip(batch, rows, strict=True):
                buckets = windows.edges[:-1] or (windows.first_scored[index],)
                sums[index] = WindowSums(
                    buckets=np.add.reduceat(row, buckets).tolist(),
                    parts=np.add.reduceat(row, blocks.starts[index]).tolist(),
                )
            yield sums
    finally:
        model.train(training)


def _with_losses(
    result: Measurement, windows: Windows, blocks: Blocks, sums: Sequence[WindowSums]
) -> Measurement:
    """The measurement with what the sums of all windows come to: losses, or the reason for none."""
    counts = windows.counts
    buckets = np.array([window.buckets for window in sums])  # [windows, buckets]
    loss = float(buckets.sum()) / result.tokens
    if not math.isfinite(loss):
        return replace(result, reason=f"the loss is {loss}")
    perplexity = perplexity_of(loss)
    reason = None
    if perplexity is None:
        reason = f"exp({loss:g}) is too large for a number"
    window_means = buckets.sum(axis=1) / counts
    block_means = blocks.means(window.parts for window in sums)
    with_losses = replace(
        result,
        loss=loss,
        perplexity=perplexity,
        reason=reason,
        loss_stderr=mean_of(window_means, counts).stderr,
        window_losses=_rounded(window_means),
        window_tokens=_unless_all_are(counts.tolist(), int(counts[0])),
        block_losses=_rounded(block_means),
        block_tokens=_unless_all_are(blocks.tokens, BLOCK),
    )
    if not windows.edges:
        return with_losses
    position_means = buckets.mean(axis=0) / np.diff(windows.edges)
    return replace(
        with_losses,
        position_edges=list(windows.edges),
        position_losses=_rounded(position_means),
    )


def _rounded(losses: np.ndarray) -> list[float]:
    return losses.round(DIGITS).tolist()


def _unless_all_are(counts: Sequence[int], usual: int) -> list[int] | None:
    """The counts, or None where each is the usual one: then a row need not list them."""
    return None if all(count == usual for count in counts) else list(counts)
