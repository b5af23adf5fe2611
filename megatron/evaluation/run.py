"""One evaluation from checkpoint to rows: several protocols and variants of the same weights."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal, cast

import torch

from megatron.attention import Pairs
from megatron.config import Config
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.evaluation.agreement import check_known_tokens
from megatron.evaluation.bounds import check_fits, check_numbers
from megatron.evaluation.opened import Opened, opened, variant
from megatron.evaluation.perplexity import Advance, measured
from megatron.evaluation.progress import progress
from megatron.evaluation.protocols import PROTOCOLS, Request, Windows
from megatron.evaluation.resume import WindowFile, answered, remove_unusable
from megatron.folder_lock import owned_file
from megatron.model import GPT, AttentionSettings
from megatron.model.methods import method_of
from megatron.parallel.grid import Grid, here
from megatron.parallel.owned import owned_by_first
from megatron.parallel.threads import count_parameters, use_threads
from megatron.results.files import check_output, existing_results, write_results
from megatron.results.row import Facts, Row

AttentionWindow = int | Literal["train_length"] | None
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What one evaluation asks for beside its configuration.

    checkpoint: folder of a run or of one checkpoint; None for load or save of the configuration
    step: which checkpoint of the run; None for the latest
    lengths: tokens of a window; empty for eval_lengths of the configuration
    output: file of JSON lines; None for a name in the run's folder that says what is measured
    protocols: names in PROTOCOLS
    attention_windows: values of the key `window`, each on the same weights; empty for that of the
        configuration
    logn_scales, paper_precisions: values of the keys `logn_scale` and `paper_precision`, likewise
    sinks, clip_distances, methods: values of these settings of attention, likewise; None: without
    dtype: of the model's matrices, a name in DTYPES
    windows, start, tail, stride: of single protocols, see protocols.Request
    """

    checkpoint: str | None = None
    step: int | None = None
    lengths: Sequence[int] = ()
    output: Path | None = None
    protocols: Sequence[str] = ("equal_tokens",)
    attention_windows: Sequence[AttentionWindow] = ()
    logn_scales: Sequence[bool] = ()
    paper_precisions: Sequence[bool] = ()
    sinks: Sequence[int | None] = ()
    clip_distances: Sequence[int | None] = ()
    methods: Sequence[str | None] = ()
    dtype: str = "fp32"
    windows: int = Request.windows
    start: int = Request.start
    tail: int = Request.tail
    stride: int | None = Request.stride


@dataclass(frozen=True)
class Job:
    """One protocol on one variant of the weights.

    tokens: the text
    windows: those of each length, shortest first
    attention: how the variant computes attention
    output: the file that gets its rows
    """

    protocol: str
    tokens: TokenFile
    windows: Sequence[Windows]
    attention: AttentionSettings
    output: Path


@dataclass(frozen=True)
class Evaluation:
    """What was measured: the rows by the file that holds them, and the lengths asked for."""

    rows: dict[Path, list[Row]]
    lengths: list[int]


def evaluate(config: Config | None, options: Options) -> Evaluation:
    """Measure what the options ask for, and write each row as soon as it is known.

    UserError, before anything is measured, for what cannot be measured or written.
    """
    check_numbers(
        {
            "step": options.step,
            "lengths": options.lengths,
            "windows": options.windows,
            "start": options.start,
            "tail": options.tail,
            "stride": options.stride,
        }
    )
    checkpoint = opened(config, options.checkpoint, options.step)
    requests = [request_of(checkpoint, tokens, options) for tokens in checkpoint.texts.files]
    jobs = [job for request in requests for job in planned(checkpoint, request, options)]
    grid = here()
    outputs = dict.fromkeys(job.output for job in jobs)
    with owned_by_first(grid, *(_owned(output) for output in outputs)):
        rows = _measured(jobs, checkpoint, grid, options)
    return Evaluation(rows, requests[0].checked_lengths)


@contextmanager
def _owned(output: Path) -> Iterator[None]:
    """An output that no other evaluation writes meanwhile."""
    with owned_file(output, "--output"):
        remove_unusable(output)
        yield


def _measured(
    jobs: Sequence[Job], checkpoint: Opened, grid: Grid, options: Options
) -> dict[Path, list[Row]]:
    """The rows of all jobs, by the file that holds them."""
    checkpoint.model.to(grid.device, DTYPES[options.dtype])
    deterministic = checkpoint.config.training.deterministic
    use_threads(count_parameters(checkpoint.model), grid.device, by_load=not deterministic)
    for job in jobs:
        checkpoint.model.use_attention(job.attention)
        check_fits(checkpoint.model, job.windows[-1].length, grid.device)
    facts = checkpoint.facts()
    rows: dict[Path, list[Row]] = {}
    for job in jobs:
        job_rows = rows_of(job, checkpoint, facts, grid)
        rows.setdefault(job.output, []).extend(job_rows)
    return rows


def request_of(checkpoint: Opened, tokens: TokenFile, options: Options) -> Request:
    """A text and the lengths that configuration and options ask for."""
    config = checkpoint.config
    return Request(
        tokens=tokens,
        lengths=options.lengths or config.evaluation.eval_lengths,
        split=checkpoint.texts.split,
        part=checkpoint.texts.name,
        eval_tokens=config.evaluation.eval_tokens,
        seed=checkpoint.trained.training.seed,
        windows=options.windows,
        start=options.start,
        tail=options.tail,
        stride=options.stride,
    )


def planned(checkpoint: Opened, request: Request, options: Options) -> list[Job]:
    """Every protocol on every variant; UserError where one cannot be measured or written."""
    windows: dict[str, list[Windows]] = {}
    for protocol in dict.fromkeys(options.protocols):
        windows[protocol] = PROTOCOLS[protocol](request)
        check_known_tokens(windows[protocol], checkpoint.vocab, checkpoint.path)
    jobs = []
    attention_of_config = AttentionSettings.of(checkpoint.config.attention)
    several = list(variants(attention_of_config, options, checkpoint.model.train_length))
    check_methods(options, several, checkpoint.model)
    for attention in several:
        for protocol in windows:
            output = options.output
            if output is None:
                output = default_output(
                    checkpoint, request.tokens, attention, protocol, options.dtype
                )
            check_output(output)
            jobs.append(Job(protocol, request.tokens, windows[protocol], attention, output))
    return jobs


def variants(
    attention: AttentionSettings, options: Options, train_length: int
) -> Iterator[AttentionSettings]:
    """The settings with every combination of the values that the options ask for."""
    given = {
        "window": options.attention_windows,
        "logn_scale": options.logn_scales,
        "paper_precision": options.paper_precisions,
        "sinks": options.sinks,
        "clip_distance": options.clip_distances,
        "method": [_named(text, train_length) for text in options.methods],
    }
    values = {key: dict.fromkeys(several) for key, several in given.items() if several}
    for combination in product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        if "window" in chosen:
            chosen["window_layers"] = ()
        yield replace(attention, **chosen)


def _named(text: str | None, train_length: int) -> str | None:
    """A method with all of its options, so that equal ones have equal rows; others as given."""
    if text is None:
        return None
    try:
        return method_of(text, train_length).text
    except UserError:
        return text  # check_methods says what is wrong


def check_methods(options: Options, several: Iterable[AttentionSettings], model: GPT) -> None:
    """UserError with all that is wrong with sinks, clipped distances and methods."""
    methods = [_named(text, model.train_length) for text in options.methods]
    given = {
        "--sinks": options.sinks,
        "--clip-distance": options.clip_distances,
        "--method": methods,
    }
    faults: dict[str, None] = {}
    for option, values in given.items():
        repeated = [value for value in dict.fromkeys(values) if values.count(value) > 1]
        faults |= {f"{option} {value or 'none'}: is given twice": None for value in repeated}
    for attention in several:
        faults |= dict.fromkeys(model.faults_of_methods(attention))
    if faults:
        raise UserError("\n".join(faults))


def default_output(
    checkpoint: Opened,
    tokens: TokenFile,
    attention: AttentionSettings,
    protocol: str,
    dtype: str,
) -> Path:
    """A file in the run's folder, named by what is measured.

    So another corpus, part, protocol or variant replaces nothing. The window stands there as it
    was asked for: a name must not change when the code does, or no measurement could go on.
    """
    words = [tokens.prefix.name, checkpoint.texts.name, checkpoint.path.name]
    if protocol != "equal_tokens":
        words.append(protocol)
    if dtype != "fp32":
        words.append(dtype)
    for key, value in variant(attention).items():
        words.append(key if value is True else f"{key}={value}")
    return checkpoint.default_folder / ("-".join(words) + ".jsonl")


def rows_of(job: Job, checkpoint: Opened, facts: Facts, grid: Grid) -> list[Row]:
    """A row for each length of a job: an existing one that answers the same question, or a new one.

    facts: what every row says about model and code
    New rows are written at once: the longest length may be the one that fails.
    """
    model = checkpoint.model
    model.use_attention(job.attention)
    logger.info("attention %s", model.attention_choice)
    about_attention = checkpoint.facts_of_attention(job.attention)
    about_text = checkpoint.facts_of_text(job.protocol, job.tokens)
    # As the first process reads them: all processes must agree.
    existing = grid.gather(existing_results(job.output))[0]
    rows: list[Row] = []
    with progress(job.protocol, shown=grid.first) as display:
        for windows in job.windows:
            place = windows.about | {"length": windows.length, "text": windows.text}
            question = facts | about_attention | about_text | place
            # Means between other positions are another answer.
            edges = {"position_edges": list(windows.edges)} if windows.edges else {}
            row = answered(question | edges, existing)
            kept = row is not None
            journal = WindowFile(job.output, question | edges, grid.rank)
            if row is None:
                row = measured_row(question, windows, checkpoint, grid, journal, display.advance)
            # A kept row too: the tokenizer's files may not have been there when it was measured.
            complete = checkpoint.byte_counts[job.tokens.prefix].completed(row, windows)
            if grid.first and not (kept and complete == row):
                write_results(job.output, [complete])
            row = complete
            if grid.first:
                journal.remove()  # of a kept row too: a kill may have come before this line
            display.done(row, kept=kept)
            rows.append(row)
    return rows


def measured_row(
    question: Facts,
    windows: Windows,
    checkpoint: Opened,
    grid: Grid,
    journal: WindowFile,
    advance: Advance,
) -> Row:
    """Measure one length: the question with its numbers."""
    pairs = checkpoint.model.pairs = Pairs()
    measurement = measured(
        checkpoint.model,
        windows,
        batch_tokens=checkpoint.config.evaluation.eval_batch_tokens,
        grid=grid,
        journal=journal,
        advance=advance,
    )
    if pairs.skipped > 0:
        logger.info("attention at %d: %s", windows.length, pairs)
    return cast(Row, question | measurement.row())
