"""How a command ends: with its status, or with one message and no traceback on the screen.

Standard library alone, so that light commands stay light.
"""

import errno
import faulthandler
import functools
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, ParamSpec

from megatron.commit import commit
from megatron.errors import UserError, cannot_write, cure, visible

HEAD_START = 5  # seconds in which the first process may report a fault that all have
FAILED = 1
INTERRUPTED = 130  # the shell's exit status after ctrl-C
READER_HAS_GONE = 141  # the shell's exit status of a program before `| head`
LONGEST_LINE = 300  # characters of an exception's text in the message
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""How gloo says that another rank has ended."""

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

    folder: where that file goes, such as the run's; where it cannot be written, the current
    folder, then the one for temporary files
    """

    def __init__(self) -> None:
        self.folder: Path | None = None

    def status_of(self, command: Callable[[], int | None]) -> int:
        """The exit status of a command, which is 1 after any message."""
        watch_for_crashes()
        try:
            with self._reporting_threads():
                return _with_whole_output(command)
        except KeyboardInterrupt:
            return INTERRUPTED
        except UserError as fault:
            print_fault(str(fault))
        except Exception as fault:
            if _reader_has_gone():
                _forget_lost_output()
                return READER_HAS_GONE
            self._report(fault)
        _forget_lost_output()
        return FAILED

    @contextmanager
    def _reporting_threads(self) -> Iterator[None]:
        """What ends a thread inside the block is reported too; the process goes on."""

        def report(ended: threading.ExceptHookArgs) -> None:
            if isinstance(ended.exc_value, Exception):
                self._report(ended.exc_value)

        before = threading.excepthook
        threading.excepthook = report
        try:
            yield
        finally:
            threading.excepthook = before

    def _report(self, fault: Exception) -> None:
        explained = _file_fault(fault)
        if explained is not None:
            print_fault(explained)
            return
        # The traceback is written before this process waits: a launcher may end it meanwhile.
        details = _described(fault)
        path = self._write(details)
        explained = _limit_fault(fault)
        if explained is not None:
            print_fault(explained if path is None else f"{explained}; the traceback is in {path}")
            return
        text = f"internal error: {_one_line(fault)}"
        if path is None:
            text += f" - please report it with this, which no folder could take:\n{details}"
        else:
            text += f" - the traceback is in {path}; please report it with that file"
        print_fault(text, consequence=_lost_another_rank(fault))

    def _write(self, details: str) -> Path | None:
        """The file that took the details of a fault; None where no folder could."""
        for folder in (self.folder, Path.cwd(), Path(tempfile.gettempdir())):
            if folder is None or not folder.is_dir():
                continue
            path = folder / _file_name()
            try:
                path.write_text(details, encoding="utf-8")
            except OSError:
                _remove(path)  # what a full disk has left of it
                continue
            return path
        return None


def print_fault(text: str, *, consequence: bool = False) -> None:
    """Print a fault to stderr; a fault that all processes have is printed once.

    Other processes wait for the first one. If it failed too, the launcher ends them meanwhile.
    consequence: of another process's fault, which is to be printed before
    """
    rank = _rank()
    if rank:
        time.sleep(HEAD_START)
        text = f"rank {rank}: {text}"
    if consequence:
        time.sleep(HEAD_START)
        time.sleep(HEAD_START)
    print_line(text)


def print_line(text: str) -> None:
    """Print to stderr, where there is one; names in the text cannot control the terminal."""
    try:
        print(visible(text), file=sys.stderr, flush=True)
    except OSError:  # closed, full, or without a reader: the exit status still tells
        _forget(sys.stderr)


def watch_for_crashes() -> None:
    """Let a crash in compiled code, and SIGUSR2 at any time, print what every thread is doing."""
    error_output = sys.__stderr__
    if error_output is None or faulthandler.is_enabled():
        return
    faulthandler.enable(error_output)
    faulthandler.register(signal.SIGUSR2, error_output)


# --- Messages ---


def _file_fault(fault: Exception) -> str | None:
    """The message for a fault of a disk or a path; None for any other fault."""
    if not isinstance(fault, OSError):
        return None
    what_to_do = cure(fault)
    if what_to_do is None:
        return None
    if fault.filename is None and fault.errno not in OF_ANY_FILE:
        return None
    place = _command() if fault.filename is None else os.fsdecode(fault.filename)
    return f"{place}: {fault.strerror} - {what_to_do}"


OF_ANY_FILE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE)
"""Faults that are no mistake of the program even where the file is unknown."""


def _limit_fault(fault: Exception) -> str | None:
    """The message for memory that did not suffice or input that is too deep; None for others."""
    text = _first_line(fault)
    if _is_out_of_gpu_memory(fault):
        return (
            f"{_command()}: the GPU's memory does not suffice ({text}) - lower"
            " train_micro_batch_size_per_gpu or seq_length in training, eval_batch_tokens or the"
            " lengths in evaluation, or give the GPU to this process alone"
        )
    if _is_out_of_memory(fault):
        return (
            f"{_command()}: the machine's memory does not suffice ({text}) - lower the sizes that"
            " are configured or num_workers, or end other programs"
        )
    if isinstance(fault, RecursionError):
        return (
            f"{_command()}: the input is nested too deeply ({text}) - write it flat;"
            " a list or an alias may contain itself"
        )
    return None


def _is_out_of_gpu_memory(fault: Exception) -> bool:
    torch = sys.modules.get("torch")  # where it was not imported, it raised nothing
    return torch is not None and isinstance(fault, torch.OutOfMemoryError)


def _is_out_of_memory(fault: Exception) -> bool:
    if isinstance(fault, MemoryError):
        return True
    if isinstance(fault, OSError):
        return fault.errno == errno.ENOMEM
    return isinstance(fault, RuntimeError) and "DefaultCPUAllocator" in str(fault)


def _lost_another_rank(fault: Exception) -> bool:
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    text = str(fault)
    return several and any(words in text for words in LOST)


def _one_line(fault: Exception) -> str:
    text = _first_line(fault)
    kind = type(fault).__name__
    return f"{kind}: {text}" if text else kind


def _first_line(fault: Exception) -> str:
    lines = str(fault).strip().splitlines()
    return lines[0][:LONGEST_LINE] if lines else ""


# --- The file ---


def _file_name() -> str:
    moment = f"{datetime.now():%Y%m%d-%H%M%S}"
    rank = f"-rank{_rank()}" if "RANK" in os.environ else ""
    return f"traceback-{moment}-{os.getpid()}{rank}.txt"


def _described(fault: Exception) -> str:
    """The traceback without values of variables, and the versions that it belongs to."""
    versions = [f"python {sys.version.split()[0]}"]
    for name in ("torch", "deepspeed", "numpy"):
        module = sys.modules.get(name)
        if module is not None:
            versions.append(f"{name} {module.__version__}")
    head = f"{_command()}, commit {commit() or 'unknown'}, {', '.join(versions)}"
    return f"{head}\n\n{''.join(traceback.format_exception(fault))}"


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # a folder that cannot be written has none


def _command() -> str:
    return Path(sys.argv[0]).name


def _rank() -> int:
    text = os.environ.get("RANK", "")
    return int(text) if text.isdecimal() else 0


# --- Standard output ---


def _with_whole_output(command: Callable[[], int | None]) -> int:
    """The status of a command whose output has arrived, or the exception that says it has not."""
    try:
        status = command() or 0
    except SystemExit:  # `--help | head`
        _flush()
        raise
    _flush()
    return status


def _flush() -> None:
    if sys.stdout is None:  # closed by `>&-`
        return
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as fault:
        raise cannot_write("standard output", fault) from None


def _reader_has_gone() -> bool:
    """Whether stdout or stderr is a pipe that nobody reads any more, as after `| head`."""
    for stream in (sys.stdout, sys.stderr):
        descriptor = _descriptor(stream)
        if descriptor is None:
            continue
        poll = select.poll()
        poll.register(descriptor, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            return True
    return False


def _forget_lost_output() -> None:
    """Drop what cannot be written: Python would complain about it at its very end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            _forget(stream)


def _forget(stream: IO[str] | None) -> None:
    descriptor = _descriptor(stream)
    if descriptor is None:
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _descriptor(stream: IO[str] | None) -> int | None:
    """The number of a stream; None for one that is closed or kept in memory."""
    if stream is None:
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return None
