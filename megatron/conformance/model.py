"""Checks of the encoding in a small model: text in pieces, backends, long texts."""

from dataclasses import replace

import torch
from torch import Tensor

from megatron.conformance.effects import FAR, longest_length
from megatron.conformance.finding import (
    Finding,
    at_most,
    fails,
    holds,
    largest_difference,
    largest_difference_in,
    not_applicable,
)
from megatron.conformance.subject import Subject, random_ids
from megatron.model.cache import Cache
from megatron.model.gpt import GPT


@torch.no_grad()
def later_tokens_change_nothing(subject: Subject) -> Finding:
    """Later tokens do not change the logits of earlier ones."""
    gpt = subject.gpt()
    most = 1024 if gpt.position.has("on_scores") else 4096  # content: memory grows with length²
    ids = random_ids(min(longest_length(gpt.position), most))
    first = min(512, ids.shape[1] // 2)
    whole, alone = gpt(ids)[:, :first], gpt(ids[:, :first])
    return at_most(1e-4, largest_difference(whole, alone))


@torch.no_grad()
def cached_is_full(subject: Subject) -> Finding:
    """Decoding with a cache gives the logits of the full pass.

    Also where a text leaves the batch, and where keys that a window hides are forgotten.
    """
    gpt = subject.gpt()
    ids = random_ids(3 * subject.train_length // 4, batch=2)
    whole = gpt(ids)
    differences = [largest_difference(_in_pieces(gpt, ids, piece), whole) for piece in (1, 7)]
    differences.append(largest_difference(_last_text_alone(gpt, ids), whole[1:]))
    gpt.use_attention(replace(gpt.attention, window=max(1, subject.train_length // 8)))
    rolled = _in_pieces(gpt, ids, 3, rolling=True)
    differences.append(largest_difference(rolled, gpt(ids)))
    return at_most(1e-4, max(differences))


def _in_pieces(gpt: GPT, ids: Tensor, piece: int, *, rolling: bool = False) -> Tensor:
    """Logits of a text that is read piece by piece: [batch, length, vocab]."""
    cache = Cache(rolling=rolling)
    return torch.cat([gpt(part, cache=cache) for part in ids.split(piece, dim=1)], dim=1)


def _last_text_alone(gpt: GPT, ids: Tensor) -> Tensor:
    """Logits of the second text, which goes on alone after the first half."""
    cache, half = Cache(), ids.shape[1] // 2
    begin = gpt(ids[:, :half], cache=cache)
    cache.select(torch.tensor([1]))
    return torch.cat([begin[1:], gpt(ids[1:, half:], cache=cache)], dim=1)


def backends_agree(subject: Subject) -> Finding:
    """eager and sdpa give the same loss and gradients."""
    position = subject.position()
    if position.has("on_scores"):
        return not_applicable("scores that look at content exist in eager only")
    ids = random_ids(min(longest_length(position), 300) + 1, batch=2)
    eager = _loss_and_gradients(subject.gpt("eager"), ids)
    sdpa = _loss_and_gradients(subject.gpt("sdpa"), ids)
    return at_most(1e-4, largest_difference_in(eager, sdpa))


def _loss_and_gradients(gpt: GPT, ids: Tensor) -> dict[str, Tensor]:
    losses = gpt(ids[:, :-1], labels=ids[:, 1:])
    losses.mean().backward()
    results = {"loss": losses.detach()}
    for name, parameter in gpt.named_parameters():
        if parameter.grad is not None:
            results[name] = parameter.grad
    return results


@torch.no_grad()
def finite_losses(subject: Subject) -> Finding:
    """Losses are finite at 4096 tokens, and at 16384 in bfloat16."""
    # Both have the same range, and tables are float32 in either: what overflows does so in both.
    content = subject.position().has("on_scores")
    length = 2048 if content else FAR
    for dtype, tokens in ((torch.float32, length // 4), (torch.bfloat16, length)):
        ids = random_ids(tokens + 1)
        gpt = subject.gpt(layers=1).to(dtype)
        if not gpt(ids[:, :-1], labels=ids[:, 1:]).isfinite().all():
            return fails(f"not finite in {dtype}")
    if content:
        return holds(f"at {length}: content needs memory for length²")
    return holds()
