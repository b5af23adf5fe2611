"""The launcher: whom a signal reaches, who ends with whom, and what the exit status says."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from megatron.errors import UserError
from megatron.parallel import launcher
from megatron.parallel.launcher import Ending, Launcher, environments

WORKS = "touch ready$RANK; while :; do sleep 0.02; done"
SAVES = f"trap 'sleep 0.2; touch saved$RANK; exit 143' TERM; {WORKS}"
FROZEN = f"trap '' TERM; {WORKS}"
CANNOT_SAVE = "[ $RANK = 1 ] && code=5 || code=143; trap 'exit '$code TERM;"
OTHERS_ENDED = "; the others were ended"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "AFTER_A_FAULT", 0.2)
    monkeypatch.setattr(launcher, "PATIENCE", 0.2)
    monkeypatch.setattr(launcher, "ONE_SIGNAL", 0.05)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also if tests run under nohup
    yield
    signal.signal(signal.SIGHUP, before)


def ending(script: str) -> Ending:
    return Launcher().run(["/bin/sh", "-c", script], environments(os.environ, 2, 1))


def signalled(script: str, *numbers: int) -> Ending:
    """The same, with signals to the launcher as soon as both processes are ready."""

    def send() -> None:
        wait_for(Path("ready0"), Path("ready1"))
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.1)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        return ending(script)
    finally:
        sender.join()
        for file in Path.cwd().glob("ready*"):
            file.unlink()


def wait_for(*files: Path) -> None:
    deadline = time.monotonic() + 30
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline
        time.sleep(0.02)


ENDINGS = {
    "exit 0": Ending(0),
    "[ $RANK = 0 ] || exit 7; sleep 60": Ending(7, f"rank 1: ended with status 7{OTHERS_ENDED}"),
    "[ $RANK = 1 ] || exit 7; sleep 60": Ending(7),  # the first process reports its own faults
    "[ $RANK = 0 ] || kill -9 $$; sleep 60": Ending(
        137, f"rank 1: was killed by SIGKILL (out of memory? dmesg says it){OTHERS_ENDED}"
    ),
    "[ $RANK = 1 ] || kill -SEGV $$; sleep 60": Ending(
        139, f"rank 0: was killed by SIGSEGV{OTHERS_ENDED}"
    ),
}


def test_the_end_of_one_process_ends_the_others_and_names_it():
    for script, expected in ENDINGS.items():
        begin = time.monotonic()
        assert ending(script) == expected
        assert time.monotonic() - begin < 10


def test_a_signal_reaches_every_process_which_has_time_to_save():
    # A second SIGTERM leaves the time to save.
    for numbers, status in (
        ((signal.SIGTERM, signal.SIGTERM), 143),
        ((signal.SIGINT,), 130),
        ((signal.SIGHUP,), 129),
    ):
        assert signalled(SAVES, *numbers) == Ending(status)
        for rank in range(2):
            Path(f"saved{rank}").unlink()
    assert signalled(f"{CANNOT_SAVE} {WORKS}", signal.SIGTERM).status == 5


def test_a_second_ctrl_c_ends_processes_that_do_not_react():
    assert signalled(FROZEN, signal.SIGINT, signal.SIGINT) == Ending(130)


def test_processes_that_cannot_be_started_are_one_message(monkeypatch):
    def refuse(*words: object, **options: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(UserError) as fault:
        ending("exit 0")
    assert str(fault.value) == (
        "num_gpus: process 1 of 2 cannot be started (Resource temporarily unavailable)"
        " - lower num_gpus, or end other programs"
    )
