"""Perplexity of a model on the windows of a protocol: the only loop that measures."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megatron.errors import UserError
from megatron.parallel.context import Context
from megatron.parallel.grid import Grid
from megatron.protocols import BLOCK, Windows, windows_of
from megatron.results.row import Facts
from megatron.results.statistics import mean_of, perplexity_of

DIGITS = 6  # decimals of the losses of windows, blocks and positions
DIGITS_OF_SHARES = 4


class Refusal(UserError):
    """The reason why a model cannot compute a length."""


def losses(model: Any, ids: Sequence[int], lengths: Sequence[int]) -> dict[int, np.ndarray]:
    """Losses of the same targets at several lengths: {length: [targets] float64, in nats}.

    model: from `open_model` or `from_config`; ids [tokens]: a text of the model's tokens
    lengths: tokens of a window; each must divide the longest

    The text is cut into windows of each length, as in the protocol equal_tokens. Targets are the
    tokens 1, 2, … of the text, up to the last whole window of the longest length. Raises UserError
    for other lengths, for a text that is too short or has unknown tokens, and if the model cannot
    compute a length.
    """
    longest = max(lengths, default=0)
    text = np.asarray(ids)
    divides = longest > 0 and all(length > 0 and longest % length == 0 for length in lengths)
    if not divides or len(text) <= longest or not {*text.tolist()} <= {*range(model.vocab)}:
        raise UserError(
            f"lengths: {lengths}: each must divide the longest, and ids must have more tokens than"
            f" that, from 0 to {model.vocab - 1}, as the model's tokenizer returns"
        )
    targets = (len(text) - 1) // longest * longest
    result = {}
    for length in lengths:
        windows = windows_of([(0, text[: targets + 1])], length, length)
        result[length] = np.concatenate(losses_of_targets(model, windows), axis=1)[0]
    return result


def measured(
    model: Any,
    windows: Windows,
    *,
    keep: int = 0,
    **how: Any,
) -> Facts:
    """The numbers of one length, named as in megatron.results.row.

    keep: how many of the first targets have their losses in the result; 0: none
    how: as for `losses_of_targets`

    If a model cannot compute a length (a UserError), the result has the reason instead of a loss.
    Raises UserError if a batch doesn't fit into the device's memory.
    """
    started = time.perf_counter()
    losses: list[np.ndarray] = []
    reason = None
    try:
        losses = losses_of_targets(model, windows, **how)
    except Refusal as refusal:
        reason = str(refusal)
    row = numbers_of(windows, losses, reason, time.perf_counter() - started)
    if keep and row["loss"] is not None:
        single = np.concatenate(losses, axis=1)[0]
        row["token_losses"] = single[:keep].round(DIGITS).tolist()
    return row


def losses_of_targets(
    model: Any,
    windows: Windows,
    *,
    batch_tokens: int = 16384,
    grid: Grid | None = None,
    context: Context | None = None,
    advance: Callable[[int], object] = int,
) -> list[np.ndarray]:
    """Losses of targets, and for answers whether they are right: [windows] of [1 or 2, count]
    float64.

    model: model(ids [batch, length], labels [batch, length], counted=[batch, length] bool) ->
        losses [batch, length] of those targets; for answers of a task model(ids,
        counted=...) -> their logits [answers, vocab]
    batch_tokens: tokens per forward pass; at least one window is used
    grid: the processes that share the windows. Each one calls this and gets the same result.
    context: the processes that share each window, if they divide its length; None: windows are not
        shared
    advance: called with the number of windows that are finished since the last call

    Raises Refusal if the model cannot compute this, UserError if a batch doesn't fit into memory.
    """
    grid = grid or Grid()
    device = next(model.parameters()).device
    order = range(len(windows.ids))
    batch_size = max(1, batch_tokens // windows.length)
    batches = [order[first : first + batch_size] for first in order[::batch_size]]
    place, places = grid.rank, grid.ranks
    part = slice(None)  # of the targets, in this process
    if context is not None and windows.length % context.ranks == 0:
        place, places = grid.data_rank, grid.data_ranks
        part = context.part(windows.length)
        try:  # otherwise only the last rank would notice
            model.check_length(windows.length)
        except UserError as fault:
            raise Refusal(str(fault)) from None
    else:
        context = None

    losses: dict[int, np.ndarray] = {}
    refusal = None
    training = model.training
    begin_of_text = getattr(model, "begin_of_text", None)
    model.eval()
    model.context = context
    try:
        for batch in batches[place::places]:
            tokens = np.stack([windows.ids[number] for number in batch]).astype(np.int64)
            ids = torch.from_numpy(tokens).to(device)
            inputs, labels = ids[:, :-1].clone(), ids[:, 1:]
            if begin_of_text is not None:
                # Replaces the first token, which is never a target, so lengths stay the same.
                inputs[:, 0] = begin_of_text
            with torch.inference_mode():
                counted = torch.zeros_like(labels, dtype=torch.bool)
                for index, number in enumerate(batch):
                    counted[index, windows.scored[number]] = True
                if windows.answers:
                    logits = model(inputs, counted=counted).float()  # [answers, vocab]
                    counted, labels = counted[:, part], labels[:, part]
                    targets = labels[counted]
                    values = torch.zeros(len(batch), 2, labels.shape[1], device=device)
                    values[:, 0][counted] = F.cross_entropy(logits, targets, reduction="none")
                    values[:, 1][counted] = (logits.argmax(dim=-1) == targets).float()
                else:
                    values = model(inputs, labels, counted=counted)[:, None]
                if context is not None:
                    values = context.gather(values)
            rows = values.float().cpu().numpy()  # [batch, 1, length]; 2 with what is right
            for number, row in zip(batch, rows, strict=True):
                losses[number] = row[:, windows.scored[number]].astype(np.float64)
            advance(len(batch) * places)  # the other processes are about equally far
    except UserError as fault:
        if context is not None:  # the others are waiting inside an exchange
            raise
        refusal = str(fault)
    except torch.OutOfMemoryError:
        raise UserError(
            f"eval_batch_tokens: {batch_size} x {windows.length} tokens do not fit into the"
            " device's memory - lower it, or skip this length with --lengths"
        ) from None
    finally:
        model.train(training)
        model.context = None
    everywhere: dict[int, np.ndarray] = {}
    refusals = []
    for finished, reason in grid.gather((losses, refusal)):
        everywhere |= finished
        refusals += [reason] if reason else []
    if refusals:
        raise Refusal(refusals[0])
    return [everywhere[number] for number in order]


def numbers_of(
    windows: Windows, losses: Sequence[np.ndarray], reason: str | None, seconds: float
) -> Facts:
    """The numbers of one length.

    losses: from `losses_of_targets`; reason: why there are none, or None
    """
    counts = windows.counts
    tokens = int(counts.sum())
    names = ["loss", "perplexity", "loss_stderr", "window_losses"]
    if windows.answers:
        names += ["accuracy", "token_accuracy", "window_accuracies"]
    numbers: Facts = {
        "length": windows.length,
        "windows": len(windows.ids),
        "tokens": tokens,
        "region": windows.region,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "reason": reason,
        **dict.fromkeys(names),
    }
    if reason is not None:
        return numbers

    # Each window is summed separately, so that its sum doesn't depend on its batch or process.
    edges = windows.facts.get("position_edges", [0, None])
    sums = np.array([np.add.reduceat(window[0], edges[:-1]) for window in losses])
    loss = float(sums.sum()) / tokens
    if not math.isfinite(loss):
        return numbers | {"reason": f"the loss is {loss}"}
    perplexity = perplexity_of(loss)
    window_means = sums.sum(axis=1) / counts
    nats, *right = np.concatenate(losses, axis=1)
    numbers |= {
        "loss": loss,
        "perplexity": perplexity,
        "reason": None if perplexity else f"exp({loss:g}) is too large for a number",
        "loss_stderr": mean_of(window_means, counts).stderr,
    }
    if windows.answers:
        shares = np.array([window[1].mean() for window in losses])  # [windows]
        return numbers | {
            "accuracy": float((shares == 1).mean()),
            "token_accuracy": float(right[0].mean()),
            "window_accuracies": shares.round(DIGITS_OF_SHARES).tolist(),
        }
    starts = windows.block_starts
    block_counts = np.diff([*starts, tokens])
    block_means = np.add.reduceat(nats, starts) / block_counts
    numbers["window_losses"] = window_means.round(DIGITS).tolist()
    numbers["block_losses"] = block_means.round(DIGITS).tolist()
    if (counts != counts[0]).any():
        numbers["window_tokens"] = counts.tolist()
    if (block_counts != BLOCK).any():
        numbers["block_tokens"] = block_counts.tolist()
    if "position_edges" in windows.facts:
        position_means = sums.mean(axis=0) / np.diff(edges)
        numbers["position_losses"] = position_means.round(DIGITS).tolist()
    return numbers
