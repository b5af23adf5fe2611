"""A signal to a sweep, or to all that its terminal runs: trainings save and end."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.commands import sweep
from megatron.sweeps.lock import at_work
from megatron.sweeps.plan import load_sweep
from megatron.sweeps.state import state_of
from tests.support import ROOT
from tests.sweeps.conftest import SWEEP


class Forked:
    """The command in a child of this process, which has imported everything already."""

    def __init__(self, words: list[str]) -> None:
        self.process = multiprocessing.get_context("fork").Process(target=_alone, args=(words,))
        self.process.start()

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def poll(self) -> int | None:
        return self.process.exitcode

    def wait(self, timeout: float) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode


def _alone(words: list[str]) -> None:
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    sys.exit(sweep.main(words))


def started(words: list[str]) -> subprocess.Popen:
    """The command as a shell starts it."""
    # Under nohup this process ignores SIGHUP, and so would its children.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        command = [sys.executable, str(ROOT / "tools/sweep.py"), *words]
        return subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True
        )
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("start", "number", "send"),
    [
        (Forked, signal.SIGINT, os.kill),
        (started, signal.SIGINT, os.killpg),
        (Forked, signal.SIGHUP, os.killpg),
        (Forked, signal.SIGTERM, os.kill),
    ],
)
def test_a_signal_to_a_sweep_or_its_terminal_ends_its_trainings_with_a_checkpoint(
    corpus, tmp_path, start, number, send
):
    text = SWEEP.format(corpus=corpus, steps=100000)
    here = tmp_path / "long.yml"
    here.write_text(text.replace("save_interval: 5", "save_interval: 0"))
    folder = tmp_path / "runs/good-1"
    process = start(["run", str(here), "--folder", str(tmp_path / "runs"), "--only", "data=good"])
    try:
        while process.poll() is None and not logged(folder):
            time.sleep(0.05)
        send(process.pid, number)
        assert process.wait(timeout=60) == 130
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert not at_work(folder), "a training outlived its sweep"
    (cell,) = load_sweep(here, tmp_path / "runs", ["data=good"]).cells
    state = state_of(cell)
    assert state.kind == "stopped"
    assert 0 < state.step < 100000


def logged(folder: Path) -> bool:
    return (folder / "metrics.jsonl").exists()
