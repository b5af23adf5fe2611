"""Log-likelihoods of continuations, in batches that several processes share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.model import GPT
from megatron.parallel.grid import Grid

TOGETHER = 512  # targets whose logits exist at once
Advance = Callable[[int, int], None]  # finished, all


@dataclass(frozen=True)
class Reading:
    """How texts are read.

    length: tokens that the model sees at most; a longer context loses its beginning
    stride: of rolling windows, tokens that they move by; batch_tokens: of a forward pass at most
    """

    length: int
    stride: int
    batch_tokens: int = 16384


@dataclass(frozen=True)
class Asked:
    """Tokens of a text, of which the last `scored` ones are scored, each behind all before it."""

    tokens: Sequence[int]
    scored: int


@dataclass(frozen=True)
class Scored:
    """log_likelihood: in nats, of all scored tokens; greedy: whether each was the likeliest one."""

    log_likelihood: float
    greedy: bool


@torch.inference_mode()
def scored(
    model: GPT,
    asked: Sequence[Asked],
    *,
    batch_tokens: int,
    grid: Grid,
    advance: Advance = lambda finished, count: None,
) -> list[Scored]:
    """What is asked, in its order, on every process.

    batch_tokens: tokens of a forward pass at most, but one text at least
    Batches hold texts of similar lengths and do not depend on the number of processes. So neither
    does any number.
    """
    batches = _batches(asked, batch_tokens)
    mine: dict[int, Scored] = {}
    finished = 0
    for number, batch in enumerate(batches):
        finished += len(batch)
        if number % grid.ranks != grid.rank:
            continue
        mine |= dict(zip(batch, _of_batch(model, [asked[one] for one in batch]), strict=True))
        advance(finished, len(asked))
    everybody: dict[int, Scored] = {}
    for found in grid.gather(mine):
        everybody |= found
    return [everybody[number] for number in range(len(asked))]


def _batches(asked: Sequence[Asked], batch_tokens: int) -> list[list[int]]:
    """Numbers of what is computed together, the longest texts first: they show what fits."""
    batches: list[list[int]] = []
    longest = 0
    for number in sorted(range(len(asked)), key=lambda one: -len(asked[one].tokens)):
        if not batches or (len(batches[-1]) + 1) * longest > batch_tokens:
            batches.append([])
            longest = len(asked[number].tokens)
        batches[-1].append(number)
    return batches


def _of_batch(model: GPT, batch: Sequence[Asked]) -> list[Scored]:
    """Texts of one pass. What is behind the end of a shorter one changes nothing before it."""
    device = model.word_embeddings.weight.device
    longest = max(len(one.tokens) for one in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, one in enumerate(batch):
        ids[row, : len(one.tokens)] = torch.tensor(one.tokens)
    ids = ids.to(device)
    features = model.features(ids[:, :-1])
    results = []
    for row, one in enumerate(batch):
        end = len(one.tokens) - 1
        targets = slice(end - one.scored, end)
        results.append(_of_targets(model, features[row, targets], ids[row, 1:][targets]))
    return results


def _of_targets(model: GPT, features: Tensor, labels: Tensor) -> Scored:
    """Features [targets, hidden] and labels [targets] of one text."""
    total, greedy = 0.0, True
    for first in range(0, len(labels), TOGETHER):
        part = slice(first, first + TOGETHER)
        logits = F.linear(features[part], model.output_matrix).float()
        losses = F.cross_entropy(logits, labels[part], reduction="none")
        total -= losses.double().sum().item()
        greedy = greedy and bool((logits.argmax(dim=-1) == labels[part]).all())
    return Scored(total, greedy)
