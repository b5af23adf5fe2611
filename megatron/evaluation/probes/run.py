"""One call of the probes, from checkpoint to rows."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from megatron.config import Config
from megatron.data.samples import split_documents
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.evaluation.agreement import check_known_tokens
from megatron.evaluation.bounds import check_fits, check_numbers
from megatron.evaluation.opened import Opened, opened, variant
from megatron.evaluation.probes.asked import measured, scores_of
from megatron.evaluation.probes.attention import attention_by_distance, edges
from megatron.evaluation.probes.receptive_field import (
    receptive_field,
    receptive_field_tokens,
    thinned,
)
from megatron.evaluation.probes.retrieval import TASKS as RETRIEVAL_TASKS
from megatron.evaluation.probes.ruler import TASKS as RULER_TASKS
from megatron.evaluation.protocols import Windows, first_tokens
from megatron.folder_lock import owned_file
from megatron.model import GPT, AttentionSettings
from megatron.parallel.grid import here
from megatron.results.probes import (
    GROUPS,
    PROBES,
    RULER,
    ProbeRow,
    axis_of,
    existing_probes,
    joined,
    write_probes,
)
from megatron.results.row import Facts, run_of

TASKS = RETRIEVAL_TASKS | RULER_TASKS
USUAL = tuple(probe for probe in PROBES if probe not in RULER)  # what a call asks by default


@dataclass(frozen=True)
class Options:
    """What one call of the probes asks for beside its configuration.

    checkpoint, step, lengths, output: as in megatron.evaluation.run.Options
    probes: names in PROBES or GROUPS
    depths: places of the context that tasks ask about
    trials: contexts for each length, task and place, and windows of text for the other probes
    seed: of the questions
    """

    checkpoint: str | None = None
    step: int | None = None
    lengths: Sequence[int] = ()
    output: Path | None = None
    probes: Sequence[str] = USUAL
    depths: int = 5
    trials: int = 8
    seed: int = 0


@dataclass(frozen=True)
class Answer:
    """What one probe gave at one length.

    rows: the keys of each row that the probe itself adds: one row, or one for each place
    seconds: how long it took
    """

    probe: str
    length: int
    rows: list[dict[str, Any]]
    seconds: float


@dataclass(frozen=True)
class Probed:
    """All rows of this model in the file, earlier ones too, and the file."""

    rows: list[ProbeRow]
    output: Path


def probe(
    config: Config | None, options: Options, report: Callable[[Answer], None] = lambda _: None
) -> Probed:
    """Ask the probes, and write their rows as soon as they are known.

    report: called with each answer
    UserError, before anything is computed, for what cannot be asked or written.
    """
    check_numbers(
        {
            "step": options.step,
            "lengths": options.lengths,
            "depths": options.depths,
            "trials": options.trials,
            "probe_seed": options.seed,
        }
    )
    checkpoint = opened(config, options.checkpoint, options.step)
    tokens = only_text(checkpoint)
    output = options.output or default_output(checkpoint)
    lengths = sorted(set(options.lengths or checkpoint.config.evaluation.eval_lengths))
    text = held_out(checkpoint, lengths[-1])
    model = checkpoint.model
    attention = AttentionSettings.of(checkpoint.config.attention).of_one_document()
    model.to(here().device)
    model.use_attention(attention)
    check_fits(model, lengths[-1], here().device)
    about_attention = checkpoint.facts_of_attention(attention)
    facts = checkpoint.facts() | about_attention | checkpoint.facts_of_text("probes", tokens)

    rows: list[ProbeRow] = []
    with owned_file(output, "--output"):
        existing = existing_probes(output)
        for answer in answers(model, text, lengths, options):
            rows += rows_of(answer, facts)
            write_probes(output, joined(existing, rows))
            report(answer)
    run = run_of(rows[0])
    return Probed([row for row in joined(existing, rows) if run_of(row) == run], output)


def default_output(checkpoint: Opened) -> Path:
    """A file in the run's folder, named by what is probed."""
    config = checkpoint.config
    tokens = only_text(checkpoint)
    words = [tokens.prefix.name, checkpoint.texts.name, checkpoint.path.name]
    attention = AttentionSettings.of(config.attention).of_one_document()
    for key, value in variant(attention).items():
        words.append(f"{key}={value}")
    return checkpoint.default_folder / ("-".join([*words, "probes"]) + ".jsonl")


def only_text(checkpoint: Opened) -> TokenFile:
    """The text to probe on; UserError where there are several."""
    first, *others = checkpoint.texts.files
    if others:
        key = f"{checkpoint.texts.name}_data_paths"
        choices = ", ".join(str(tokens.prefix) for tokens in (first, *others))
        raise UserError(f"{key}: probes read one corpus - give one of {choices} as {key}=[PREFIX]")
    return first


def held_out(checkpoint: Opened, longest: int) -> np.ndarray:
    """The first tokens of the part: [eval_tokens], or one window where that is more.

    Fewer where the part has fewer; UserError where it has not one window of the longest length.
    """
    config = checkpoint.config
    part = config.evaluation.eval_part
    needed = longest + 1
    tokens = only_text(checkpoint)
    documents = split_documents(tokens, checkpoint.texts.split, part)
    text = first_tokens(tokens, documents, max(config.evaluation.eval_tokens, needed))
    if len(text) < needed:
        raise UserError(
            f"--lengths: the {part} part has {len(text)} tokens, {needed} are needed"
            " - give shorter lengths"
        )
    window = Windows(len(text) - 1, [text], [0])
    check_known_tokens([window], checkpoint.vocab, checkpoint.path)
    return text


def answers(
    model: GPT, text: np.ndarray, lengths: Sequence[int], options: Options
) -> Iterator[Answer]:
    """The answer of each probe at each length, as soon as it is known; text [tokens]."""
    for length in lengths:
        windows = windows_of(text, length, options.trials)
        for name in probes_of(options.probes):
            started = time.perf_counter()
            if name in TASKS:
                rows = of_task(model, name, text, length, options)
            else:
                rows = [OTHERS[name](model, windows)]
            yield Answer(name, length, rows, time.perf_counter() - started)


def probes_of(names: Sequence[str]) -> list[str]:
    """Probes by their own names and by those of their groups, each once."""
    probes: list[str] = []
    for name in names:
        probes += GROUPS.get(name, (name,))
    return list(dict.fromkeys(probes))


def windows_of(text: np.ndarray, length: int, most: int) -> list[np.ndarray]:
    """The first windows of the text, one after another: at most `most` of [length + 1] tokens."""
    last = min(len(text) - length, most * length)
    return [text[start : start + length + 1] for start in range(0, last, length)]


def rows_of(answer: Answer, facts: Facts) -> list[ProbeRow]:
    """The rows of a file of probes; facts: what all of them share."""
    shared = {"probe": answer.probe, "length": answer.length, "seconds": answer.seconds}
    return [cast(ProbeRow, facts | shared | own) for own in answer.rows]


def of_task(
    model: GPT, name: str, text: np.ndarray, length: int, options: Options
) -> list[dict[str, Any]]:
    """One task: a row for each depth, or for each number on its axis."""
    last = max(1, options.depths - 1)
    task = TASKS[name]
    results = measured(
        scores_of(model),
        name,
        task,
        text,
        length,
        depths=[round(number / last, 4) for number in range(options.depths)],
        trials=options.trials,
        seed=options.seed,
        device=next(model.parameters()).device,
    )
    rows = []
    for result in results:
        row = asdict(result)
        place = {axis_of(name): row.pop("place")}
        form = {"form": dict(task.form)} if task.form else {}
        rows.append(place | form | row | {"probe_seed": options.seed})
    return rows


def of_receptive_field(model: GPT, windows: Sequence[np.ndarray]) -> dict[str, Any]:
    """The receptive field: a row, or the reason why the model refuses this length."""
    try:
        cumulative = receptive_field(model, windows)
    except UserError as refusal:
        return {"windows": len(windows), "reason": str(refusal)}
    distances, values = thinned(cumulative.tolist())
    return {
        "windows": len(windows),
        "reach": receptive_field_tokens(cumulative),
        "distances": distances,
        "cumulative": values,
    }


def of_attention(model: GPT, windows: Sequence[np.ndarray]) -> dict[str, Any]:
    """Where attention looks: a row, or the reason why the model refuses this length."""
    length = len(windows[0]) - 1
    try:
        entropy, mass = attention_by_distance(model, windows)
    except UserError as refusal:
        return {"windows": len(windows), "reason": str(refusal)}
    return {
        "windows": len(windows),
        **({"layers": model.names_of_layers} if model.names_of_layers else {}),
        "edges": edges(length),
        "mean_entropy": round(entropy.mean().item(), 4),
        "entropy": _rounded(entropy),
        "mass": _rounded(mass),
    }


def _rounded(table: Tensor) -> list[list[float]]:
    return np.round(table.numpy(), 6).tolist()


OTHERS = {"receptive_field": of_receptive_field, "attention": of_attention}
