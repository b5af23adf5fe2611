"""Measure a checkpoint's perplexity at several lengths, or run lm-eval tasks.

Several GPUs share the windows.

python deepy.py evaluate.py configs/mep.yml [--lengths 512 1024] [--output results.jsonl]
python evaluate.py --checkpoint runs/mep [--step 2000]
python evaluate.py --checkpoint runs/mep eval_tokens=65536 eval_part=test
python evaluate.py --checkpoint runs/mep --protocol equal_tokens tail --window none train_length
python evaluate.py --checkpoint runs/mine pos_emb_file=my_encoding.py
python evaluate.py --checkpoint runs/mep --tasks lambada_openai --lengths 512 2048

Options from --window to --method take several values, each measured with the same weights.
After an interruption, give the same command again: it continues.
"""

import argparse
from typing import NoReturn

from megatron.config import Config
from megatron.entry import run
from megatron.errors import UserError
from megatron.evaluation.evaluate_checkpoint import (
    MeasuredRows,
    evaluate,
    evaluate_as_published,
)
from megatron.evaluation.options import Options, add_options, number
from megatron.parallel.grid import here
from megatron.results.row import Row
from megatron.results.table import by_length, table, with_bits


def add_all_options(parser: argparse.ArgumentParser) -> None:
    """The words of evaluate.py beside files and settings."""
    add_options(parser)
    add = parser.add_argument
    tasks = "tasks of lm-evaluation-harness in place of perplexity (docs/harness.md)"
    add("--tasks", "--eval-tasks", nargs="+", metavar="NAME", help=tasks)
    limit = "documents of each task at most, to try it out"
    add("--limit", type=number(1, 10**9), metavar="N", help=limit)
    shots = "examples in each prompt; default: the task's"
    add("--num-fewshot", type=number(0, 1000), metavar="N", help=shots)


def main(config: Config | None, arguments: argparse.Namespace) -> None:
    """Measure, and from the first process show what was measured."""
    options = Options.of(arguments)
    asks_for_nothing = not (arguments.protocol or arguments.lengths or arguments.checkpoint)
    if arguments.tasks:
        if arguments.protocol:
            raise UserError("--protocol: tasks have protocols of their own; leave it out")
        from megatron.harness import evaluate_tasks  # needs packages that perplexity does not

        limit, shots = arguments.limit, arguments.num_fewshot
        tables, output = evaluate_tasks(config, arguments.tasks, options, limit=limit, shots=shots)
        if here().first:
            print(f"{tables}\nwritten to {output}")
        return
    if arguments.limit is not None or arguments.num_fewshot is not None:
        raise UserError("--limit, --num-fewshot: belong to --tasks - name tasks, or leave them out")
    if config is not None and config.only_measures and asks_for_nothing:
        as_published(config)
        return
    evaluation = evaluate(config, options)
    if here().first:
        show(evaluation)


def as_published(config: Config) -> None:
    """Measure as KERPLE and MEP do with train-iters: 0, and show it."""
    for evaluation in evaluate_as_published(config):
        if here().first:
            show(evaluation)


def show(evaluation: MeasuredRows) -> None:
    """Print tables for each protocol, and the files of the rows."""
    by_protocol: dict[str, list[Row]] = {}
    for rows in evaluation.rows.values():
        for row in by_length(rows, evaluation.lengths):
            by_protocol.setdefault(row.get("protocol", ""), []).append(row)
    for rows in by_protocol.values():
        print(table(rows), end="\n\n")
        if counted := with_bits(rows):
            print(table(counted, bits_per_byte=True), end="\n\n")
    for file in evaluation.rows:
        print(f"written to {file}")


def command() -> NoReturn:
    run(main, purpose="evaluate", options=add_all_options, config_needed=False)


if __name__ == "__main__":
    command()
