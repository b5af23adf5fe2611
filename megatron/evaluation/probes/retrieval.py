"""Can a model repeat what it has read? Passkey, copy and associative recall.

The tasks are sized for models that were trained on text alone. Each asks for tokens that only the
context gives, drawn at random from those of the held-out text. To copy what stood behind the same
token before (induction, arXiv 2209.11895) is what small language models learn of retrieval. The
same is asked of a context with other answers: a gain of log-probability shows before any argmax.
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
from megatron.model.head import tokens_at_once

CUE = 4  # tokens that ask for the needle
NEEDLE = 8  # tokens of the needle
PAIRS = 4  # pairs of key and value at each depth
SHORTEST = 4 * (CUE + NEEDLE)  # tokens of a context

Scores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Trial:
    """One context with the answers, and the same with other answers.

    ids: [2, length]
    at: [count] positions of the questions: targets[i] must be predicted at position at[i]
    targets: [count] the answers of the first context
    cell: [count] the number of the depth at which each answer stands
    """

    ids: np.ndarray
    at: np.ndarray
    targets: np.ndarray
    cell: np.ndarray


@dataclass(frozen=True)
class Retrieval:
    """The result at one depth and length. Depth 0 is the start of the context, 1 its end.

    trials: contexts
    tokens: targets of all trials
    chance: accuracy of guessing
    accuracy: fraction of targets with the highest logit
    error: standard error of the accuracy, over trials
    log_probability: mean over targets in nats
    without: the same where the context has other answers
    reason: why the numbers are None
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
    """A cue and a needle in the text, at one depth; at its end the cue again: what follows?"""
    filler = _filler(random, text, length)
    words = _words(text)
    cue = random.choice(words, CUE, replace=False)
    needle = random.choice(words, NEEDLE, replace=False)
    other = random.choice(words, NEEDLE, replace=False)
    question = np.concatenate([cue, needle[:-1]])
    question_start = length - len(question)
    for cell, depth in enumerate(depths):
        start = round(depth * (question_start - CUE - NEEDLE))
        needle_start = start + CUE
        ids = np.stack([filler, filler])
        ids[:, question_start:] = question
        ids[:, start:needle_start] = cue
        ids[0, needle_start : needle_start + NEEDLE] = needle
        ids[1, needle_start : needle_start + NEEDLE] = other
        at = np.arange(length - NEEDLE, length)
        yield Trial(ids, at, needle, np.full(NEEDLE, cell))


def copy(
    random: np.random.Generator, text: np.ndarray, length: int, depths: Sequence[float]
) -> Iterator[Trial]:
    """A random string, and length / 2 later the same again. The depths are equal parts of it."""
    half = length // 2
    string, other = random.choice(_words(text), (2, half))
    ids = np.stack([np.concatenate([string, string]), np.concatenate([other, string])])
    # The first token of the copy is not asked for: nothing says that the string starts again.
    place = np.arange(1, half)
    at = half + place - 1
    cell = place * len(depths) // half
    yield Trial(ids, at, string[1:], cell)


def recall(
    random: np.random.Generator, text: np.ndarray, length: int, depths: Sequence[float]
) -> Iterator[Trial]:
    """Pairs of a key and its value at every depth; at the end each key again: which value?

    The keys stand there in another order (multi-query associative recall, arXiv 2312.04927).
    UserError where the text has too few different tokens, or the length is too short.
    """
    count = PAIRS * len(depths)
    words = random.permutation(_words(text))
    if len(words) < 2 * count or length < 4 * count:
        raise UserError(
            f"recall: {count} pairs need {2 * count} different tokens, the text has {len(words)},"
            f" and a length of {4 * count} or more - ask for fewer depths or longer lengths"
        )
    keys = words[:count]
    values = words[count : 2 * count]
    other_values = np.roll(values, 1)  # each key has another's value
    order = random.permutation(count)  # of the questions
    filler = _filler(random, text, length)
    is_key = np.isin(filler, keys)  # a key may stand before its value only
    filler[is_key] = random.choice(words[count:], is_key.sum())

    ids = np.stack([filler, filler])
    question_start = length - 2 * count
    spare = question_start - 2 * count  # tokens of filler between the pairs
    for pair in range(count):
        depth = depths[pair // PAIRS]
        start = 2 * pair + round(depth * spare)
        ids[:, start] = keys[pair]
        ids[:, start + 1] = values[pair], other_values[pair]
    ids[:, question_start::2] = keys[order]
    ids[:, question_start + 1 :: 2] = values[order]
    at = np.arange(question_start, length, 2)
    yield Trial(ids, at, values[order], order // PAIRS)


TASKS = {"passkey": passkey, "copy": copy, "recall": recall}


def scores_of(model: GPT) -> Scores:
    """A function that asks this model, and returns what `scored` does.

    It takes ids [batch, length], at [count] and targets [count].
    """

    @torch.inference_mode()
    def scores(ids: Tensor, at: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = model.features(ids)[:, at]  # [batch, count, hidden]
        correct: list[Tensor] = []
        log_probability: list[Tensor] = []
        # Some targets at a time: the logits of all would need too much memory.
        size = tokens_at_once(x.device)
        parts = zip(x.split(size, dim=1), targets.split(size), strict=True)
        for x_part, targets_part in parts:
            logits = F.linear(x_part, model.output_matrix)
            correct_part, log_probability_part = scored(logits, targets_part)
            correct.append(correct_part)
            log_probability.append(log_probability_part)
        return torch.cat(correct, dim=1), torch.cat(log_probability, dim=1)

    return scores


def scored(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Whether each target has the highest logit, and its log-probability in nats.

    logits [batch, count, vocab], targets [count] -> (correct, log-probability), [batch, count] each
    Where n tokens share the highest logit, each counts 1 / n. So a model without a preference has
    the accuracy of chance.
    """
    index = targets.expand(len(logits), -1)[..., None]  # [batch, count, 1]
    own = logits.gather(2, index)
    best = logits.amax(dim=2, keepdim=True)
    number_of_best = (logits == best).sum(dim=2)
    correct = (own == best)[..., 0] / number_of_best
    log_probabilities = logits.float().log_softmax(dim=2)
    log_probability = log_probabilities.gather(2, index)[..., 0]
    return correct, log_probability


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
    """One task at one length: a result for each depth.

    text: [length or more] held-out tokens, the filler
    depths: 0 to 1
    seed: of the questions, which are the same for every model
    Where the task or the model refuses this length, every result has the reason. UserError for a
    length that is too short for any task.
    """
    if length < SHORTEST:
        raise UserError(f"--lengths: {length} is too short for {task} - give {SHORTEST} or more")
    text = text.astype(np.int64)
    chance = 1 / len(_words(text))
    # Of each depth and trial: correct, log-probability, log-probability without: [3, count].
    tables: list[list[Tensor]] = [[] for _ in depths]
    try:
        for number in range(trials):
            random = np.random.default_rng([seed, length, number])
            for trial in TASKS[task](random, text, length, depths):
                table = _asked(scores, trial, device)
                for cell in np.unique(trial.cell):
                    in_cell = torch.from_numpy(trial.cell == cell)
                    tables[cell].append(table[:, in_cell])
    except UserError as refusal:
        reason = str(refusal)
        return [Retrieval(length, depth, trials, 0, chance, reason=reason) for depth in depths]
    return [
        _summary(of_depth, length, depth, chance)
        for of_depth, depth in zip(tables, depths, strict=True)
    ]


def _asked(scores: Scores, trial: Trial, device: torch.device | str) -> Tensor:
    """Correct, log-probability, and log-probability without the answers: [3, count] float64."""
    ids = torch.from_numpy(trial.ids).to(device)
    at = torch.from_numpy(trial.at).to(device)
    targets = torch.from_numpy(trial.targets).to(device)
    correct, log_probability = scores(ids, at, targets)  # [2, count] each
    table = torch.stack([correct[0], log_probability[0], log_probability[1]])
    return table.double().cpu()


def _summary(tables: Sequence[Tensor], length: int, depth: float, chance: float) -> Retrieval:
    """The result of all trials at one depth; tables: [3, count] of each trial."""
    trials = len(tables)
    accuracies = torch.stack([table[0].mean() for table in tables])
    error = None
    if trials > 1:
        error = accuracies.std().item() / math.sqrt(trials)
    all_targets = torch.cat(list(tables), dim=1)
    accuracy, log_probability, without = all_targets.mean(dim=1).tolist()
    return Retrieval(
        length=length,
        depth=depth,
        trials=trials,
        tokens=all_targets.shape[1],
        chance=chance,
        accuracy=accuracy,
        error=error,
        log_probability=log_probability,
        without=without,
    )


def _words(text: np.ndarray) -> np.ndarray:
    """The tokens that questions and answers are drawn from: each token of the text once."""
    return np.unique(text)


def _filler(random: np.random.Generator, text: np.ndarray, length: int) -> np.ndarray:
    """A random piece of the text: [length]."""
    start = int(random.integers(0, len(text) - length + 1))
    return text[start : start + length].copy()
