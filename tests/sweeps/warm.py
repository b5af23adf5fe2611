"""tools/sweep.py, whose scripts start without their imports: forks of this process.

The scripts have the group and the signals that subprocess.Popen would give them. tests/forks.py
runs this file; by itself it gains nothing.
"""

import os
import signal
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import BinaryIO

from megatron.parallel.die_with_parent import end_with
from megatron.sweeps import runner
from tests.fork_server import become
from tools import sweep


class Forked:
    """What Runner needs of subprocess.Popen, for a script that starts without its imports."""

    def __init__(
        self, command: Sequence[str], *, env: dict[str, str], stdout: BinaryIO, stderr: BinaryIO
    ) -> None:
        parent = os.getpid()
        self.pid = os.fork()
        if not self.pid:
            end_with(parent)
            become(command[1:], env, stdout, stdout)

    def wait(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    runner.subprocess = SimpleNamespace(Popen=Forked)  # the scripts' own subprocesses are real
    runner.die_with_parent = list  # a fork ties itself
    sys.exit(sweep.main(sys.argv[1:]))
