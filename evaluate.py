"""Perplexity of a checkpoint at several lengths, in one process and on the same text.

Several GPUs share the windows.

python deepy.py evaluate.py configs/mep.yml [--lengths 512 1024] [--output results.jsonl]
python evaluate.py --checkpoint runs/mep [--step 2000]
python evaluate.py --checkpoint runs/mep eval_tokens=65536 eval_part=test
python evaluate.py --checkpoint runs/mep --protocol equal_tokens tail --window none train_length
python evaluate.py --checkpoint runs/mine pos_emb_file=my_encoding.py
python evaluate.py --checkpoint runs/mep --tasks lambada_openai --lengths 512 2048

Give the same call again after an interruption: it goes on where it was.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron.config import Config
from megatron.entry import run
from megatron.errors import UserError
from megatron.evaluation.evaluate_checkpoint import (
    Evaluation,
    evaluate,
    evaluate_as_published,
)
from megatron.evaluation.options import Options, add_options, number
from megatron.harness.tasks import Tasks, evaluate_tasks
from megatron.harness.tasks import table as table_of_tasks
from megatron.parallel.grid import here
from megatron.report.curves import plot_by_position, plot_perplexity
from megatron.results.row import Row
from megatron.results.table import by_length, lines_of_bits, table


def add_all_options(parser: argparse.ArgumentParser) -> None:
    """The words of evaluate.py beside files and settings."""
    add_options(parser)
    add = parser.add_argument
    tasks = "tasks of lm-evaluation-harness in place of perplexity (docs/harness.md)"
    add("--tasks", nargs="+", metavar="NAME", help=tasks)
    folder = "task files of your own; the Python that they name is run"
    add("--task-folder", type=Path, metavar="DIR", help=folder)
    limit = "documents of each task at most, to try it out"
    add("--limit", type=number(1, 10**9), metavar="N", help=limit)
    shots = "examples in each prompt; default: the task's"
    add("--shots", type=number(0, 1000), metavar="N", help=shots)


def main(config: Config | None, arguments: argparse.Namespace) -> None:
    """Measure, and from the first process show what was measured."""
    asks_for_nothing = not (arguments.protocol or arguments.lengths or arguments.checkpoint)
    if config is not None and config.only_measures and asks_for_nothing:
        as_published(config)
        return
    if arguments.tasks:
        ask_tasks(config, arguments)
        return
    for option in ("task_folder", "limit", "shots"):
        if getattr(arguments, option) is not None:
            name = option.replace("_", "-")
            raise UserError(f"--{name}: belongs to --tasks - name tasks too, or leave it out")
    evaluation = evaluate(config, Options.of(arguments))
    if here().first:
        show(evaluation)


def ask_tasks(config: Config | None, arguments: argparse.Namespace) -> None:
    """Ask tasks of the harness, and from the first process show what they gave."""
    if arguments.protocol:
        raise UserError("--protocol: tasks have protocols of their own; leave it out")
    tasks = Tasks(arguments.tasks, arguments.task_folder, arguments.limit, arguments.shots)
    done = evaluate_tasks(config, tasks, Options.of(arguments))
    if here().first:
        print(table_of_tasks(done.rows))
        print(f"written to {done.output}")


def as_published(config: Config) -> None:
    """Measure as KERPLE and MEP do with train-iters: 0, and show it."""
    for evaluation in evaluate_as_published(config):
        if here().first:
            show(evaluation)


def show(evaluation: Evaluation) -> None:
    """Print a table for each protocol; draw a plot for each file and protocol beside the file."""
    lengths = evaluation.lengths
    rows_of_files = {file: by_length(rows, lengths) for file, rows in evaluation.rows.items()}
    by_protocol: dict[str, list[Row]] = {}
    for rows in rows_of_files.values():
        for row in rows:
            by_protocol.setdefault(row.get("protocol", ""), []).append(row)
    for rows in by_protocol.values():
        print("\n".join([table(rows), *lines_of_bits(rows)]), end="\n\n")
    for file, rows in rows_of_files.items():
        draw(file, rows, max(lengths))


def draw(file: Path, rows: Sequence[Row], longest: int) -> None:
    """Draw each corpus and protocol of a results file beside it."""
    drawn: dict[tuple[str | None, str | None], list[Row]] = {}
    for row in rows:
        drawn.setdefault((row.get("corpus"), row.get("protocol")), []).append(row)
    corpora, protocols = {corpus for corpus, _ in drawn}, {protocol for _, protocol in drawn}
    for (corpus, protocol), own in drawn.items():
        words = []
        if len(corpora) > 1:
            words.append(re.sub(r"[^\w.+-]+", "_", str(corpus)))
        if len(protocols) > 1:
            words.append(str(protocol))
        picture = file.with_suffix(".".join(["", *words, "png"]))
        by_position = [
            row for row in own if row.get("position_losses") and row["length"] == longest
        ]
        name = own[0]["pos_emb"]
        if by_position:
            plot_by_position(by_position, picture, title=f"Loss of {name} by position")
        else:
            plot_perplexity(own, picture, title=f"Perplexity of {name} at other lengths")
        print(f"written to {file} and {picture}")


def command() -> NoReturn:
    run(main, purpose="evaluate", options=add_all_options, config_needed=False)


if __name__ == "__main__":
    command()
