"""Tasks of lm-evaluation-harness on one checkpoint: from names to rows."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from traceback import extract_tb
from typing import Any

from megatron.config import Config
from megatron.errors import UserError
from megatron.evaluation.bounds import check_fits, check_numbers
from megatron.evaluation.opened import Trained, variant
from megatron.evaluation.run import DTYPES, Options, check_methods, variants
from megatron.folder_lock import owned_file
from megatron.generation.opened import opened_with_tokenizer
from megatron.harness.rows import TaskRow, existing_rows, rows_of, write_rows
from megatron.harness.scores import Reading
from megatron.model import AttentionSettings
from megatron.parallel.grid import Grid, here
from megatron.parallel.owned import owned_by_first
from megatron.parallel.threads import count_parameters, use_threads
from megatron.results.files import check_output
from megatron.results.row import Facts

PACKAGE = "lm_eval"
MOST_NAMES = 60  # characters of the tasks in the name of a file

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tasks:
    """What is asked for beside the options of every evaluation.

    names: of tasks, groups or tags of the harness; folder: of a user's own task files, which may
    name Python functions beside them, so they are run; limit: documents of each task at most;
    shots: examples in each prompt; None: what the task says
    """

    names: Sequence[str]
    folder: Path | None = None
    limit: int | None = None
    shots: int | None = None


@dataclass(frozen=True)
class Done:
    """The rows of one call, and the file that they were added to."""

    rows: list[TaskRow]
    output: Path


def evaluate_tasks(config: Config | None, tasks: Tasks, options: Options) -> Done:
    """Ask the tasks at every length on every variant, and write rows as soon as they are known.

    options: checkpoint, step, lengths, output, dtype, stride and variants, as in an evaluation;
    lengths: tokens that the model sees at most, the training's where none is given
    UserError, before anything is computed, for what cannot be asked or written.
    """
    check_installed()
    numbers = {"step": options.step, "lengths": options.lengths, "stride": options.stride}
    check_numbers(numbers | {"limit": tasks.limit, "shots": tasks.shots})
    _check_folder(tasks.folder)
    checkpoint, tokenizer = opened_with_tokenizer(config, options.checkpoint, options.step)
    model, grid = checkpoint.model, here()
    lengths = sorted(set(options.lengths)) or [model.train_length]
    attention_of_config = AttentionSettings.of(checkpoint.config.attention)
    several = list(variants(attention_of_config, options, model.train_length))
    check_methods(options, several, model)
    for length in lengths:
        model.check_length(length)
        _stride(length, options.stride)
    output = options.output or default_output(checkpoint, tasks)
    if grid.first:
        check_output_of_tasks(output)
    manager = manager_of(tasks)
    check_tasks(manager, tasks)
    model.to(grid.device, DTYPES[options.dtype])
    use_threads(count_parameters(model), grid.device)
    batch_tokens = checkpoint.config.evaluation.eval_batch_tokens
    rows: list[TaskRow] = []
    with owned_by_first(grid, owned_file(output, "--output")):
        for attention in several:
            model.use_attention(attention)
            for length in lengths:
                check_fits(model, length, grid.device)
                reading = Reading(length, _stride(length, options.stride), batch_tokens)
                found = _asked(checkpoint, tokenizer, manager, tasks, reading, grid)
                rows += found
                if grid.first:
                    write_rows(output, found)
    return Done(rows, output)


def check_installed() -> str:
    """The version of the harness; UserError where it is not installed."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        raise UserError(
            "--tasks: lm-evaluation-harness is not installed - pip install 'lm-eval>=0.4.13,<0.5'"
        ) from None


def _check_folder(folder: Path | None) -> None:
    """UserError for a folder that is none."""
    if folder is not None and not folder.is_dir():
        raise UserError(f"--task-folder: {folder} is no folder - name one with task files")


def _stride(length: int, stride: int | None) -> int:
    """How far rolling windows move; UserError where they would leave tokens out."""
    if stride is None:
        return length
    if stride > length:
        raise UserError(f"--stride {stride}: must be 1 to {length}, the length of a window")
    return stride


def default_output(checkpoint: Trained, tasks: Tasks) -> Path:
    """A file in the folder `tasks` of the run, named by step and tasks."""
    names = "+".join(sorted(name.replace("/", "_") for name in tasks.names))
    named = f"{checkpoint.path.name}-{names[:MOST_NAMES]}.jsonl"
    # Not beside rows of perplexity: a pattern of all files there is what compare.py is given.
    return checkpoint.path.parent / "tasks" / named


def check_output_of_tasks(output: Path) -> None:
    """UserError where rows could not be written, or would replace another kind of file."""
    existing_rows(output)
    if not output.exists():
        check_output(output)


def manager_of(tasks: Tasks) -> Any:
    """What knows all tasks, those of the user's folder too."""
    from lm_eval.tasks import TaskManager

    for name in ("lm_eval", "datasets"):  # they name each default of each task
        logging.getLogger(name).setLevel(logging.ERROR)
    folder = None if tasks.folder is None else str(tasks.folder)
    if folder is not None:
        # The harness's own thousands of files take seconds to read.
        own = TaskManager(include_path=folder, include_defaults=False)
        # A group may name tasks of the harness.
        complete = not own.all_groups or fault_of_loading(own, tasks) is None
        if set(tasks.names) <= set(own.all_tasks) and complete:
            return own
    return TaskManager(include_path=folder)


def check_tasks(manager: Any, tasks: Tasks) -> None:
    """UserError for a name that is none, and for a task that cannot be loaded."""
    known = list(manager.all_tasks)
    for name in tasks.names:
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise UserError(
                f"--tasks: no task is called {name}{hint} - `lm-eval ls tasks` lists them, and"
                " --task-folder names a folder of your own"
            )
    fault = fault_of_loading(manager, tasks)
    if fault is not None:
        raise UserError(
            f"--tasks: {', '.join(tasks.names)} cannot be loaded ({fault}) - {remedy(tasks)}"
        )


def remedy(tasks: Tasks) -> str:
    """What to do where tasks fail by themselves."""
    if tasks.folder is not None:
        return (
            f"correct its file in {tasks.folder}; where its data come from a hub, they are"
            " downloaded once, with a network"
        )
    return (
        "tasks of the harness download their data once; without a network, name task files of"
        " your own with --task-folder"
    )


def fault_of_loading(manager: Any, tasks: Tasks) -> str | None:
    """Why tasks cannot be loaded, in one line; None: they can."""
    try:
        manager.load(list(tasks.names))
    except Exception as fault:  # whatever a task's own code and the hub's library raise
        return in_a_line(fault)
    return None


def in_a_line(fault: Exception) -> str:
    """The kind of a fault and the first line of what it says."""
    said = str(fault).strip().splitlines()
    return ": ".join([type(fault).__name__, *said[:1]])


def _asked(
    checkpoint: Trained,
    tokenizer: Any,
    manager: Any,
    tasks: Tasks,
    reading: Reading,
    grid: Grid,
) -> list[TaskRow]:
    """The rows of one variant at one length; UserError where a task's own code fails."""
    from lm_eval.evaluator import simple_evaluate

    from megatron.harness import adapter

    harness = adapter.Harness(checkpoint.model, tokenizer, reading, grid)
    logger.info("%s at %d tokens", ", ".join(tasks.names), reading.length)
    try:
        results = simple_evaluate(
            model=harness,
            tasks=list(tasks.names),
            num_fewshot=tasks.shots,
            limit=tasks.limit,
            task_manager=manager,
            log_samples=False,
        )
    except Exception as fault:  # whatever a task's own code raises, and what ours does
        passed = {frame.filename for frame in extract_tb(fault.__traceback__)}
        if isinstance(fault, UserError) or adapter.__file__ in passed:
            raise
        raise UserError(
            f"--tasks: {', '.join(tasks.names)} failed ({in_a_line(fault)}) - {remedy(tasks)}"
        ) from fault
    # The harness gives results to the first process of a machine alone.
    found = [] if results is None else rows_of(results, facts_of(checkpoint, reading))
    return grid.gather(found)[0]


def facts_of(checkpoint: Trained, reading: Reading) -> Facts:
    """What every row says: model, variant, and how texts are read."""
    attention = checkpoint.model.attention
    return {
        **checkpoint.facts(),
        **checkpoint.facts_of_attention(attention),
        **variant(attention),
        "protocol": "tasks",
        "length": reading.length,
        "stride": reading.stride,
        "harness": check_installed(),
    }
