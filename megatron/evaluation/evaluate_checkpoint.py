"""One evaluation, from a checkpoint to rows: several protocols and variants of the same weights."""

import itertools
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

from torch import Tensor
from tqdm import tqdm

from megatron.checkpoints.read import load_model
from megatron.checkpoints.saved import find, folder_of, step_of
from megatron.config import Config
from megatron.config.schema import as_list
from megatron.data.parts import Part, name_of, open_parts
from megatron.data.samples import build_split, split_documents
from megatron.data.tokens import TokenFile
from megatron.errors import UserError
from megatron.evaluation.loaded_run import (
    PREPARE,
    LoadedRun,
    checkpoint_folder,
    loaded_model,
    measurable,
    on_text,
    variant,
)
from megatron.evaluation.methods import MeasuredAttention, method_of
from megatron.evaluation.options import (
    Options,
    options_of_words,
    words_of,
)
from megatron.evaluation.perplexity import measured
from megatron.files import check_output
from megatron.folder_lock import owned_file
from megatron.model import positions_from_config
from megatron.parallel.context import Context, context_of
from megatron.parallel.grid import Grid, here, owned_by_first, set_matmul_precision
from megatron.parallel.threads import count_parameters, use_threads
from megatron.positions import Position
from megatron.protocols import (
    TASK,
    HeldOutText,
    Protocol,
    Request,
    Windows,
    usual_protocol,
)
from megatron.results.files import LINES, existing_results, write_results
from megatron.results.row import (
    ATTENTION_INPUTS,
    Facts,
    Question,
    Row,
    agrees,
    identity,
    with_facts,
)

logger = logging.getLogger(__name__)


class MeasuredRows(NamedTuple):
    """The rows by the file that holds them, and the requested lengths."""

    rows: dict[Path, list[Row]]
    lengths: list[int]


def evaluate(config: Config | None, options: Options) -> MeasuredRows:
    """Measure what the options request, and write each row as soon as it is measured.

    An existing row that answers the same question is kept. Raises UserError if something cannot be
    measured or written, before anything is measured.
    """
    run = on_text(loaded_model(config, options.checkpoint, options.step))
    config, grid = run.config, here()
    size = config.parallel.context_parallel_size
    # The checkpoint's training may have used other processes.
    if grid.ranks % size == 0 or "context_parallel_size" in config.chosen:
        grid = grid.sharing(size)
    use_threads(count_parameters(run.model), grid.device)
    return measured_rows(run, options, grid, context_of(grid, "all_gather"))


def evaluate_training(
    config: Config,
    weights: Mapping[str, Tensor],
    record: Facts,
    grid: Grid,
    context: Context | None,
    stops: Callable[[], bool],
) -> None:
    """Write the rows that the key `extrapolation` requests, during a training run.

    They equal the rows of `evaluate.py` for this step's checkpoint, even if that isn't saved.

    config: of the training; weights: all weights in float32; record: as in checkpoint.json, with
        step, hash and the file of weights
    stops: called on every rank before each length; if it returns true, the rest is skipped
    """
    path = folder_of(Path(config.checkpoint.save or ""), record["step"])
    model = load_model(path, config, record, weights.items())
    run = on_text(measurable(model, config, None, path, record))
    measured_rows(run, options_of_training(config), grid, context, stops=stops, brief=True)
    precision = config.precision
    set_matmul_precision(precision.float32_matmul_precision, precision.dtype, grid.device)


def options_of_training(config: Config) -> Options:
    """The options in the key `extrapolation`; UserError for options that cannot be used."""
    values = config.evaluation.extrapolation
    if taken := values.keys() & {"checkpoint", "step", "output"}:
        raise UserError(
            f"extrapolation: {', '.join(sorted(taken))}: the training sets it - remove it"
        )
    try:
        options = options_of_words(words_of(values))
        check_options(config, options)
    except UserError as fault:
        raise UserError(f"extrapolation: {fault}") from None
    return options


def check_training(config: Config) -> None:
    """Raises UserError if this text or configuration cannot give rows during training."""
    if config.checkpoint.save is None:
        raise UserError(
            "extrapolation_interval: writes its rows to the folder of save - set save, too"
        )
    options, part = options_of_training(config), config.evaluation.eval_part
    texts = open_parts(config.data, [part])[part]
    for tokens in texts.files:
        windows_of_text(config, config, options, texts, tokens)


def windows_of_text(
    config: Config,
    trained: Config,
    options: Options,
    texts: Part,
    tokens: TokenFile,
) -> dict[str, tuple[Protocol, list[Windows]]]:
    """The options' protocols on a text, by name, each with its windows for every length.

    config: of the measurement; trained: of the training
    Raises UserError if the text cannot provide them.
    """
    usual = usual_protocol(tokens.prefix)
    protocols = options.protocols(usual)
    if {name == TASK for name in protocols} != {usual == TASK}:
        what = "a task, which only the protocol task measures" if usual == TASK else "no task"
        raise UserError(
            f"--protocol: {tokens.prefix} is {what} - remove --protocol, or choose another text"
            " with data_path=…"
        )
    split, part = texts.split, texts.name
    text = HeldOutText(
        sorted(set(options.lengths or config.evaluation.eval_lengths)),
        config.evaluation.eval_tokens,
        part,
        split,
        train_length=trained.model.seq_length,
        tokens=tokens,
        documents=range(0) if usual == TASK else split_documents(tokens, split, part),
        samples=partial(build_split, tokens, split, part, seed=trained.training.seed),
    )
    windows_of = {}
    for name, protocol in protocols.items():
        protocol.check(text)
        windows = [protocol.windows_at(text, length) for length in protocol.lengths(text)]
        windows_of[name] = (protocol, windows)
    return windows_of


class Job(NamedTuple):
    """One protocol on one text, with one setting of attention.

    output: the file for its rows; facts: the rows' keys about text and protocol; windows: by length
    """

    output: Path
    tokens: TokenFile
    attention: MeasuredAttention
    facts: Facts
    windows: list[Windows]


def jobs_of(run: LoadedRun, options: Options, context_ranks: int) -> Iterator[Job]:
    """All jobs that the options request for a run on its texts. Raises UserError if one is
    impossible."""
    positions = [placed.position for placed in run.model.placed]
    attention = MeasuredAttention.of(run.config.attention)
    attentions = variants(attention, options, positions, run.model.train_length)
    moves_tokens = any(each.method or each.sinks is not None for each in attentions)
    if context_ranks > 1 and moves_tokens:
        raise UserError(
            f"context_parallel_size: {context_ranks} ranks cannot share a text with --method or"
            " --sinks, which move tokens - set it to 1"
        )
    for tokens in run.texts.files:
        windows_of = windows_of_text(run.config, run.trained, options, run.texts, tokens)
        vocab = run.record["vocab"]
        for _, lengths in windows_of.values():
            highest = max(int(ids.max()) for windows in lengths for ids in windows.ids)
            if highest >= vocab:
                raise UserError(
                    f"data_path: has token {highest}, but {run.path} only knows the tokens 0 to"
                    f" {vocab - 1} - {PREPARE}"
                )
        for attention, name in itertools.product(attentions, windows_of):
            protocol, windows = windows_of[name]
            # Another corpus, part or variant gets its own file. The name has the window as the user
            # wrote it: if names changed with the code, no measurement could continue.
            words = [tokens.prefix.name, run.texts.name, run.path.name]
            words += [name] if name != "equal_tokens" else []
            words += [options.dtype] if options.dtype != "fp32" else []
            for key, value in variant(attention).items():
                words.append(key if value is True else f"{key}={value}")
            usual = run.path.parent / "evaluation" / f"{'-'.join(words)}.jsonl"
            output = options.output or usual
            check_output(output, LINES)
            existing_results(output)  # fails for a file with other rows before anything is measured
            facts = {
                "corpus": name_of(tokens),
                "part": run.texts.name,
                "split": run.texts.split,
                "protocol": name,
                **protocol.facts,
            }
            yield Job(output, tokens, attention, facts, windows)


def measured_rows(
    run: LoadedRun,
    options: Options,
    grid: Grid,
    context: Context | None,
    *,
    stops: Callable[[], bool] = lambda: False,
    brief: bool = False,
) -> MeasuredRows:
    """Measure a run on its texts. Every process calls this.

    grid: the processes that share the windows; context: those that share each window
    stops: called before each length; if it returns true, the rest is skipped
    brief: log one line per output, not per length
    """
    jobs = list(jobs_of(run, options, grid.context_ranks))
    rows: dict[Path, list[Row]] = {job.output: [] for job in jobs}
    lengths = sorted(set(options.lengths or run.config.evaluation.eval_lengths))
    owned = [owned_file(output, "--output") for output in rows]
    with owned_by_first(grid, *owned):
        run.to(grid.device, options.dtype)
        for job in jobs:
            run.model.use_attention(job.attention)
            if not brief:
                logger.info("attention %s", run.model.attention_choice)
            facts = run.facts(job.attention) | run.begin_of_text | job.facts
            # Read by the first process, because all processes must agree.
            existing = grid.gather(existing_results(job.output))[0]
            for windows in job.windows:
                if stops():
                    return MeasuredRows(rows, lengths)
                row, is_new = row_of(run, job, facts, windows, existing, options, grid, context)
                if grid.first and is_new:
                    write_results(job.output, [row])  # now, because the longest length may fail
                rows[job.output].append(row)
                if grid.first and not brief:
                    spent = (
                        f"{row.get('seconds', 0):.1f} s" if is_new else "kept from an earlier run"
                    )
                    protocol, count = facts["protocol"], row["windows"]
                    logger.info(f"{protocol} {result_at(row)}, {count} windows, {spent}")
            if grid.first and brief:
                results = "; ".join(map(result_at, rows[job.output]))
                logger.info(
                    f"step {run.facts(job.attention)['step']}: {facts['protocol']} {results}"
                )
    return MeasuredRows(rows, lengths)


def row_of(
    run: LoadedRun,
    job: Job,
    facts: Facts,
    windows: Windows,
    existing_rows: Sequence[Row],
    options: Options,
    grid: Grid,
    context: Context | None,
) -> tuple[Row, bool]:
    """The row of one length, and whether it is new: an existing row with the answer is kept."""
    question = facts | windows.facts | {"length": windows.length, "text": windows.text}
    existing_row = answer(question, existing_rows)
    keep = windows.whole(options.keep_losses) if options.keep_losses else 0
    row = existing_row
    # A row without a loss has no other results either.
    if keep and row and row["loss"] is not None and len(row.get("token_losses", [])) != keep:
        row = None
    if row is None:
        # In a log the bar is only printed every half minute.
        pause = 0.1 if sys.stderr.isatty() else 30.0
        bar = tqdm(
            total=len(windows.ids),
            desc=f"{facts['protocol']} {windows.length}",
            mininterval=pause,
            delay=pause,
            leave=False,
            disable=not grid.first,
        )
        with bar:
            numbers = measured(
                run.model,
                windows,
                keep=keep,
                batch_tokens=run.config.evaluation.eval_batch_tokens,
                grid=grid,
                context=context,
                advance=bar.update,
            )
        row = cast(Row, question | numbers)
    if "bytes" not in row:  # the tokenizer may have been missing before
        row = with_facts(row, run.bytes_of_text(job.tokens, windows, row["loss"]))
    return row, row != existing_row


def result_at(row: Row) -> str:
    """The result of a length as the log shows it."""
    if row["perplexity"] is None:
        return f"{row['length']}: no perplexity ({row.get('reason')})"
    return f"{row['length']}: perplexity {row['perplexity']:.2f}"


def check_options(config: Config, options: Options) -> None:
    """Raises UserError for options that are impossible for any checkpoint of a configuration and
    any text."""
    attention = MeasuredAttention.of(config.attention)
    positions, _ = positions_from_config(config)
    variants(attention, options, positions, config.model.seq_length)
    lengths = sorted(set(as_list(options.lengths or config.evaluation.eval_lengths)))
    request = Request(lengths, config.evaluation.eval_tokens, train_length=config.model.seq_length)
    for protocol in options.protocols(usual_protocol(config.data.data_path)).values():
        protocol.check(request)


def variants(
    attention: MeasuredAttention,
    options: Options,
    positions: Sequence[Position],
    train_length: int,
) -> list[MeasuredAttention]:
    """The settings with every combination of the values in the options.

    Raises UserError for sinks, clipped distances and methods that don't fit.
    """
    values = options.attention_values
    combinations: dict[MeasuredAttention, None] = {}
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        if "window" in chosen:
            chosen["window_layers"] = ()
        settings = replace(attention, **chosen)
        settings.check(positions, train_length)
        if settings.method is not None:
            # With all options, so that equal methods have equal rows.
            method = method_of(settings.method, train_length)
            settings = replace(settings, method=method.text)
        combinations[settings] = None
    return list(combinations)


def answer(question: Facts, rows: Iterable[Row]) -> Row | None:
    """The first row with every fact of the question and the same attention settings, or None.

    A row with a window doesn't answer a question without one. Rows of another commit answer it, if
    their `code` is the same.
    """
    question = json.loads(json.dumps(question))  # as JSON returns it: tuples become lists
    question.pop("commit", None)
    inputs = identity(cast(Question, question), ATTENTION_INPUTS)
    for row in rows:
        if agrees(row, question) and identity(row, ATTENTION_INPUTS) == inputs:
            return row
    return None


# --- As KERPLE and MEP evaluate ---


def evaluate_as_published(config: Config) -> Iterator[MeasuredRows]:
    """Measure both held-out parts with protocol `paper`, as their files with train-iters: 0 do.

    The length is seq_length_val, and each part has eval_iters batches. As in the forks, those of
    the validation start where the training's next validation would; those of the test start at the
    beginning.
    Raises UserError if there is no checkpoint or nothing to measure.
    """
    training = config.training
    if not training.eval_iters:
        raise UserError("eval_iters: 0 batches leave nothing to measure - set at least 1")
    accumulation = training.gradient_accumulation_steps
    windows = training.eval_iters * training.train_micro_batch_size_per_gpu * accumulation
    length = config.data.seq_length_val
    checkpoint = find(checkpoint_folder(config, None))
    dtype = "bf16" if config.precision.dtype == "bf16" else "fp32"
    logger.info("train_iters: 0 - measuring %s as KERPLE and MEP do", checkpoint)
    validations = 0  # the forks count them up to this step
    if training.eval_interval:
        validations = (step_of(checkpoint) or 0) * accumulation // training.eval_interval
    for part in ("valid", "test"):
        section = config.evaluation.model_copy(update={"eval_part": part})
        options = Options(
            checkpoint=str(checkpoint),
            lengths=[length],
            protocol=["paper"],
            dtype=dtype,
            protocol_options={
                "windows": windows,
                "start": validations * windows if part == "valid" else 0,
            },
        )
        yield evaluate(replace(config, evaluation=section), options)
