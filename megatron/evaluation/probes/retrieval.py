"""Can a model repeat what it has read? Passkey, copy and associative recall, sized for models trained on text alone.

Every task asks for tokens that only the context tells, drawn at random from those of the held-out text: copying what
stood behind the same token before (induction, arXiv 2209.11895) is what small language models learn of retrieval. The
same is asked of a context that gives other answers, so that a gain of log-probability shows before any argmax does.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.errors import UserError
from megatron.model import GPT
from megatron.model.head import HEAD_TOKENS

CUE, NEEDLE = 4, 8  # tokens that ask for the needle, and tokens of the needle
PAIRS = 4  # pairs of key and value at each depth

Scores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Trial:
    """One context with the answers and one with others: ids [2, length]. targets[i] is to follow position at[i] and
    stands at depth number cell[i] of the first: [count] each."""

    ids: np.ndarray
    at: np.ndarray
    targets: np.ndarray
    cell: np.ndarray


@dataclass(frozen=True)
class Retrieval:
    """One depth at one length; depth 0 is the start of the context, 1 just before the question.

    accuracy: share of targets that are the argmax, `error` its standard error over trials, `chance` that of guessing;
    log_probability: mean over targets in nats, `without` the same where the context gives other answers.
    All None where `reason` says why.
    """

    length: int
    depth: float
    trials: int
    tokens: int
    chance: float
    accuracy: float | None = None
    error: float | None = None
    log_probability: float | None = None
    without: float | None = None
    reason: str | None = None


def passkey(
    random: np.random.Generator, text: np.ndarray, length: int, depths: Sequence[float]
) -> Iterator[Trial]:
    """A cue and a needle once in the text, at one depth; at its end the cue again: what comes next?"""
    filler, words = _filler(random, text, length), _words(text)
    cue, needle, other = (
        random.choice(words, size, replace=False) for size in (CUE, NEEDLE, NEEDLE)
    )
    question = np.concatenate([cue, needle[:-1]])
    before = length - len(question)
    for cell, depth in enumerate(depths):
        start = round(depth * (before - CUE - NEEDLE))
        ids = np.stack([filler, filler])
        ids[:, before:] = question
        ids[:, start : start + CUE + NEEDLE] = np.stack(
            [np.append(cue, needle), np.append(cue, other)]
        )
        yield Trial(ids, np.arange(length - NEEDLE, length), needle, np.full(NEEDLE, cell))


def copy(
    random: np.random.Generator, text: np.ndarray, length: int, depths: Sequence[float]
) -> Iterator[Trial]:
    """A random string and the same again, length / 2 later; the depths are equal parts of the string."""
    half = length // 2
    string, other = random.choice(_words(text), (2, half))
    # At the end of the first string nothing has said yet that it starts again: its first token is not asked for.
    ids = np.stack([np.append(string, string), np.append(other, string)])
    place = np.arange(1, half)
    yield Trial(ids, half + place - 1, string[1:], place * len(depths) // half)


def recall(
    random: np.random.Generator, text: np.ndarray, length: int, depths: Sequence[float]
) -> Iterator[Trial]:
    """Pairs of a key and its value at every depth of the text; at its end each key again, in another order: its value?
    (multi-query associative recall, arXiv 2312.04927)"""
    count = PAIRS * len(depths)
    words = random.permutation(_words(text))
    if len(words) < 2 * count or length < 4 * count:
        raise UserError(
            f"recall: {count} pairs need {2 * count} different tokens, the text has {len(words)}, and a length of"
            f" {4 * count} or more - ask for fewer depths or longer lengths"
        )
    keys, values = words[:count], words[count : 2 * count]
    others, order = (
        np.roll(values, 1),
        random.permutation(count),
    )  # without: each key has another's value
    filler = _filler(random, text, length)
    asked = np.isin(filler, keys)  # a key stands before its value and nowhere else
    filler[asked] = random.choice(words[count:], asked.sum())
    ids = np.stack([filler, filler])
    before = length - 2 * count
    spare = before - 2 * count  # tokens of filler that the depths share
    for pair in range(count):
        start = 2 * pair + round(depths[pair // PAIRS] * spare)
        ids[:, start] = keys[pair]
        ids[:, start + 1] = values[pair], others[pair]
    ids[:, before::2], ids[:, before + 1 :: 2] = keys[order], values[order]
    yield Trial(ids, np.arange(before, length, 2), values[order], order // PAIRS)


TASKS = {"passkey": passkey, "copy": copy, "recall": recall}


def scores_of(model: GPT) -> Scores:
    """(ids [batch, length], at [count], targets [count]) -> (correct, log-probability), [batch, count] each."""

    @torch.inference_mode()
    def scores(ids: Tensor, at: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = model.features(ids)[:, at]
        parts = [
            scored(F.linear(some, model.output_matrix), wanted)
            for some, wanted in zip(
                x.split(HEAD_TOKENS, dim=1), targets.split(HEAD_TOKENS), strict=True
            )
        ]
        correct, chances = zip(*parts, strict=True)
        return torch.cat(correct, dim=1), torch.cat(chances, dim=1)

    return scores


def scored(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """logits [batch, count, vocab], targets [count] -> (correct, log-probability), [batch, count] each; where several
    tokens share the highest logit each counts in part, so that a model without a preference has the accuracy of chance.
    """
    wanted = targets.expand(len(logits), -1)[..., None]
    own, best = logits.gather(2, wanted), logits.amax(dim=2, keepdim=True)
    correct = (own == best)[..., 0] / (logits == best).sum(dim=2)
    return correct, logits.float().log_softmax(dim=2).gather(2, wanted)[..., 0]


def measured(
    scores: Scores,
    task: str,
    text: np.ndarray,
    length: int,
    *,
    depths: Sequence[float],
    trials: int,
    seed: int,
    device: torch.device | str = "cpu",
) -> list[Retrieval]:
    """One task at one length: a result for each depth. text [tokens >= length] is the held-out filler."""
    if length < 4 * (CUE + NEEDLE):
        raise UserError(
            f"--lengths: {length} is too short for {task} - give {4 * (CUE + NEEDLE)} or more"
        )
    text = text.astype(np.int64)
    chance = 1 / len(_words(text))
    found: list[list[Tensor]] = [
        [] for _ in depths
    ]  # of every trial: correct, and both log-probabilities, [3, count]
    try:
        for number in range(trials):
            random = np.random.default_rng(
                [seed, length, number]
            )  # the same questions for every model
            for trial in TASKS[task](random, text, length, depths):
                ids, at, targets = (
                    torch.from_numpy(part).to(device)
                    for part in (trial.ids, trial.at, trial.targets)
                )
                correct, chances = scores(ids, at, targets)
                table = torch.stack([correct[0], chances[0], chances[1]]).double().cpu()
                for cell in np.unique(trial.cell):
                    found[cell].append(table[:, torch.from_numpy(trial.cell == cell)])
    except UserError as refusal:
        return [
            Retrieval(length, depth, trials, 0, chance, reason=str(refusal)) for depth in depths
        ]
    return [
        _summary(tables, length, depth, chance) for tables, depth in zip(found, depths, strict=True)
    ]


def _summary(tables: Sequence[Tensor], length: int, depth: float, chance: float) -> Retrieval:
    trials = len(tables)
    accuracies = torch.stack([table[0].mean() for table in tables])
    error = accuracies.std().item() / math.sqrt(trials) if trials > 1 else None
    whole = torch.cat([*tables], dim=1)
    accuracy, log_probability, without = whole.mean(dim=1).tolist()
    return Retrieval(
        length, depth, trials, whole.shape[1], chance, accuracy, error, log_probability, without
    )


def _words(text: np.ndarray) -> np.ndarray:
    """The tokens that questions and answers are drawn from: those that occur in the text, each once."""
    return np.unique(text)


def _filler(random: np.random.Generator, text: np.ndarray, length: int) -> np.ndarray:
    start = int(random.integers(0, len(text) - length + 1))
    return text[start : start + length].copy()
