"""tools/sweep.py, whose scripts start without their imports: forks of this process.

The scripts have the group and the signals that subprocess.Popen would give them. tests/forks.py
runs this file; by itself it gains nothing.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import BinaryIO

from megatron.parallel.die_with_parent import end_with
from megatron.sweeps import runner
from tests.forks import become
from tools import sweep


class Forked:
    """What Runner needs of subprocess.Popen, for a script that starts without its imports."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: dict[str, str],
        stdout: BinaryIO,
        process_group: int,
        **settings: object,
    ) -> None:
        parent = os.getpid()
        self.returncode = None
        self.pid = os.fork()
        if not self.pid:
            os.setpgid(0, process_group)
            end_with(parent)
            become(command[1:], env, stdout, stdout)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    # The scripts' own subprocesses are real.
    runner.subprocess = SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)
    runner.die_with_parent = list  # a fork ties itself
    sys.exit(sweep.main(sys.argv[1:]))
