"""Perplexity of a model on the windows of a protocol: the one loop that measures."""

import io
import logging
import math
import sys
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from megatron.errors import UserError
from megatron.evaluation.protocols import Windows
from megatron.parallel.grid import Grid
from megatron.results.row import BLOCK, Facts
from megatron.results.statistics import mean_of, perplexity_of

DIGITS = 6  # of the losses of windows, blocks and positions
LINE_EVERY = 30.0  # seconds between two lines of a log
LINE = "{desc}: {n_fmt} of {total_fmt}, about {remaining} left"

logger = logging.getLogger(__name__)


def measure(
    model: nn.Module, windows: Iterable[Windows], *, batch_tokens: int = 16384
) -> list[Facts]:
    """The measurement of each length, shortest first."""
    by_length = sorted(windows, key=lambda one: one.length)
    return [measured(model, one, batch_tokens=batch_tokens) for one in by_length]


def measured(
    model: nn.Module,
    windows: Windows,
    *,
    batch_tokens: int = 16384,
    grid: Grid | None = None,
    advance: Callable[[int], object] = int,
) -> Facts:
    """The numbers of one length, named as in megatron.results.row.

    model: model(ids [batch, length], labels [batch, length]) -> losses [batch, length]
    batch_tokens: tokens of a forward pass; one window at least
    grid: the processes that share the windows. Each of them calls this and gets the same result.
    advance: called with the number of windows that are finished since the last call

    A length that the model refuses with a UserError has that reason in place of a loss.
    Raises UserError if a batch does not fit into the device's memory.
    """
    grid = grid or Grid()
    started = time.perf_counter()
    losses = losses_by_window(model, windows, batch_tokens, grid, advance)
    seconds = time.perf_counter() - started
    counts = windows.counts
    tokens = int(counts.sum())
    numbers: Facts = {
        "length": windows.length,
        "windows": len(windows.ids),
        "tokens": tokens,
        "loss": None,
        "perplexity": None,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "reason": None,
        "loss_stderr": None,
        "window_losses": None,
    }
    if isinstance(losses, str):
        return numbers | {"reason": losses}

    # Each window is summed by itself, so that neither its batch nor its process changes its sum.
    edges = windows.edges[:-1] or (0,)
    sums = np.array([np.add.reduceat(window, edges) for window in losses])  # [windows, buckets]
    loss = float(sums.sum()) / tokens
    if not math.isfinite(loss):
        return numbers | {"reason": f"the loss is {loss}"}
    perplexity = perplexity_of(loss)
    window_means = sums.sum(axis=1) / counts
    numbers |= {
        "loss": loss,
        "perplexity": perplexity,
        "reason": None if perplexity else f"exp({loss:g}) is too large for a number",
        "loss_stderr": mean_of(window_means, counts).stderr,
        "window_losses": _rounded(window_means),
    }
    if (counts != counts[0]).any():
        numbers["window_tokens"] = counts.tolist()
    starts = windows.block_starts
    block_counts = np.diff([*starts, tokens])
    block_sums = np.add.reduceat(np.concatenate(losses), starts)
    numbers["block_losses"] = _rounded(block_sums / block_counts)
    if (block_counts != BLOCK).any():
        numbers["block_tokens"] = block_counts.tolist()
    if windows.edges:
        numbers["position_edges"] = list(windows.edges)
        numbers["position_losses"] = _rounded(sums.mean(axis=0) / np.diff(windows.edges))
    return numbers


def losses_by_window(
    model: nn.Module,
    windows: Windows,
    batch_tokens: int,
    grid: Grid,
    advance: Callable[[int], object],
) -> list[np.ndarray] | str:
    """The losses of the scored targets: [windows] of [count] float64; or why there are none."""
    device = next(model.parameters()).device
    numbers = range(len(windows.ids))
    batch_size = max(1, batch_tokens // windows.length)
    batches = [numbers[first : first + batch_size] for first in numbers[::batch_size]]
    own: dict[int, np.ndarray] = {}
    refusal = None
    training = model.training
    model.eval()
    try:
        for batch in batches[grid.rank :: grid.ranks]:
            tokens = np.stack([windows.ids[number] for number in batch]).astype(np.int64)
            ids = torch.from_numpy(tokens).to(device)
            with torch.inference_mode():
                losses = model(ids[:, :-1], ids[:, 1:])
            rows = losses.float().cpu().numpy()  # [batch, length]
            for number, row in zip(batch, rows, strict=True):
                own[number] = row[windows.first_scored[number] :]
            advance(len(batch) * grid.ranks)  # the other processes are about as far as this one
    except UserError as fault:
        refusal = str(fault)
    except torch.OutOfMemoryError:
        remedy = "make it smaller, or leave this length out with --lengths"
        raise UserError(
            f"eval_batch_tokens: {batch_size} x {windows.length} tokens do not fit into the"
            f" device's memory - {remedy}"
        ) from None
    finally:
        model.train(training)
    everywhere: dict[int, np.ndarray] = {}
    for finished, reason in grid.gather((own, refusal)):
        if reason is not None:
            return reason
        everywhere |= finished
    return [everywhere[number].astype(np.float64) for number in numbers]


def _rounded(losses: np.ndarray) -> list[float]:
    return losses.round(DIGITS).tolist()


def progress(name: str, total: int, *, shown: bool = True) -> tqdm:
    """How far one length is: a bar on a terminal, elsewhere a line of the log every half minute.

    shown: whether this process displays anything
    """
    if not shown or sys.stderr.isatty():
        return tqdm(total=total, desc=name, leave=False, disable=not shown)
    every = {"mininterval": LINE_EVERY, "miniters": 1, "delay": LINE_EVERY}
    return tqdm(total=total, desc=name, leave=False, file=_Log(), bar_format=LINE, **every)


class _Log(io.StringIO):
    """The log as a file to write on."""

    def write(self, text: str) -> int:
        if text.strip():
            logger.info(text.strip())
        return len(text)
