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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from megatron.config import Config
from megatron.entry import add_number, run
from megatron.errors import UserError
from megatron.evaluation.protocols import PROTOCOLS
from megatron.evaluation.published import evaluate_as_published
from megatron.evaluation.run import DTYPES, AttentionWindow, Evaluation, Options, evaluate
from megatron.harness.run import Tasks, evaluate_tasks
from megatron.harness.run import table as table_of_tasks
from megatron.model.methods import METHODS, MOST, fault_of_name
from megatron.parallel.grid import here
from megatron.report.curves import plot_by_position, plot_perplexity
from megatron.results.row import Row
from megatron.results.table import by_length, lines_of_bits, table
from megatron.training.metrics import send_results


def add_options(parser: argparse.ArgumentParser) -> None:
    """The words of evaluate.py beside files and settings; their defaults are those of Options."""
    add = parser.add_argument
    folder = "folder of a run or of one checkpoint; default: load, else save"
    add("--checkpoint", metavar="DIR", help=folder)
    add("--step", type=int, metavar="N", help="which checkpoint of the run; default: the latest")
    lengths = "context lengths; default: eval_lengths"
    add("--lengths", type=int, nargs="+", metavar="L", help=lengths)
    output = "JSON lines; the plot goes beside it as .png"
    add("-o", "--output", type=Path, metavar="FILE", help=output)
    protocols = (
        "default: equal_tokens, or with train_iters: 0 and no --lengths what KERPLE and MEP do;"
        " docs/evaluation.md says what each answers"
    )
    add(
        "--protocol",
        nargs="+",
        choices=tuple(PROTOCOLS),
        help=protocols,
    )
    add_number(parser, "--windows", Options.windows, "paper: windows per length")
    add_number(parser, "--start", Options.start, "paper: first window")
    add_number(parser, "--tail", Options.tail, "tail: scored tokens of a window")
    stride = "sliding: tokens that windows move by; default: half of each"
    add("--stride", type=int, metavar="N", help=stride)
    window = "key window, each value on the same weights: N, train_length or none"
    add("--window", nargs="+", metavar="W", help=window)
    add("--logn-scale", nargs="+", choices=("off", "on"), help="key logn_scale, likewise")
    add("--paper-precision", nargs="+", choices=("off", "on"), help="key paper_precision, likewise")
    sinks = "first tokens that stay visible beside --window (StreamingLLM), likewise: N or none"
    add("--sinks", nargs="+", metavar="N", help=sinks)
    clip = "tables by distance keep their value from D on, likewise: D or none"
    add("--clip-distance", nargs="+", metavar="D", help=clip)
    method = f"for longer texts, likewise: none or {', '.join(METHODS)} (docs/longer_texts.md)"
    add("--method", nargs="+", metavar="M", help=method)
    dtype = "of the model; tables stay float32"
    add("--dtype", choices=tuple(DTYPES), default=Options.dtype, help=dtype)
    _add_tasks(parser)


def _add_tasks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    tasks = "tasks of lm-evaluation-harness in place of perplexity (docs/harness.md)"
    add("--tasks", nargs="+", metavar="NAME", help=tasks)
    folder = "task files of your own; the Python that they name is run"
    add("--task-folder", type=Path, metavar="DIR", help=folder)
    add("--limit", type=int, metavar="N", help="documents of each task at most, to try it out")
    add("--shots", type=int, metavar="N", help="examples in each prompt; default: the task's")


def main(config: Config | None, arguments: argparse.Namespace) -> None:
    """Measure, and from the first process show what was measured."""
    asks_for_nothing = not (arguments.protocol or arguments.lengths or arguments.checkpoint)
    if config is not None and config.only_measures and asks_for_nothing:
        as_published(config)
        return
    if arguments.tasks:
        ask_tasks(config, arguments)
        return
    check_without_tasks(arguments)
    evaluation = evaluate(config, options_of(arguments))
    if here().first:
        show(evaluation)
        send_results(evaluation.rows, None if config is None else config.logging)


def ask_tasks(config: Config | None, arguments: argparse.Namespace) -> None:
    """Ask tasks of the harness, and from the first process show what they gave."""
    if arguments.protocol:
        raise UserError("--protocol: tasks have protocols of their own; leave it out")
    tasks = Tasks(arguments.tasks, arguments.task_folder, arguments.limit, arguments.shots)
    done = evaluate_tasks(config, tasks, options_of(arguments))
    if here().first:
        print(table_of_tasks(done.rows))
        print(f"written to {done.output}")


def check_without_tasks(arguments: argparse.Namespace) -> None:
    """UserError for options that belong to tasks where none is asked."""
    options = {
        "--task-folder": arguments.task_folder,
        "--limit": arguments.limit,
        "--shots": arguments.shots,
    }
    for option, value in options.items():
        if value is not None:
            raise UserError(f"{option}: belongs to --tasks - name tasks too, or leave it out")


def as_published(config: Config) -> None:
    """Measure as KERPLE and MEP do with train-iters: 0, and show it."""
    for evaluation in evaluate_as_published(config):
        if here().first:
            show(evaluation)


def options_of(arguments: argparse.Namespace) -> Options:
    """The words of the command line; UserError for what is no number of tokens."""
    sinks, clips = arguments.sinks or (), arguments.clip_distance or ()
    methods = arguments.method or ()
    check_words({"--sinks": sinks, "--clip-distance": clips}, methods)
    return Options(
        checkpoint=arguments.checkpoint,
        step=arguments.step,
        lengths=arguments.lengths or (),
        output=arguments.output,
        protocols=arguments.protocol or Options.protocols,
        attention_windows=[window_of(text) for text in arguments.window or ()],
        logn_scales=[text == "on" for text in arguments.logn_scale or ()],
        paper_precisions=[text == "on" for text in arguments.paper_precision or ()],
        sinks=[number_of(text) for text in sinks],
        clip_distances=[number_of(text) for text in clips],
        methods=[None if text == "none" else text for text in methods],
        dtype=arguments.dtype,
        windows=arguments.windows,
        start=arguments.start,
        tail=arguments.tail,
        stride=arguments.stride,
    )


def check_words(numbers: Mapping[str, Sequence[str]], methods: Sequence[str]) -> None:
    """UserError that names every word that is no number of tokens, no method and not none."""
    faults = []
    for option, texts in numbers.items():
        for text in texts:
            is_number = text.isdecimal() and len(text) <= 8 and 1 <= int(text) <= MOST
            if not is_number and text != "none":
                word = f"{option} {ascii(text)[1:-1][:40]}"
                faults.append(f"{word}: give a number of tokens of 1 to {MOST}, or none")
    for text in methods:
        fault = fault_of_name(text)
        if fault is not None and text != "none":
            faults.append(fault)
    if faults:
        raise UserError("\n".join(faults))


def number_of(text: str) -> int | None:
    """The number that a checked word means; None: without."""
    return None if text == "none" else int(text)


def window_of(text: str) -> AttentionWindow:
    """The value of the key `window` that a word names; UserError for any other word."""
    if text == "none":
        return None
    if text == "train_length":
        return "train_length"
    if not text.isdecimal() or int(text) < 1:
        raise UserError(
            f"--window {text}: give a number of tokens of at least 1, train_length or none"
        )
    return int(text)


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
            plot_by_position(by_position, picture, title=f"Perplexity of {name} by position")
        else:
            plot_perplexity(own, picture, title=f"Perplexity of {name} at other lengths")
        print(f"written to {file} and {picture}")


def command() -> NoReturn:
    run(main, purpose="evaluate", options=add_options, config_needed=False)


if __name__ == "__main__":
    command()
