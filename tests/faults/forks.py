"""Scripts that start at once: forks of one process that has imported what they need.

A line of standard input is a JSON list: ["start", log, variables, words…] answers with a process
id, ["wait", id] with its exit status, ["poll", id] with the status or null. A started script leads
a group of its own. `Forks` is the other side.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Self

from tests.support import ROOT, unlaunched


class Forks:
    """Starts scripts of the project without the seconds that their imports take."""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forks"],
            cwd=ROOT,
            env=unlaunched() | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(60)

    def start(self, *words: object, log: Path, env: Mapping[str, str] | None = None) -> int:
        """Run a script with its words; its output goes to the end of `log`. Returns its id."""
        return self._ask("start", str(log), dict(env or {}), *map(str, words))

    def wait(self, pid: int) -> int:
        """The exit status, when the script has ended; -9 where it was killed."""
        return self._ask("wait", pid)

    def poll(self, pid: int) -> int | None:
        """The exit status, or None while the script runs."""
        return self._ask("poll", pid)

    def _ask(self, *words: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


class Children:
    """The started scripts, and how those that have ended did."""

    def __init__(self, become: Callable[[Sequence[str], dict[str, str], IO[bytes]], None]) -> None:
        self.become = become
        self.statuses: dict[int, int] = {}

    def start(self, log: str, variables: dict[str, str], *words: str) -> int:
        pid = os.fork()
        if not pid:
            os.setsid()
            with open(log, "ab") as file:
                self.become(words, {**os.environ, **variables}, file)
        return pid

    def wait(self, pid: int) -> int:
        if pid not in self.statuses:
            self._note(*os.waitpid(pid, 0))
        return self.statuses[pid]

    def poll(self, pid: int) -> int | None:
        if pid not in self.statuses:
            self._note(*os.waitpid(pid, os.WNOHANG))
        return self.statuses.get(pid)

    def _note(self, pid: int, status: int) -> None:
        if pid:
            self.statuses[pid] = os.waitstatus_to_exitcode(status)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # DeepSpeed writes to standard output when it is imported

    import megatron.commands.prepare_data  # noqa: F401
    from tests.sweeps.warm import become  # it imports what training and evaluation need

    children = Children(become)
    for line in sys.stdin:
        name, *words = json.loads(line)
        answer = getattr(children, name)(*words)
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
