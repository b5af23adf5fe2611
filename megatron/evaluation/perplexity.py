"""Perplexity of a model on the windows of a protocol: the one loop that measures."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from megatron.errors import UserError
from megatron.evaluation.protocols import Windows
from megatron.parallel.grid import Grid
from megatron.results.statistics import mean_of, perplexity_of

Advance = Callable[[int, int, int], None]  # length, windows done, windows in all
DIGITS = 6  # of the losses of windows and positions
Sums = dict[int, list[float]]  # by window: the summed loss of each of its buckets


class Journal(Protocol):
    """Where finished windows are kept until their length is done."""

    def read(self) -> Sums: ...
    def add(self, sums: Sums) -> None: ...


@dataclass(frozen=True)
class Measurement:
    """One length. loss is the mean over scored tokens in nats, perplexity its exp; both None where `reason` says why.

    loss_stderr: its standard error from the windows, neighbours being alike (statistics.mean_of);
    seconds, tokens_per_second: of this call, without windows that an earlier one had finished;
    window_losses [windows]: the mean of each, and window_tokens what it is a mean of, where that differs;
    position_losses [n]: the mean of the positions from position_edges[i] on, before position_edges[i + 1]
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
    position_edges: list[int] | None = None
    position_losses: list[float] | None = None

    def row(self) -> dict[str, Any]:
        """The fields, without those that this protocol does not have."""
        optional = ("window_tokens", "position_edges", "position_losses")
        found = asdict(self)
        return {
            key: value for key, value in found.items() if value is not None or key not in optional
        }


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

    model: model(ids [batch, length], labels [batch, length]) -> losses [batch, length];
    batch_tokens: tokens per forward pass, one window at least; grid: the processes that share the windows, each of
    which calls this and gets the same; journal: what an earlier call had finished, and where this one notes its windows
    A length that the model cannot compute gets a measurement with the reason.
    """
    grid, batch, count = grid or Grid(), max(1, batch_tokens // windows.length), len(windows.ids)
    started = time.perf_counter()
    # Every process reads before any goes on, so that all agree on what is left.
    known = _joined(grid.gather(journal.read() if journal else {}))
    left = [index for index in range(count) if index not in known]
    batches = [left[first : first + batch] for first in range(0, len(left), batch)]
    found: Sums = {}
    refusal = None
    tell = advance or _nothing
    tell(windows.length, len(known), count)
    try:
        for sums in _evaluated(model, windows, batches[grid.rank :: grid.ranks]):
            found |= sums
            if journal:
                journal.add(sums)
            tell(windows.length, min(len(known) + len(found) * grid.ranks, count), count)
    except UserError as fault:
        refusal = str(fault)
    except torch.OutOfMemoryError:
        cure = (
            "make it smaller"
            if batch > 1
            else "leave this length out with --lengths, or use a larger device"
        )
        size = f"{batch} x {windows.length} tokens do not fit into the device's memory"
        raise UserError(f"eval_batch_tokens: {size}; {cure}") from None
    everyone = grid.gather((found, refusal))
    refusal = next((reason for _, reason in everyone if reason), None)
    seconds = time.perf_counter() - started
    speed = int(windows.counts[left].sum()) / seconds if left else None
    sums = None if refusal else known | _joined(found for found, _ in everyone)
    return _measurement(windows, sums, refusal, seconds, speed)


def _nothing(length: int, done: int, windows: int) -> None:
    pass


def _joined(parts: Iterable[Sums]) -> Sums:
    return {index: sums for part in parts for index, sums in part.items()}


def _evaluated(model: nn.Module, windows: Windows, batches: Iterable[list[int]]) -> Iterator[Sums]:
    """The summed losses of the windows of each batch, added up in float64 window by window, so that neither the batch
    nor the process that a window is in changes them."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    try:
        for batch in batches:
            ids = torch.from_numpy(
                np.stack([windows.ids[index] for index in batch]).astype(np.int64)
            ).to(device)
            with torch.inference_mode():
                losses = model(ids[:, :-1], ids[:, 1:]).cpu().double().numpy()
            yield {
                index: np.add.reduceat(
                    row, windows.edges[:-1] or (windows.first_scored[index],)
                ).tolist()
                for index, row in zip(batch, losses, strict=True)
            }
    finally:
        model.train(training)


def _measurement(
    windows: Windows, sums: Sums | None, refusal: str | None, seconds: float, speed: float | None
) -> Measurement:
    """What the sums of every window come to; `sums` is None where the model refused this length."""
    counts = windows.counts
    tokens = int(counts.sum())
    result = Measurement(windows.length, len(counts), tokens, None, None, seconds, speed, refusal)
    if sums is None:
        return result
    table = np.array([sums[index] for index in range(len(counts))])  # [windows, buckets]
    loss = float(table.sum()) / tokens
    if not math.isfinite(loss):
        return replace(result, reason=f"the loss is {loss}")
    means = table.sum(axis=1) / counts
    perplexity = perplexity_of(loss)
    return replace(
        result,
        loss=loss,
        perplexity=perplexity,
        reason=None if perplexity is not None else f"exp({loss:g}) is too large for a number",
        loss_stderr=mean_of(means, counts).stderr,
        window_losses=means.round(DIGITS).tolist(),
        window_tokens=counts.tolist() if len(set(counts.tolist())) > 1 else None,
        position_edges=list(windows.edges) or None,
        position_losses=(table.mean(axis=0) / np.diff(windows.edges)).round(DIGITS).tolist()
        if windows.edges
        else None,
    )
