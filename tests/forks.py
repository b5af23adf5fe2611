"""Scripts that start at once: forks of one process that has imported what they need."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from megatron.parallel.grid import free_port
from megatron.parallel.launcher import environments
from tests.support import ROOT, unlaunched

OTHERS = ["deepspeed", "torch._inductor.lowering", "tokenizers", "matplotlib.pyplot"]
"""Modules of others that take seconds to import."""
OURS = ["megatron.training.loop", "evaluate", "prepare_data"]
PAUSE = 0.005  # seconds between two looks at a process


class Forks:
    """Starts scripts without the seconds that their imports take.

    root: the folder of the project whose scripts are run; modules: what they find imported. A
    project whose own modules change while it is served must not have them imported.
    """

    def __init__(self, root: Path = ROOT, modules: Sequence[str] = (*OTHERS, *OURS)) -> None:
        self.root, self.modules = root, modules

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, ROOT / "tests/fork_server.py", *self.modules],
            cwd=self.root,
            env=unlaunched(self.root) | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        # A fork of this process may hold the other end, so its end is not enough.
        self.process.stdin.write('["end"]\n')
        self.process.stdin.close()
        self.process.wait(60)

    def start(
        self,
        *words: object,
        log: Path,
        errors: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> int:
        """Run a script with its words, and return its id.

        Its output goes to the end of `log`, and so do its errors if they have no file.
        """
        folder = str(cwd or self.root)
        files = [str(log), str(errors or log)]
        return self._ask("start", *files, folder, dict(env or {}), *map(str, words))

    def start_ranks(self, ranks: int, *words: object, log: Path) -> list[int]:
        """Run a script on so many ranks, which find each other; one id each."""
        if ranks == 1:
            return [self.start(*words, log=log)]
        places = environments({}, ranks, free_port())
        return [self.start(*words, log=log, env=place) for place in places]

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
        return self._ask("poll", pid)

    def run(
        self,
        *words: object,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        timeout: float = 180,
    ) -> subprocess.CompletedProcess[str]:
        """Run a script to its end, as `tests.support.run` does."""
        with tempfile.TemporaryDirectory() as name:
            log, errors = Path(name, "log"), Path(name, "errors")
            pid = self.start(*words, log=log, errors=errors, env=env, cwd=cwd)
            status = self.wait(pid, timeout)
            printed = log.read_text(), errors.read_text()
            return subprocess.CompletedProcess(words, status, *printed)

    def _ask(self, *words: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())
