"""A signal to a sweep, or to all that its terminal runs: trainings save and end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.sweeps.lock import at_work
from megatron.sweeps.plan import load_sweep
from megatron.sweeps.state import state_of
from tests.support import ROOT
from tests.sweeps.conftest import SWEEP


class Cold:
    """The command as a shell starts it."""

    def start(self, *words: object) -> int:
        # Under nohup this process ignores SIGHUP, and so would its children.
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
        command = [sys.executable, str(ROOT / "tools/sweep.py"), *map(str, words)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
        )
        signal.signal(signal.SIGHUP, before)
        return self.process.pid

    def poll(self, timeout: float = 0) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        return self.process.returncode


@pytest.mark.parametrize(
    ("how", "number", "send"),
    [
        ("warm", signal.SIGINT, os.kill),
        ("cold", signal.SIGINT, os.killpg),
        ("warm", signal.SIGHUP, os.killpg),
        ("warm", signal.SIGTERM, os.kill),
    ],
)
def test_a_signal_to_a_sweep_or_its_terminal_ends_its_trainings_with_a_checkpoint(
    corpus, warm, tmp_path, how, number, send
):
    text = SWEEP.format(corpus=corpus, steps=100000)
    here = tmp_path / "long.yml"
    here.write_text(text.replace("save_interval: 15", "save_interval: 0"))
    folder = tmp_path / "runs/good-1"
    sweep = warm if how == "warm" else Cold()
    pid = sweep.start("run", here, "--folder", tmp_path / "runs", "--only", "data=good")
    try:
        while sweep.poll() is None and not logged(folder):
            time.sleep(0.05)
        send(pid, number)
        assert sweep.poll(60) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    assert not at_work(folder), "a training outlived its sweep"
    (cell,) = load_sweep(here, tmp_path / "runs", ["data=good"]).cells
    state = state_of(cell)
    assert state.kind == "stopped"
    assert 0 < state.step < 100000


def logged(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists()
