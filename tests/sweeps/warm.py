"""A process that imports once what a sweep and its scripts need, and then starts sweeps at once.

For each line of its standard input, a JSON list, it forks a process in a session of its own, prints
the id, waits, and prints the exit status. The list has two files, for what the sweep prints and for
its errors, and the words of tools/sweep.py. The scripts of such a sweep are forks too, with the
lock, the group and the signals that subprocess.Popen would give them.
"""

import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from types import SimpleNamespace
from typing import BinaryIO

import deepspeed  # noqa: F401 - the scripts import it when they train

import megatron.commands.evaluate
import megatron.training.run  # noqa: F401
from megatron.commands import sweep
from megatron.parallel.tied import end_with
from megatron.sweeps import run as runner


class Forked:
    """What Runner needs of subprocess.Popen, for a script that starts without its imports."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str],
        stdout: BinaryIO,
        stderr: BinaryIO,
        pass_fds: Sequence[int],
    ) -> None:
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            end_with(parent)
            become(command[1:], env, stdout)

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def become(words: Sequence[str], env: dict[str, str], log: BinaryIO) -> None:
    """Run a script in this process, and end it."""
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _sweep(output: str, errors: str, words: Sequence[str]) -> None:
    """Run tools/sweep.py in this process, and end it."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    for descriptor, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    runner.subprocess = SimpleNamespace(Popen=Forked)  # the scripts' own subprocesses are real
    runner.tied = list  # a fork ties itself
    status = sweep.main(list(words))
    sys.stdout.flush()
    os._exit(status)


def main() -> None:
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            output, errors, *words = json.loads(line)
            _sweep(output, errors, words)
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
