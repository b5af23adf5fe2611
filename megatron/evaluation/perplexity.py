"""Perplexity of a model on the windows of a protocol: the one loop that measures."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from megatron.errors import UserError
from megatron.model import GPT
from megatron.parallel.context import Context
from megatron.parallel.grid import Grid
from megatron.protocols import BLOCK, Windows, digits
from megatron.results.row import Facts
from megatron.results.statistics import mean_of, perplexity_of

DIGITS = 6  # of the losses of windows, blocks and positions
DIGITS_OF_SHARES = 4


class Refusal(Exception):
    """The reason why a model cannot compute a length."""


def measured(
    model: nn.Module,
    windows: Windows,
    *,
    keys: Sequence[np.ndarray] | str | None = None,
    keep: int = 0,
    **how: Any,
) -> Facts:
    """The numbers of one length, named as in megatron.results.row.

    keys: what `key_tokens` returns; None: the model says itself which targets are key tokens
    keep: losses of single targets in the result, the first so many; 0: none
    how: as for `losses_of_targets`

    A length that a model refuses with a UserError has that reason in place of a loss.
    Raises UserError if a batch does not fit into the device's memory.
    """
    started = time.perf_counter()
    losses = []
    try:
        losses = losses_of_targets(model, windows, **how)
        if windows.rule and keys is None:
            keys = key_tokens(model, windows, long=losses, **how)
    except Refusal as fault:
        keys = str(fault)
    rule = windows.rule
    if rule is None or keys is None or isinstance(keys, str):
        numbers = numbers_of(windows, keys or losses, time.perf_counter() - started)
        if keep and numbers["loss"] is not None:
            single = np.concatenate([of_window[0] for of_window in losses])
            numbers["token_losses"] = single[:keep].round(DIGITS).tolist()
        return numbers

    # Of all targets, the key tokens are kept. A block never crosses from one window to the next.
    all_losses = np.concatenate([of_window[0] for of_window in losses])
    places = {number: key for number, key in enumerate(keys) if len(key)}  # by window
    scored = replace(
        windows,
        ids=[windows.ids[number] for number in places],
        starts=[windows.starts[number] for number in places],
        scored=list(places.values()),
    )
    kept: list[np.ndarray] | str = [losses[number][:, places[number]] for number in places]
    loss = float(all_losses.mean())
    if not math.isfinite(loss):
        kept = f"the loss over all targets is {loss}"
    elif not places:
        kept = (
            f"no key token: no target has a loss below {-rule.beta:g} (--beta) that rises by more"
            f" than --alpha {rule.alpha:g} when it sees --trunc-len {rule.trunc_len} tokens alone"
            " - give a lower --alpha, and say so, a lower --beta or another --judge"
        )
        if rule.trunc_len >= windows.length:
            kept = (
                f"no key token: no context is longer than --trunc-len {rule.trunc_len}"
                " - give a shorter one, or a longer length"
            )
    facts = numbers_of(scored, kept, time.perf_counter() - started)
    facts["windows"] = len(windows.ids)
    facts["all_tokens"] = len(all_losses)
    facts["all_loss"] = loss if math.isfinite(loss) else None
    facts["all_perplexity"] = perplexity_of(loss)
    if places:
        in_region = [number * windows.length + of_window for number, of_window in places.items()]
        facts["key_text"] = digits(in_region)
        facts["window_tokens"] = scored.counts.tolist()
    return facts


def key_tokens(
    judge: nn.Module,
    windows: Windows,
    *,
    long: Sequence[np.ndarray] | None = None,
    **how: Any,
) -> list[np.ndarray] | str:
    """Positions of the key tokens of `windows.rule`: [windows] of [keys], or why there are none.

    long: the judge's losses of all targets, if they are known; how: as for `losses_of_targets`
    """
    rule = windows.rule
    assert rule is not None
    try:
        long = long or losses_of_targets(judge, windows, **how)
        short = [losses_of_targets(judge, pieces, **how) for pieces in rule.short_windows(windows)]
    except Refusal as fault:
        return f"the judge: {fault}"
    keys = []
    for number, of_window in enumerate(long):
        pieces = [of_start[number][0] for of_start in short]
        keys.append(rule.places(of_window[0], pieces))
    return keys


def losses_of_targets(
    model: nn.Module,
    windows: Windows,
    *,
    batch_tokens: int = 16384,
    grid: Grid | None = None,
    context: Context | None = None,
    advance: Callable[[int], object] = int,
) -> list[np.ndarray]:
    """Losses of targets, and of answers which are right: [windows] of [1 or 2, count] float64.

    model: model(ids [batch, length], labels [batch, length]) -> losses [batch, length], and without
        labels, for answers of a task, logits [batch, length, vocab]
    batch_tokens: tokens of a forward pass; one window at least
    grid: the processes that share the windows. Each of them calls this and gets the same result.
    context: the processes that share each window, where they divide its length; None: no window is
        shared
    advance: called with the number of windows that are finished since the last call

    Raises Refusal for what the model refuses, UserError if a batch does not fit into memory.
    """
    grid = grid or Grid()
    device = next(model.parameters()).device
    order = range(len(windows.ids))
    batch_size = max(1, batch_tokens // windows.length)
    batches = [order[first : first + batch_size] for first in order[::batch_size]]
    place, places = grid.rank, grid.ranks
    own_targets = slice(None)
    if context is not None and windows.length % context.ranks == 0:
        place, places = grid.data_rank, grid.data_ranks
        own_targets = context.part(windows.length)
    else:
        context = None
    if context is not None and isinstance(model, GPT):
        try:  # else the last rank alone would find out
            model.check_length(windows.length)
        except UserError as fault:
            raise Refusal(str(fault)) from None

    own: dict[int, np.ndarray] = {}
    refusal = None
    training = model.training
    model.eval()
    try:
        if isinstance(model, GPT):
            model.context = context
        for batch in batches[place::places]:
            tokens = np.stack([windows.ids[number] for number in batch]).astype(np.int64)
            ids = torch.from_numpy(tokens).to(device)
            inputs, labels = ids[:, :-1], ids[:, 1:]
            if isinstance(model, GPT) and model.begin_of_text is not None:
                # In the place of the first token, which is never a target: lengths stay.
                first = torch.full_like(inputs[:, :1], model.begin_of_text)
                inputs = torch.cat([first, inputs[:, 1:]], dim=1)
            with torch.inference_mode():
                if windows.answers:
                    logits = model(inputs).float()
                    labels = labels[:, own_targets]
                    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
                    right = logits.argmax(dim=-1) == labels
                    found = torch.stack([losses, right], dim=1)
                else:
                    found = model(inputs, labels)[:, None]
                if context is not None:
                    found = context.gather(found)
            rows = found.float().cpu().numpy()  # [batch, 1, length]; 2 with what is right
            for number, row in zip(batch, rows, strict=True):
                own[number] = row[:, windows.scored[number]].astype(np.float64)
            advance(len(batch) * places)  # the other processes are about as far as this one
    except UserError as fault:
        if context is not None:  # the others are inside an exchange
            raise
        refusal = str(fault)
    except torch.OutOfMemoryError:
        raise UserError(
            f"eval_batch_tokens: {batch_size} x {windows.length} tokens do not fit into the"
            " device's memory - make it smaller, or leave this length out with --lengths"
        ) from None
    finally:
        model.train(training)
        if isinstance(model, GPT):
            model.context = None
    gathered = grid.gather((own, refusal))
    refusal = next((reason for _, reason in gathered if reason is not None), None)
    everywhere: dict[int, np.ndarray] = {}
    for finished, _ in gathered:
        everywhere |= finished
    if refusal is not None:
        raise Refusal(refusal)
    return [everywhere[number] for number in order]


def numbers_of(windows: Windows, found: Sequence[np.ndarray] | str, seconds: float) -> Facts:
    """The numbers of one length.

    found: what `losses_of_targets` returns, or the reason why there is nothing
    """
    counts = windows.counts
    tokens = int(counts.sum())
    numbers: Facts = {
        "length": windows.length,
        "windows": len(windows.ids),
        "tokens": tokens,
        "region": windows.region,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "reason": found if isinstance(found, str) else None,
        **dict.fromkeys(("loss", "perplexity", "loss_stderr", "window_losses")),
    }
    if windows.answers:
        numbers |= dict.fromkeys(("accuracy", "token_accuracy", "window_accuracies"))
    if isinstance(found, str):
        return numbers

    # Each window is summed by itself, so that neither its batch nor its process changes its sum.
    targets = [of_window[0] for of_window in found]  # [windows] of [count]
    edges = windows.edges[:-1] or (0,)
    sums = np.array([np.add.reduceat(window, edges) for window in targets])  # [windows, buckets]
    loss = float(sums.sum()) / tokens
    if not math.isfinite(loss):
        return numbers | {"reason": f"the loss is {loss}"}
    perplexity = perplexity_of(loss)
    window_means = sums.sum(axis=1) / counts
    starts = windows.block_starts
    block_counts = np.diff([*starts, tokens])
    block_means = np.add.reduceat(np.concatenate(targets), starts) / block_counts
    numbers |= {
        "loss": loss,
        "perplexity": perplexity,
        "reason": None if perplexity else f"exp({loss:g}) is too large for a number",
        "loss_stderr": mean_of(window_means, counts).stderr,
    }
    if windows.answers:
        right = [of_window[1] for of_window in found]
        shares = np.array([answers.mean() for answers in right])  # [windows]
        return numbers | {
            "accuracy": float((shares == 1).mean()),
            "token_accuracy": float(np.concatenate(right).mean()),
            "window_accuracies": shares.round(DIGITS_OF_SHARES).tolist(),
        }
    numbers |= {
        "window_losses": window_means.round(DIGITS).tolist(),
        "block_losses": block_means.round(DIGITS).tolist(),
    }
    if (counts != counts[0]).any():
        numbers["window_tokens"] = counts.tolist()
    if (block_counts != BLOCK).any():
        numbers["block_tokens"] = block_counts.tolist()
    if windows.edges:
        position_means = sums.mean(axis=0) / np.diff(windows.edges)
        numbers["position_edges"] = list(windows.edges)
        numbers["position_losses"] = position_means.round(DIGITS).tolist()
    return numbers
