"""Measure a checkpoint's perplexity at several lengths, or run lm-eval tasks.

Several GPUs share the windows.

python deepy.py evaluate.py configs/mep.yml [--lengths 512 1024] [--output results.jsonl]
python evaluate.py --checkpoint runs/mep [--step 2000]
python evaluate.py --checkpoint runs/mep eval_tokens=65536 eval_part=test
python evaluate.py --checkpoint runs/mep --protocol equal_tokens tail --window none train_length
python evaluate.py --checkpoint runs/mine pos_emb_file=my_encoding.py
python evaluate.py --checkpoint runs/mep --tasks lambada_openai --lengths 512 2048

The options from --window to --method accept several values, each measured with the same weights.
After an interruption, run the same command again to continue.
"""

import argparse

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
    """The options of evaluate.py, in addition to files and settings."""
    add_options(parser)
    add = parser.add_argument
    add(
        "--tasks",
        "--eval-tasks",
        nargs="+",
        metavar="NAME",
        help="run tasks of lm-evaluation-harness instead of measuring perplexity (docs/harness.md)",
    )
    add(
        "--limit",
        type=number(1, 10**9),
        metavar="N",
        help="use at most N documents of each task, to try it out",
    )
    add(
        "--num-fewshot",
        type=number(0, 1000),
        metavar="N",
        help="examples in each prompt; default: as the task says",
    )


def main(config: Config | None, arguments: argparse.Namespace) -> None:
    """Measure; the first process then shows the results."""
    options = Options.of(arguments)
    asks_for_nothing = not (arguments.protocol or arguments.lengths or arguments.checkpoint)
    if arguments.tasks:
        if arguments.protocol:
            raise UserError(
                "--protocol: has no effect on tasks, which have their own protocols; remove it"
            )
        from megatron.harness import evaluate_tasks  # needs packages that perplexity doesn't need

        limit, shots = arguments.limit, arguments.num_fewshot
        tables, output = evaluate_tasks(config, arguments.tasks, options, limit=limit, shots=shots)
        if here().first:
            print(f"{tables}\nwritten to {output}")
        return
    if arguments.limit is not None or arguments.num_fewshot is not None:
        raise UserError(
            "--limit, --num-fewshot: only work with --tasks - name tasks, or remove them"
        )
    if config is not None and config.only_measures and asks_for_nothing:
        as_published(config)
        return
    evaluation = evaluate(config, options)
    if here().first:
        show(evaluation)


def as_published(config: Config) -> None:
    """Measure as KERPLE and MEP do with train-iters: 0, and show the results."""
    for evaluation in evaluate_as_published(config):
        if here().first:
            show(evaluation)


def show(evaluation: MeasuredRows) -> None:
    """Print a table for each protocol, and the files with the rows."""
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


if __name__ == "__main__":
    run(main, purpose="evaluate", options=add_all_options, config_needed=False)
