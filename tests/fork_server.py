"""Starts scripts as forks of this process, which has imported the modules of its command line.

A line of standard input is a JSON list. ["start", output, errors, folder, variables, words…]
answers with a process id, ["poll", id] with its exit status, or null while it runs; ["end"] ends
this process. A started script leads a group of its own.

tests/forks.py is the other side. Nothing of tests/ is imported here, so that a copy of the project
in another folder can be served, too.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO


def become(
    words: Sequence[str], env: Mapping[str, str], output: BinaryIO, errors: BinaryIO
) -> None:
    """Run a script in this process, as a Python started with these words would, and end it."""
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(output.fileno(), 1)
        os.dup2(errors.fileno(), 2)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = list(words)
        sys.path.insert(0, str(Path(words[0]).resolve().parent))
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


class Children:
    """The started scripts, and how those that have ended did."""

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}

    def start(
        self, output: str, errors: str, folder: str, variables: dict[str, str], *words: str
    ) -> int:
        pid = os.fork()
        self.statuses.pop(pid, None)  # of an earlier script with the same number
        if not pid:
            os.setsid()
            os.chdir(folder)
            with open(output, "ab") as out, open(errors, "ab") as err:
                become(words, {**os.environ, **variables}, out, err)
        return pid

    def poll(self, pid: int) -> int | None:
        if pid not in self.statuses:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.statuses[pid] = os.waitstatus_to_exitcode(status)
        return self.statuses.get(pid)


def main() -> None:
    del sys.path[0]  # this file's folder, which no script would have
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # DeepSpeed writes to standard output when it is imported
    for name in sys.argv[1:]:
        importlib.import_module(name)
    children = Children()
    for line in sys.stdin:
        name, *words = json.loads(line)
        if name == "end":
            return
        answer = getattr(children, name)(*words)
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
