"""Tasks of lm-evaluation-harness on one checkpoint: from names to rows, JSON lines of a file."""

import json
import logging
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Required, cast
from unittest import mock
from uuid import uuid4

import numpy as np

from megatron.config import Config
from megatron.data.tokenizers.tokenizer import Tokenizer
from megatron.errors import UserError, did_you_mean, in_words
from megatron.evaluation.evaluate_checkpoint import variants
from megatron.evaluation.methods import MeasuredAttention
from megatron.evaluation.options import DTYPES, Options
from megatron.files import check_output
from megatron.folder_lock import owned_file
from megatron.generation.with_tokenizer import opened_with_tokenizer
from megatron.parallel.grid import device_alone
from megatron.parallel.threads import count_parameters, use_threads
from megatron.results.files import LINES, has_lines, read_lines, write_lines
from megatron.results.row import Facts, Question
from megatron.results.table import in_columns

PACKAGE = "lm_eval"
MOST_NAMES = 60  # characters of the tasks in the name of a file
COLUMNS = ("task", "metric", "filter", "shots", "documents", "length", "value", "stderr")
ANSWERS = ("value", "stderr", "of_documents", "commit", "code", "attention_backend", "device")
SEEDS = (0, 1234)  # of random and numpy, as the harness sets them
SHORTEST = 512  # tokens of RULER's texts
TRACKING = {"ruler", "ruler_vt", "longcxt"}  # names that mean RULER's variable tracking, too

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tasks:
    """Tasks to be asked, beside the options of every evaluation.

    names: of tasks, groups or tags of the harness; folder: of a user's own task files, which may
    name Python functions beside them, so they are run; limit: documents of each task at most;
    shots: examples in each prompt; None: what the task says; metadata: given to tasks that make
    or choose their texts by it
    """

    names: Sequence[str]
    folder: Path | None = None
    limit: int | None = None
    shots: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


class TaskRow(Question, total=False):
    """One metric of one task on one checkpoint, which sees texts of at most `length` tokens."""

    task: Required[str]
    metric: Required[str]  # such as acc
    filter: str  # what the harness did to answers first; none: nothing
    length: Required[int]
    stride: int  # of rolling windows
    value: Required[float | None]
    stderr: float | None  # as the harness estimates it
    documents: int  # that were asked
    of_documents: int  # that the task has
    shots: int  # examples in each prompt
    metadata: str  # JSON, if the tasks were given any
    task_version: str
    harness: str  # version of lm-evaluation-harness


def evaluate_tasks(
    config: Config | None, tasks: Tasks, options: Options
) -> tuple[list[TaskRow], Path]:
    """Ask the tasks at every length on every variant; rows, and the file that they were added to.

    Rows are written as soon as they are measured.
    options: checkpoint, step, lengths, output, dtype, stride and variants, as in an evaluation;
    lengths: tokens that the model sees at most, the training's if none is given
    Raises UserError, before anything is computed, for what cannot be asked or written.
    """
    try:
        harness_version = version(PACKAGE)
    except PackageNotFoundError:
        raise UserError(
            "--tasks: lm-evaluation-harness is not installed - pip install 'lm-eval>=0.4.13,<0.5'"
        ) from None
    if tasks.folder is not None and not tasks.folder.is_dir():
        raise UserError(f"--task-folder: {tasks.folder} is not a folder with task files")
    device = device_alone()
    checkpoint, tokenizer = opened_with_tokenizer(config, options.checkpoint, options.step)
    model = checkpoint.model
    lengths = sorted(set(options.lengths)) or [model.train_length]
    attention_of_config = MeasuredAttention.of(checkpoint.config.attention)
    positions = [placed.position for placed in model.placed]
    several = variants(attention_of_config, options, positions, model.train_length)
    stride = options.protocol_options.get("stride")
    for length in lengths:
        model.check_length(length)
        if stride is not None and stride > length:
            raise UserError(f"--stride {stride}: must be 1 to {length}, a window's length")
    output = options.output
    if output is None:
        names = "+".join(sorted(name.replace("/", "_") for name in tasks.names))
        # Not beside rows of perplexity: a pattern of all files there is what compare.py is given.
        folder = checkpoint.path.parent / "tasks"
        output = folder / f"{checkpoint.path.name}-{names[:MOST_NAMES]}.jsonl"
    check_output(output, LINES)
    existing_rows(output)
    manager, loaded = loaded_tasks(tasks, tokenizer, lengths[0])

    from lm_eval.evaluator import simple_evaluate

    from megatron.harness.adapter import Harness

    model.to(device, DTYPES[options.dtype])
    use_threads(count_parameters(model), device)
    batch_tokens = checkpoint.config.evaluation.eval_batch_tokens
    rows: list[TaskRow] = []
    with owned_file(output, "--output"):
        for attention, length in product(several, lengths):
            model.use_attention(attention)
            step = stride or length
            logger.info("%s at %d tokens", ", ".join(tasks.names), length)
            with failures(tasks, "failed"):
                results: Any = simple_evaluate(
                    model=Harness(model, tokenizer, length, step, batch_tokens),
                    tasks=loaded,
                    num_fewshot=tasks.shots,
                    limit=tasks.limit,
                    task_manager=manager,
                    log_samples=False,
                )
            facts = {
                **checkpoint.facts(attention),
                **checkpoint.begin_of_text,
                "protocol": "tasks",
                "length": length,
                "stride": step,
                "harness": harness_version,
            }
            if tasks.metadata:
                facts["metadata"] = json.dumps(tasks.metadata, sort_keys=True)
            measured = rows_of(results, cast("Facts", facts))
            rows += measured
            # A row replaces the one that answers the same question.
            merged = {question_of(row): row for row in (*existing_rows(output), *measured)}
            write_lines(output, merged.values())
    return rows, output


def loaded_tasks(tasks: Tasks, tokenizer: Tokenizer, window: int) -> tuple[Any, list[Any]]:
    """The harness's manager of its own tasks, or of those of the user's folder, and what it loads.

    window: tokens that the model sees at least
    Raises UserError for a name that is not known, and for a task that cannot be loaded.
    """
    from lm_eval.tasks import TaskManager
    from transformers import AutoTokenizer

    for name in ("lm_eval", "datasets"):  # they name each default of each task
        logging.getLogger(name).setLevel(logging.ERROR)
    # RULER's tasks count tokens by a tokenizer that transformers opens by its name.
    name_of_ours = f"of the checkpoint {uuid4()}"  # a new name each time: what was opened is cached
    manager: Any = TaskManager(
        include_path=None if tasks.folder is None else str(tasks.folder),
        include_defaults=tasks.folder is None,  # thousands of files, which take seconds to read
        metadata={**tasks.metadata, "tokenizer": name_of_ours},
    )
    for name in tasks.names:
        if name not in manager.all_tasks:
            raise UserError(
                f"--tasks: no task is called {name} - {did_you_mean(name, manager.all_tasks)}"
                " `lm-eval ls tasks` lists them; of a --task-folder, its own alone are known"
            )
    by_transformers = AutoTokenizer.from_pretrained

    def opened(name: str, **options: Any) -> Any:
        if name != name_of_ours:
            return by_transformers(name, **options)
        check_ruler(tasks, tokenizer, window)
        return lambda text: SimpleNamespace(input_ids=tokenizer.encode(text))

    random.seed(SEEDS[0])  # of texts that tasks make up
    np.random.seed(SEEDS[1])
    with (
        failures(tasks, "cannot be loaded"),
        mock.patch.object(AutoTokenizer, "from_pretrained", opened),
        redirect_stdout(sys.stderr),  # some tasks print while they make texts
    ):
        loaded = manager.load(list(tasks.names))
    members = {name for group in loaded["groups"].values() for name in group.child_names}
    everything = loaded["groups"] | loaded["tasks"]
    return manager, [task for name, task in everything.items() if name not in members]


def check_ruler(tasks: Tasks, tokenizer: Tokenizer, window: int) -> None:
    """UserError for lengths of RULER's texts that the model cannot see, or that nothing fits.

    Where nothing fits, the harness looks for a shorter text without end, and ignores ctrl-C
    (its issue 2963).
    """
    from lm_eval.tasks.ruler import common_utils, vt_utils

    lengths = tasks.metadata.get("max_seq_lengths", common_utils.DEFAULT_SEQ_LENGTHS)
    longest, shortest = max(lengths), min(lengths)
    if longest > window:
        raise UserError(
            f"--metadata max_seq_lengths: the model sees --lengths {window}, less than RULER's"
            f" {longest} - ask for shorter texts, or give --lengths {longest + 128}"
        )
    example, needed = 0, SHORTEST
    if TRACKING & set(tasks.names):
        sizes = []
        for count, is_example in ((5, True), (10, False)):
            text, names = vt_utils.generate_input_output(count, 1, 4, is_icl=is_example)
            size = len(tokenizer.encode(f"{text} {names}"))
            sizes.append(int(1.1 * size) + 30)  # names are random
        example, needed = sizes[0], sum(sizes)
    if example > 500:
        raise UserError(
            f"--tasks: ruler_vt's example has {example} tokens with this tokenizer, and 500 are its"
            " most - name the other tasks of RULER"
        )
    if shortest < needed:
        raise UserError(
            f"--metadata max_seq_lengths: RULER's texts need {needed} tokens or more, not"
            f" {shortest} - ask for longer ones, or leave ruler_vt out, which needs most"
        )


@contextmanager
def failures(tasks: Tasks, problem: str) -> Iterator[None]:
    """Make one message of whatever a task's code and the hub's library raise."""
    try:
        yield
    except UserError:
        raise
    except Exception as fault:
        raise UserError(
            f"--tasks: {', '.join(tasks.names)} {problem} ({type(fault).__name__}:"
            f" {in_words(fault)}) - correct a task file of your own, or install what it needs;"
            " data of a hub are downloaded once, with a network"
        ) from fault


def rows_of(results: Mapping[str, Any], facts: Facts) -> list[TaskRow]:
    """The rows of one call of the harness; facts: what all of them share."""
    rows = []
    for task, metrics in results["results"].items():
        counts = results["n-samples"].get(task, {})
        about = {
            "documents": counts.get("effective"),
            "of_documents": counts.get("original"),
            "shots": results["n-shot"].get(task),
        }
        about = {key: value for key, value in about.items() if value is not None}
        for name, value in metrics.items():
            metric, _, which = name.partition(",")
            if not which or metric.endswith("_stderr"):
                continue
            if metric.isdigit() and value == -1:  # RULER: no text has this length
                continue
            row = {**facts, "task": task, "task_version": str(results["versions"].get(task))}
            row |= {**about, "metric": metric, "filter": which}
            stderr = metrics.get(f"{metric}_stderr,{which}")  # "N/A" for none
            for key, number in (("value", value), ("stderr", stderr)):
                row[key] = float(number) if isinstance(number, int | float) else None
            rows.append(cast("TaskRow", row))
    return rows


def question_of(row: TaskRow) -> str:
    """All that a row says beside its answer."""
    return repr(sorted((key, value) for key, value in row.items() if key not in ANSWERS))


def existing_rows(path: Path) -> list[TaskRow]:
    """The rows of a file, none if it is absent; UserError if it holds something else."""
    if not has_lines(path):
        return []
    lines = read_lines(path, kind=TaskRow, writer="evaluate.py --tasks")
    return [cast("TaskRow", line) for line in lines]


def table(rows: Iterable[TaskRow]) -> str:
    """A line for each row."""
    lines: list[Sequence[str]] = [COLUMNS]
    for row in rows:
        texts = []
        for column in COLUMNS:
            value = row.get(column)
            text = "n/a" if value is None else str(value)
            texts.append(f"{value:.4f}" if isinstance(value, float) else text)
        lines.append(texts)
    return "\n".join(in_columns(lines))
