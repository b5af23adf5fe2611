"""Ask a model a task's questions: accuracy and log-probability of the answers."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.errors import UserError
from megatron.evaluation.probes.trials import NO_TOKEN, Task, Trial, words_of
from megatron.model import GPT
from megatron.model.head import tokens_at_once
from megatron.results.statistics import wilson

SHORTEST = 48  # tokens of a context

Scores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Result:
    """The result at one place and length.

    place: a depth (0 is the start of the context, 1 its end), or what the task has instead
    trials: contexts
    tokens: targets of all trials
    chance: accuracy of guessing among all words
    guess: accuracy of guessing among what the context offers; None: it offers nothing
    accuracy: fraction of targets with the highest logit
    error: standard error of the accuracy, over trials
    low, high: 95 % Wilson interval of the accuracy, over trials
    log_probability: mean over targets in nats
    without: the same where the context has other answers
    reason: why the numbers are None
    """

    length: int
    place: float
    trials: int
    tokens: int
    chance: float
    guess: float | None = None
    accuracy: float | None = None
    error: float | None = None
    low: float | None = None
    high: float | None = None
    log_probability: float | None = None
    without: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Answers:
    """What one context gave at one place.

    table: correct, log-probability, and log-probability without the answers: [3, count] float64
    choices: right tokens of each target: [count]
    guess: accuracy of guessing among what the context offers; None: it offers nothing
    """

    table: Tensor
    choices: Tensor
    guess: float | None


def scores_of(model: GPT) -> Scores:
    """A function that asks this model, and returns what `scored` does.

    It takes ids [batch, length], at [count] and targets [count] or [count, choices].
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
    """Whether a right token has the highest logit, and the log-probability of the right ones.

    logits [batch, count, vocab]
    targets [count], or [count, choices] where any of a line is right and NO_TOKEN is none
    -> (correct, log-probability in nats), [batch, count] each
    Where n tokens share the highest logit, each counts 1 / n. So a model without a preference has
    the accuracy of chance.
    """
    choices = targets.view(len(targets), -1)
    is_token = choices != NO_TOKEN
    index = choices.clamp(min=0).expand(len(logits), -1, -1)  # [batch, count, choices]
    own = logits.gather(2, index).masked_fill(~is_token, -math.inf)
    best = logits.amax(dim=2, keepdim=True)
    number_of_best = (logits == best).sum(dim=2)
    correct = (own == best).sum(dim=2) / number_of_best
    log_probabilities = logits.float().log_softmax(dim=2)
    own_log_probabilities = log_probabilities.gather(2, index).masked_fill(~is_token, -math.inf)
    return correct, own_log_probabilities.logsumexp(dim=2)


def measured(
    scores: Scores,
    name: str,
    task: Task,
    text: np.ndarray,
    length: int,
    *,
    depths: Sequence[float],
    trials: int,
    seed: int,
    device: torch.device | str = "cpu",
) -> list[Result]:
    """One task at one length: a result for each place.

    text: [length or more] held-out tokens, the filler
    depths: 0 to 1, the places of a task that has none of its own
    seed: of the questions, which are the same for every model
    Where the task or the model refuses this length, every result has the reason. UserError for a
    length that is too short for any task.
    """
    if length < SHORTEST:
        raise UserError(f"--lengths: {length} is too short for {name} - give {SHORTEST} or more")
    places = depths if task.places is None else task.places
    text = text.astype(np.int64)
    words = len(words_of(text))
    by_place: list[list[Answers]] = [[] for _ in places]
    try:
        for number in range(trials):
            random = np.random.default_rng([seed, length, number])
            for trial in task.trials(random, text, length, places):
                for cell, answers in _asked(scores, trial, device).items():
                    by_place[cell].append(answers)
    except UserError as refusal:
        reason = str(refusal)
        chance = 1 / words
        return [Result(length, place, trials, 0, chance, reason=reason) for place in places]
    return [
        _summary(of_place, length, place, words)
        for of_place, place in zip(by_place, places, strict=True)
    ]


def _asked(scores: Scores, trial: Trial, device: torch.device | str) -> dict[int, Answers]:
    """What one context gave, by cell."""
    ids = torch.from_numpy(trial.ids).to(device)
    at = torch.from_numpy(trial.at).to(device)
    targets = torch.from_numpy(trial.targets).to(device)
    correct, log_probability = scores(ids, at, targets)  # [2, count] each
    table = torch.stack([correct[0], log_probability[0], log_probability[1]]).double().cpu()
    choices = (targets.view(len(targets), -1) != NO_TOKEN).sum(dim=1).cpu()
    answers = {}
    for cell in np.unique(trial.cell):
        in_cell = torch.from_numpy(trial.cell == cell)
        guess = None
        if trial.guess is not None:
            guess = float(trial.guess[trial.cell == cell].mean())
        answers[int(cell)] = Answers(table[:, in_cell], choices[in_cell], guess)
    return answers


def _summary(answers: Sequence[Answers], length: int, place: float, words: int) -> Result:
    """The result of all trials at one place; words: different tokens to guess among."""
    trials = len(answers)
    accuracies = torch.stack([answer.table[0].mean() for answer in answers])
    error = None
    if trials > 1:
        error = accuracies.std().item() / math.sqrt(trials)
    all_targets = torch.cat([answer.table for answer in answers], dim=1)
    accuracy, log_probability, without = all_targets.mean(dim=1).tolist()
    low, high = wilson(accuracies.mean().item(), trials)
    choices = torch.cat([answer.choices for answer in answers])
    guesses = [answer.guess for answer in answers if answer.guess is not None]
    return Result(
        length=length,
        place=place,
        trials=trials,
        tokens=all_targets.shape[1],
        chance=choices.double().mean().item() / words,
        guess=statistics.fmean(guesses) if guesses else None,
        accuracy=accuracy,
        error=error,
        low=low,
        high=high,
        log_probability=log_probability,
        without=without,
    )
