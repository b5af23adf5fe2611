"""What a perplexity does not show, from checkpoint to rows.

Tasks ask whether a model can use far tokens (probe_tasks.py). The receptive field says which tokens
change its output, and attention how far back it looks (attention_probes.py).
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from megatron.config import Config
from megatron.data.samples import split_documents
from megatron.data.tasks import TaskText
from megatron.errors import UserError
from megatron.evaluation.attention_probes import (
    MOST,
    attention_by_distance,
    edges,
    receptive_field,
    sampled,
)
from megatron.evaluation.evaluate_checkpoint import variants
from megatron.evaluation.loaded_run import loaded_run
from megatron.evaluation.methods import MeasuredAttention
from megatron.evaluation.options import DTYPES, CheckpointOptions
from megatron.evaluation.probe_tasks import NO_TOKEN, TASKS, Material
from megatron.files import check_output
from megatron.folder_lock import owned_file
from megatron.model import GPT
from megatron.model.head import tokens_at_once
from megatron.parallel.grid import device_alone
from megatron.protocols import first_tokens
from megatron.results.files import LINES
from megatron.results.probes import (
    GROUPS,
    PROBES,
    RULER,
    ProbeRow,
    axis_of,
    existing_probes,
    write_probes,
)
from megatron.results.row import Facts
from megatron.results.statistics import wilson

SHORTEST = 48  # tokens of a context
SAMPLED = 200  # distances of a receptive field that a row has
NUMBERS = ("guess", "accuracy", "error", "low", "high", "log_probability", "without")

Scores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(ids [batch, length], at [count], targets [count] or [count, choices]) -> what `scored` does."""


@dataclass(frozen=True)
class ProbeOptions(CheckpointOptions):
    """The wishes of one call of the probes beside its configuration.

    probes: names in PROBES or GROUPS
    depths: places of the context that tasks ask about
    trials: contexts for each length, task and place, and windows of text for the other probes
    probe_seed: of the questions
    """

    probes: Sequence[str] = tuple(name for name in PROBES if name not in RULER)
    depths: int = 5
    trials: int = 8
    probe_seed: int = 0


def probe(
    config: Config | None,
    options: ProbeOptions,
    report: Callable[[list[ProbeRow]], None] = lambda rows: None,
) -> list[Path]:
    """Ask the probes of each variant of attention, and write rows as soon as they are known.

    report: called with the rows of each probe and length
    -> the files, one for each variant or the one of `output`
    Raises UserError, before anything is computed, for what cannot be asked or written.
    """
    run = loaded_run(config, options.checkpoint, options.step)
    config, model = run.config, run.model
    tokens, *further_files = run.texts.files
    if further_files:
        key = f"{run.texts.name}_data_paths"
        choices = ", ".join(str(file.prefix) for file in run.texts.files)
        raise UserError(f"{key}: probes read one corpus - give one of {choices} as {key}=[PREFIX]")

    if isinstance(tokens, TaskText):
        raise UserError(f"data_path: probes read a text, {tokens.prefix} is a task - give a text")

    # The first tokens of the part: eval_tokens of them, or one window of the longest length.
    lengths = sorted(set(options.lengths or config.evaluation.eval_lengths))
    needed = lengths[-1] + 1
    documents = split_documents(tokens, run.texts.split, run.texts.name)
    text = first_tokens(tokens, documents, max(config.evaluation.eval_tokens, needed))
    if len(text) < needed:
        raise UserError(
            f"--lengths: the {run.texts.name} part has {len(text)} tokens, {needed} are needed"
            " - give shorter lengths"
        )
    run.check_known_tokens([text])

    positions = [placed.position for placed in model.placed]
    trained = MeasuredAttention.of(config.attention).of_one_document()
    attentions = variants(trained, options, positions, model.train_length)
    words = ["probes"] if options.dtype == "fp32" else ["probes", options.dtype]
    file_of: dict[MeasuredAttention, Path] = {}
    for attention in attentions:
        output = options.output or run.default_output(tokens, attention, words)
        check_output(output, LINES)
        file_of[attention] = output
    files = list(dict.fromkeys(file_of.values()))
    device = device_alone()
    model.to(device, DTYPES[options.dtype])
    names: list[str] = []
    for name in options.probes:
        names += GROUPS.get(name, (name,))

    with ExitStack() as owned:
        for output in files:
            owned.enter_context(owned_file(output, "--output"))
            existing_probes(output)  # before anything is asked
        for (attention, output), length in product(file_of.items(), lengths):
            model.use_attention(attention)
            facts = run.facts(attention) | run.facts_of_text("probes", tokens)
            last = min(len(text) - length, options.trials * length)
            windows = [text[start : start + length + 1] for start in range(0, last, length)]
            for name in dict.fromkeys(names):
                started = time.perf_counter()
                if name in TASKS:
                    scores = scores_of(model)
                    answers = asked(scores, name, text, length, options, device)
                else:
                    answers = [of_windows(model, name, windows)]
                seconds = time.perf_counter() - started
                shared = facts | {"probe": name, "length": length, "seconds": seconds}
                rows = [cast(ProbeRow, shared | answer) for answer in answers]
                write_probes(output, rows)
                report(rows)
    return files


def of_windows(model: GPT, name: str, windows: Sequence[np.ndarray]) -> Facts:
    """The receptive field, or where attention looks; or why the model refuses this length."""
    facts: Facts = {"windows": len(windows)}
    length = len(windows[0]) - 1
    try:
        if name == "receptive_field":
            cumulative = receptive_field(model, windows)
            distances = sampled(length, SAMPLED)
            return facts | {
                "reach": int((cumulative < MOST).sum()) + 1,
                "distances": distances.tolist(),
                "cumulative": np.round(cumulative[distances].numpy(), 6).tolist(),
            }
        entropy, mass = attention_by_distance(model, windows)
    except UserError as refusal:
        return facts | {"reason": str(refusal)}
    if model.names_of_layers:
        facts["layers"] = model.names_of_layers
    return facts | {
        "edges": edges(length),
        "mean_entropy": round(entropy.mean().item(), 4),
        "entropy": np.round(entropy.numpy(), 6).tolist(),
        "mass": np.round(mass.numpy(), 6).tolist(),
    }


def asked(
    scores: Scores,
    name: str,
    text: np.ndarray,
    length: int,
    options: ProbeOptions,
    device: torch.device | str = "cpu",
) -> list[Facts]:
    """One task at one length: the keys of a row for each place.

    text: [length or more] held-out tokens, the filler
    If the task or the model refuses this length, every result has the reason. Raises UserError for
    a length that is too short for any task.
    """
    if length < SHORTEST:
        raise UserError(f"--lengths: {length} is too short for {name} - give {SHORTEST} or more")
    task = TASKS[name]
    last_place = max(1, options.depths - 1)
    depths = [round(number / last_place, 4) for number in range(options.depths)]
    places = task.places or depths
    trials, seed = options.trials, options.probe_seed
    text = text.astype(np.int64)
    # Of each place and trial: correct, log-probability, that without the answers, the number of
    # right tokens and the accuracy of guessing, of each target: [5, count].
    answers: list[list[np.ndarray]] = [[] for _ in places]
    reason = None
    try:
        for number in range(trials):
            random = np.random.default_rng([seed, length, number])
            for trial in task.trials(Material(random, text, length, places)):
                arrays = (trial.ids, trial.at, trial.targets)
                tensors = [torch.from_numpy(array).to(device) for array in arrays]
                correct, log_probability = scores(*tensors)  # [2, count] each
                numbers = torch.stack([correct[0], *log_probability]).double().cpu().numpy()
                choices = (trial.targets.reshape(len(trial.at), -1) != NO_TOKEN).sum(axis=1)
                guess = np.broadcast_to(trial.guess, choices.shape)
                table = np.vstack([numbers, choices, guess])
                for cell in np.unique(trial.cell):
                    answers[cell].append(table[:, trial.cell == cell])
    except UserError as refusal:
        reason = str(refusal)

    words = len(np.unique(text))
    results = []
    for place, tables in zip(places, answers, strict=True):
        result: Facts = {axis_of(name): place, "trials": trials, "probe_seed": seed, "tokens": 0}
        if task.form:
            result["form"] = dict(task.form)
        result |= {"chance": 1 / words, "reason": reason, **dict.fromkeys(NUMBERS)}
        if reason is None:
            table = np.stack(tables)  # [trials, 5, count]
            accuracy, log_probability, without, choices, guess = table.mean(axis=(0, 2)).tolist()
            result |= {"accuracy": accuracy, "chance": choices / words}
            result |= {"log_probability": log_probability, "without": without}
            result["guess"] = None if math.isnan(guess) else guess
            result["tokens"] = table[:, 0].size
            result["low"], result["high"] = wilson(accuracy, trials)
            if trials > 1:
                spread = table[:, 0].mean(axis=1).std(ddof=1)
                result["error"] = spread.item() / math.sqrt(trials)
        results.append(result)
    return results


def scores_of(model: GPT) -> Scores:
    """A function that asks this model."""

    @torch.inference_mode()
    def scores(ids: Tensor, at: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = model.features(ids)[:, at]  # [batch, count, hidden]
        # Some targets at a time: the logits of all would need too much memory.
        size = tokens_at_once(x.device)
        parts = zip(x.split(size, dim=1), targets.split(size), strict=True)
        answers = [scored(model.logits(x), targets) for x, targets in parts]
        correct, log_probability = zip(*answers, strict=True)
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
    best = logits == logits.amax(dim=2, keepdim=True)
    right_ones_of_best = (best.gather(2, index) & is_token).sum(dim=2)
    correct = right_ones_of_best / best.sum(dim=2)
    log_probabilities = logits.float().log_softmax(dim=2).gather(2, index)
    right_ones = log_probabilities.masked_fill(~is_token, -math.inf)
    return correct, right_ones.logsumexp(dim=2)
