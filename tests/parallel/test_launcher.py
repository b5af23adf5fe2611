"""The launcher: whom a signal reaches, who ends with whom, and what the exit status says."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from megatron.parallel import launcher
from megatron.parallel.launcher import environments, run

WORKS = "touch ready$RANK; while :; do sleep 0.02; done"
SAVES = f"trap 'sleep 0.2; touch saved$RANK; exit 143' TERM; {WORKS}"
FROZEN = f"trap '' TERM; {WORKS}"
CANNOT_SAVE = "[ $RANK = 1 ] && code=5 || code=143; trap 'exit '$code TERM;"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "AFTER_A_FAULT", 0.2)
    monkeypatch.setattr(launcher, "PATIENCE", 0.2)
    monkeypatch.setattr(launcher, "ONE_SIGNAL", 0.05)
    before = {number: signal.getsignal(number) for number in launcher.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ending(script: str) -> int:
    return run(["/bin/sh", "-c", script], environments(os.environ, 2, 1))


def signalled(script: str, *numbers: int) -> int:
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
    "exit 0": (0, ""),
    "[ $RANK = 0 ] || exit 7; sleep 60": (7, ""),  # it has printed its own fault
    "[ $RANK = 0 ] || kill -9 $$; sleep 60": (137, "rank 1: killed by SIGKILL"),
    "[ $RANK = 1 ] || kill -SEGV $$; sleep 60": (139, "rank 0: killed by SIGSEGV"),
}


def test_the_end_of_one_process_ends_the_others_and_names_it(capfd):
    for script, (status, message) in ENDINGS.items():
        begin = time.monotonic()
        assert ending(script) == status
        assert capfd.readouterr().err.partition(";")[0] == message
        assert time.monotonic() - begin < 10


def test_a_signal_reaches_every_process_which_has_time_to_save():
    # A second SIGTERM leaves the time to save.
    for numbers, status in (((signal.SIGTERM, signal.SIGTERM), 143), ((signal.SIGINT,), 130)):
        assert signalled(SAVES, *numbers) == status
        for rank in range(2):
            Path(f"saved{rank}").unlink()
    assert signalled(f"{CANNOT_SAVE} {WORKS}", signal.SIGTERM) == 5


def test_a_second_ctrl_c_ends_processes_that_do_not_react():
    assert signalled(FROZEN, signal.SIGINT, signal.SIGINT) == 130
