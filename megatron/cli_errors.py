"""How a command ends: with its status, or with one message and no traceback on the screen."""

import argparse
import ast
import faulthandler
import functools
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

from megatron.commit import commit
from megatron.errors import (
    CURES,
    UserError,
    closest,
    cure,
    fault_in,
    in_words,
    missing_package,
    visible,
)
from megatron.files import expanded

HEAD_START = 5  # seconds for the first process to report a fault that all processes have
FAILED = 1
INTERRUPTED = 130  # the shell's exit status after ctrl-C
READER_HAS_GONE = 141  # the shell's exit status of a program before `| head`
WRONG = re.compile(r"(?:unrecognized arguments: (?=-)|invalid choice: ')([^\s=']+)")

ENDED = {
    "--two-by-two": "use --clip-distance none 511 --logn-scale off on",
    "longppl": "docs/evaluation.md computes it with megatron.evaluation.losses",
    "--judge": "docs/evaluation.md computes LongPPL with megatron.evaluation.losses",
    "gap": "use tail",
    "--ends": "use --protocol tail",
    "--shots": "use --num-fewshot",
    "--task-folder": "export the checkpoint and use lm_eval --include_path",
    "--metadata": "export the checkpoint and use lm_eval --metadata",
    "--assume-same-tokenizer": "files without a card can be merged with others without one",
    "--tokenizer-files": "use hf download openai-community/gpt2 vocab.json merges.txt",
    "--max-document-mb": "cut documents of more than 256 MB",
    "--max-unpack-ratio": "leave it out",
    "--task-args": "docs/tasks.md prints a problem",
    "--stop": "cut the text, or export the checkpoint and use transformers' generate",
    "--repetition-penalty": "export the checkpoint and use transformers' generate",
    "--part": "give groups of files with --input and --name, and merge their token files",
    "--bits-per-byte": "use tools/show_results.py --bits-per-byte",
}
"""Options and choices that no longer exist, and what to use instead."""

Words = ParamSpec("Words")


def purpose(script: Path) -> str:
    """A command's summary: the first line of its script."""
    module = ast.parse(script.read_text(encoding="utf-8"))
    first_line, *_ = (ast.get_docstring(module) or "").splitlines()
    return first_line


def guarded(main: Callable[Words, int | None]) -> Callable[Words, int]:
    """`main` with an exit status for every exception: see `status_of`."""

    @functools.wraps(main)
    def with_status(*words: Words.args, **options: Words.kwargs) -> int:
        return status_of(lambda: main(*words, **options))

    return with_status


class CommandParser(argparse.ArgumentParser):
    """A parser that accepts --head_dim for --head-dim, and suggests options and choices.

    It expands ~ and $NAME in values of type Path and "path" (which stay text). A shell only does so
    at the start of a word without quotes.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.register("type", "path", _path)
        self.register("type", Path, lambda text: Path(_path(text)))

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        return super().add_argument(*_dashed(names), **options)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(_dashed(args), namespace)

    def parse_known_intermixed_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_intermixed_args(_dashed(args), namespace)

    def error(self, message: str) -> NoReturn:
        super().error(self.hinted(message))

    def hinted(self, message: str) -> str:
        """A message of argparse, with the option or choice that was probably meant."""
        wrong = WRONG.search(message)
        if wrong is None:
            return message
        if wrong[1] in ENDED:
            return f"{message}; it no longer exists: {ENDED[wrong[1]]}"
        choices = message.partition("choose from")[2] or self.format_usage()
        names = re.findall(r"-*\w[\w.-]*", choices)
        longer = [name for name in names if name.startswith(wrong[1])]
        meant = closest(wrong[1], names) or next(iter(longer), None)
        return f"{message}; did you mean {meant}?" if meant else message


def _dashed(words: Sequence[str] | None) -> list[str]:
    """The words of a command line, with `-` instead of `_` in the names of options."""
    words = sys.argv[1:] if words is None else words
    return [re.sub(r"^--[\w-]+", lambda name: name[0].replace("_", "-"), word) for word in words]


def _path(text: str) -> str:
    try:
        return expanded(text)
    except UserError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from None


def command_parser(text: str | None) -> CommandParser:
    """A parser for a command, whose help shows this text unchanged."""
    return CommandParser(description=text)


def status_of(command: Callable[[], int | None]) -> int:
    """The exit status of a command; an exception becomes one message on stderr and a status.

    UserError and faults of disks and memory say what to do. Any other exception is our fault and
    prints its traceback. SystemExit passes through.
    """
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        # A crash in compiled code, or SIGUSR2 at any time, prints the stack of every thread.
        faulthandler.enable(sys.__stderr__)
        faulthandler.register(signal.SIGUSR2, sys.__stderr__)
    try:
        status = command() or 0
        if sys.stdout is not None:  # it is None after `>&-`
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as fault:
        try:
            print(end="", flush=True)
        except OSError:  # output that cannot be written: Python would try again at exit
            sys.stdout = None
        if isinstance(fault, BrokenPipeError) and fault.filename is None:
            return READER_HAS_GONE
        text = explained(fault)
        if text is None:
            code = f"commit {commit() or 'unknown'}, python {sys.version.split()[0]}"
            lines = traceback.format_exception(fault)  # a sweep shows the last line
            text = f"internal error ({code})\n{''.join(lines).strip()}"
        rank = os.environ.get("RANK", "0")
        if rank != "0":
            time.sleep(HEAD_START)
            text = f"rank {rank}: {text}"
        print_line(text)
        return FAILED


def explained(fault: Exception) -> str | None:
    """The message for a fault of the user, a disk or memory; None for our own fault."""
    command = Path(sys.argv[0]).name
    reason = in_words(fault)
    torch = sys.modules.get("torch")  # if it was not imported, it raised nothing
    if isinstance(fault, UserError):
        return str(fault)
    if torch is not None and isinstance(fault, torch.OutOfMemoryError):
        return (
            f"{command}: the GPU is out of memory ({reason}) - lower"
            " train_micro_batch_size_per_gpu or seq_length in training, eval_batch_tokens or the"
            " lengths in evaluation, or let no other process use this GPU"
        )
    if isinstance(fault, MemoryError) or "DefaultCPUAllocator" in str(fault):
        return (
            f"{command}: the machine is out of memory ({reason}) - lower the configured sizes or"
            " num_workers, or end other programs"
        )
    positions = sys.modules.get("megatron.positions")  # if not imported, no user's file was run
    in_file_of_user = fault_in(positions.FILES.values(), fault) if positions else None
    if in_file_of_user:
        return f"pos_emb_file: {in_file_of_user}"
    if package := missing_package(fault):
        return f"{command}: {package}"
    if isinstance(fault, OSError) and (fault.filename is not None or fault.errno in CURES):
        return f"{os.fsdecode(fault.filename or command)}: {reason} - {cure(fault)}"
    return None


def print_line(text: str) -> None:
    """Print to stderr, if it exists; control characters in the text are escaped."""
    with suppress(OSError):  # closed, full, or without a reader: the exit status still tells
        print(visible(text), file=sys.stderr, flush=True)
