"""Scripts that start at once: forks of one process that has imported what they need."""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import BinaryIO, Self
from unittest import mock

from megatron.parallel.grid import free_port
from megatron.parallel.launcher import environments
from tests.support import ROOT, unlaunched

MODULES = [
    *("deepspeed", "torch._inductor.lowering", "tokenizers", "matplotlib.pyplot"),
    *("megatron.training.loop", "evaluate", "prepare_data", "tests.forks"),
]
"""Modules that take seconds to import."""
PAUSE = 0.005  # seconds between two looks at a process


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
        places = [place for place in sys.path if not place.startswith(str(ROOT / "tests"))]
        sys.path[:] = [str(Path(words[0]).resolve().parent), *places]
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


def lead(
    words: Sequence[str], env: Mapping[str, str], folder: str, output: str, errors: str
) -> None:
    """Become a script that leads a group of its own."""
    os.setsid()
    os.chdir(folder)
    with open(output, "ab") as out, open(errors, "ab") as err:
        become(words, env, out, err)


class Forks:
    """Starts scripts without the seconds that their imports take."""

    def __enter__(self) -> Self:
        self.env = unlaunched() | {"OMP_NUM_THREADS": "1"}
        self.processes: dict[int, ForkServerProcess] = {}
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(MODULES)
        with mock.patch.dict(os.environ, self.env):
            forkserver.ensure_running()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()

    def start(
        self,
        *words: object,
        log: Path,
        errors: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> int:
        """Run a script with its words, and return its id.

        Its output goes to the end of `log`, and so do its errors if they have no file.
        """
        variables = {**self.env, **(env or {})}
        files = [str(log), str(errors or log)]
        script = [str(word) for word in words]
        process = self.context.Process(target=lead, args=(script, variables, str(cwd), *files))
        process.start()
        assert process.pid is not None
        self.processes[process.pid] = process
        return process.pid

    def start_ranks(self, ranks: int, *words: object, log: Path) -> list[int]:
        """Run a script on so many ranks, which find each other; one id each."""
        if ranks == 1:
            return [self.start(*words, log=log)]
        places = environments({}, ranks, free_port())
        return [self.start(*words, log=log, env=place) for place in places]

    def run_ranks(self, ranks: int, *words: object, log: Path, timeout: float = 600) -> None:
        """Run a script on so many ranks, none of which may fail."""
        pids = self.start_ranks(ranks, *words, log=log)
        statuses = [self.wait(pid, timeout) for pid in pids]
        assert not any(statuses), log.read_text()

    def wait(self, pid: int, timeout: float = 600) -> int:
        """The exit status, when the script has ended; -9 if it was killed.

        Raises TimeoutError after so many seconds, and kills the script's group.
        """
        end = time.monotonic() + timeout
        while (status := self.poll(pid)) is None:
            if time.monotonic() > end:
                os.killpg(pid, signal.SIGKILL)
                raise TimeoutError(f"process {pid} runs for more than {timeout} seconds")
            time.sleep(PAUSE)
        return status

    def poll(self, pid: int) -> int | None:
        """The exit status, or None while the script runs."""
        return self.processes[pid].exitcode

    def run(
        self,
        *words: object,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        timeout: float = 180,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script to its end, as `tests.support.run` does."""
        with tempfile.TemporaryDirectory() as name:
            log, errors = Path(name, "log"), Path(name, "errors")
            pid = self.start(*words, log=log, errors=errors, env=env, cwd=cwd)
            status = self.wait(pid, timeout)
            printed = log.read_text(), errors.read_text()
            return subprocess.CompletedProcess(words, status, *printed)
