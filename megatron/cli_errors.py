"""How a command ends: with its status, or with one message and no traceback on the screen."""

import errno
import faulthandler
import functools
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import ParamSpec

from megatron.commit import commit
from megatron.errors import UserError, cure, in_words, visible

HEAD_START = 5  # seconds in which the first process may report a fault that all have
FAILED = 1
INTERRUPTED = 130  # the shell's exit status after ctrl-C
READER_HAS_GONE = 141  # the shell's exit status of a program before `| head`
LONGEST_LINE = 300  # characters of an exception's text in the message
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""How gloo says that another rank has ended."""
OF_ANY_FILE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE)
"""Faults that are no mistake of the program even if the file is unknown."""

Words = ParamSpec("Words")


def guarded(main: Callable[Words, int | None]) -> Callable[Words, int]:
    """`main` with an exit status for every exception: see LastResort."""

    @functools.wraps(main)
    def with_status(*words: Words.args, **options: Words.kwargs) -> int:
        return LastResort().status_of(lambda: main(*words, **options))

    return with_status


class LastResort:
    """Runs a command; what it raises becomes one message on stderr and an exit status.

    UserError and faults of disks and memory say what to do. Any other exception is a fault of this
    project: its traceback goes to a file. SystemExit passes.

    folder: where that file goes, such as the run's; if it cannot be written, the current folder,
    then the one for temporary files
    """

    def __init__(self) -> None:
        self.folder: Path | None = None

    def status_of(self, command: Callable[[], int | None]) -> int:
        """The exit status of a command, which is 1 after any message."""
        if sys.__stderr__ is not None and not faulthandler.is_enabled():
            # A crash in compiled code, and SIGUSR2 at any time, print what every thread is doing.
            faulthandler.enable(sys.__stderr__)
            faulthandler.register(signal.SIGUSR2, sys.__stderr__)
        try:
            try:
                status = command() or 0
            finally:
                if sys.stdout is not None:  # it is None after `>&-`
                    sys.stdout.flush()
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError as fault:
            _forget_output()
            if fault.filename is None and not _lost_another_rank(fault):
                return READER_HAS_GONE
            self._report(fault)
        except Exception as fault:
            self._report(fault)
            _forget_output()
        else:
            return status
        return FAILED

    def _report(self, fault: Exception) -> None:
        text = _explained(fault)
        if text is None:
            # The traceback is written before this process waits: a launcher may end it meanwhile.
            details = (
                f"{_command()}, commit {commit() or 'unknown'}, python {sys.version.split()[0]}"
            )
            details += "\n\n" + "".join(traceback.format_exception(fault))
            path = self._write(details)
            text = f"internal error: {type(fault).__name__}: {in_words(fault)[:LONGEST_LINE]}"
            if path is None:
                text += f" - please report it with this, which no folder could take:\n{details}"
            else:
                text += f" - the traceback is in {path}; please report it with that file"

        rank = _rank()
        if rank:
            time.sleep(HEAD_START)
            text = f"rank {rank}: {text}"
        if _lost_another_rank(fault):  # whose message is the cause
            time.sleep(2 * HEAD_START)
        print_line(text)

    def _write(self, details: str) -> Path | None:
        """The file that took the details of a fault; None if no folder could."""
        rank = f"-rank{_rank()}" if "RANK" in os.environ else ""
        name = f"traceback-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}{rank}.txt"
        for folder in (self.folder, Path.cwd(), Path(tempfile.gettempdir())):
            if folder is None or not folder.is_dir():
                continue
            path = folder / name
            try:
                path.write_text(details, encoding="utf-8")
            except OSError:
                with suppress(OSError):
                    path.unlink(missing_ok=True)  # what a full disk has left of it
                continue
            return path
        return None


def print_line(text: str) -> None:
    """Print to stderr, if there is one; names in the text cannot control the terminal."""
    with suppress(OSError):  # closed, full, or without a reader: the exit status still tells
        print(visible(text), file=sys.stderr, flush=True)


def _explained(fault: Exception) -> str | None:
    """The message for a fault of the user, a disk or the memory; None for a fault of ours."""
    if isinstance(fault, UserError):
        return str(fault)
    torch = sys.modules.get("torch")  # if it was not imported, it raised nothing
    if torch is not None and isinstance(fault, torch.OutOfMemoryError):
        return (
            f"{_command()}: the GPU's memory does not suffice ({in_words(fault)}) - lower"
            " train_micro_batch_size_per_gpu or seq_length in training, eval_batch_tokens or the"
            " lengths in evaluation, or give the GPU to this process alone"
        )
    if isinstance(fault, MemoryError) or "DefaultCPUAllocator" in str(fault):
        return (
            f"{_command()}: the machine's memory does not suffice ({in_words(fault)}) - lower the"
            " sizes that are configured or num_workers, or end other programs"
        )
    if isinstance(fault, OSError) and (what_to_do := cure(fault)):
        if fault.filename is not None:
            return f"{os.fsdecode(fault.filename)}: {fault.strerror} - {what_to_do}"
        if fault.errno in OF_ANY_FILE:
            return f"{_command()}: {fault.strerror} - {what_to_do}"
    return None


def _lost_another_rank(fault: Exception) -> bool:
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return several and any(words in str(fault) for words in LOST)


def _command() -> str:
    return Path(sys.argv[0]).name


def _rank() -> int:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


def _forget_output() -> None:
    """Drop output that cannot be written: Python would complain about it at its very end."""
    for stream in (sys.stdout, sys.stderr):
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            with suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
