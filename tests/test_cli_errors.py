"""Every exception ends a command with one message and a status; a traceback goes to a file."""

import errno
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron import cli_errors
from megatron.cli_errors import LastResort, guarded
from megatron.errors import UserError
from tests.support import ROOT, run, unlaunched

COMMAND = Path(sys.argv[0]).name
NO_ROOT = pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")


def ended(fault: BaseException, folder: Path | None = None) -> int:
    def command() -> int:
        raise fault

    handler = LastResort()
    handler.folder = folder
    return handler.status_of(command)


def test_a_fault_of_ours_is_one_line_and_a_file_without_values(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")

    def command() -> int:
        password = "hunter" + str(3)
        raise RuntimeError(f"it broke{password and ''}\nsecond line")

    handler = LastResort()
    handler.folder = tmp_path
    assert handler.status_of(command) == 1
    (file,) = tmp_path.iterdir()
    assert re.fullmatch(rf"traceback-\d{{8}}-\d{{6}}-{os.getpid()}\.txt", file.name)
    assert capsys.readouterr().err == (
        f"internal error: RuntimeError: it broke - the traceback is in {file};"
        " please report it with that file\n"
    )
    text = file.read_text()
    assert f"torch {torch.__version__}" in text
    assert "second line" in text
    assert "line" in text
    assert "hunter2" not in text
    assert "hunter3" not in text


def test_the_traceback_goes_where_it_can_be_written(tmp_path, capsys, monkeypatch):
    here, temporary = tmp_path / "here", tmp_path / "temporary"
    here.mkdir()
    temporary.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(cli_errors.tempfile, "gettempdir", lambda: str(temporary))
    file_in_the_way = tmp_path / "file"
    file_in_the_way.touch()
    assert ended(KeyError("x"), file_in_the_way) == 1
    (file,) = here.iterdir()
    file.unlink()

    write_text = Path.write_text

    def full(path: Path, text: str, **how: str) -> int:
        if path.parent != temporary:
            write_text(path, text[:10], **how)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_text(path, text, **how)

    monkeypatch.setattr(Path, "write_text", full)
    assert ended(KeyError("x"), tmp_path) == 1
    assert list(here.iterdir()) == []  # what was written of it is gone
    assert len(list(temporary.iterdir())) == 1
    for file in temporary.iterdir():
        file.unlink()
    temporary.rmdir()
    capsys.readouterr()
    assert ended(KeyError("x"), tmp_path) == 1
    shown = capsys.readouterr().err
    assert shown.startswith("internal error: KeyError: 'x' - please report it with this,")
    assert "Traceback (most recent call last)" in shown


FULL = OSError(errno.ENOSPC, "No space left on device", "/data/results.jsonl")
REASON, CURE = "No space left on device", "free some space, or choose another disk"
SPACE = f"{REASON} - {CURE}\n"
OF_FILES = {
    "full disk": (FULL, "/data/results.jsonl: " + SPACE),
    "full disk, no name": (
        OSError(errno.ENOSPC, "No space left on device"),
        f"{COMMAND}: {SPACE}",
    ),
    "read-only": (
        OSError(errno.EROFS, "Read-only file system", "/data"),
        "/data: Read-only file system - choose a place that can be written\n",
    ),
    "rights": (
        PermissionError(errno.EACCES, "Permission denied", "/data"),
        "/data: Permission denied - check who may read and write there, or choose another place\n",
    ),
    "file in the way": (
        NotADirectoryError(errno.ENOTDIR, "Not a directory", "/data/a"),
        "/data/a: Not a directory - a part of this path is a file: choose another place\n",
    ),
    "user error": (UserError("here: this - do that"), "here: this - do that\n"),
}


@pytest.mark.parametrize("name", OF_FILES)
def test_faults_of_disks_say_where_and_what_to_do_and_leave_no_file(name, tmp_path, capsys):
    fault, message = OF_FILES[name]
    assert ended(fault, tmp_path) == 1
    assert capsys.readouterr().err == message
    assert list(tmp_path.iterdir()) == []


def endless(depth: int) -> int:
    return endless(depth + 1)


OF_LIMITS = {
    "numpy": (lambda: np.empty(2**50), "the machine's memory does not suffice (Unable to allocate"),
    "torch": (lambda: torch.empty(2**50), "the machine's memory does not suffice ("),
    "recursion": (lambda: endless(0), "the input is nested too deeply (maximum recursion depth"),
}


@pytest.mark.parametrize("name", OF_LIMITS)
def test_what_the_machine_cannot_do_says_what_to_lower(name, tmp_path, capsys):
    command, message = OF_LIMITS[name]
    handler = LastResort()
    handler.folder = tmp_path
    assert handler.status_of(command) == 1
    shown = capsys.readouterr().err
    assert shown.startswith(f"{COMMAND}: {message}")
    (file,) = tmp_path.iterdir()
    assert shown.endswith(f"; the traceback is in {file}\n")
    assert shown.count("\n") == 1


def test_a_gpu_that_is_full_says_what_to_lower(tmp_path, capsys):
    fault = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")
    assert ended(fault, tmp_path) == 1
    assert "the GPU's memory does not suffice (CUDA out of memory." in capsys.readouterr().err


def test_what_ends_a_thread_is_reported_and_the_command_goes_on(tmp_path, capsys):
    def command() -> int:
        def work() -> None:
            raise RuntimeError("in a thread")

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return 3

    handler = LastResort()
    handler.folder = tmp_path
    before = threading.excepthook
    assert handler.status_of(command) == 3
    assert threading.excepthook is before
    (file,) = tmp_path.iterdir()
    assert capsys.readouterr().err.startswith(
        f"internal error: RuntimeError: in a thread - the traceback is in {file};"
    )


def test_an_interruption_is_quiet_and_a_status_passes(capsys):
    assert ended(KeyboardInterrupt()) == 130
    with pytest.raises(SystemExit) as raised:
        ended(SystemExit(7))
    assert raised.value.code == 7
    assert guarded(lambda: None)() == 0
    assert guarded(lambda status: status)(3) == 3
    assert capsys.readouterr().err == ""


def test_each_rank_writes_its_file_and_a_lost_partner_waits_for_the_first_message(
    tmp_path, capsys, monkeypatch
):
    waits = []
    monkeypatch.setattr(cli_errors, "time", SimpleNamespace(sleep=waits.append))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert ended(RuntimeError("ours"), tmp_path) == 1
    (file,) = tmp_path.iterdir()
    assert file.name.endswith("-rank1.txt")
    assert capsys.readouterr().err.startswith("rank 1: internal error: RuntimeError: ours - ")
    first = sum(waits)
    monkeypatch.setenv("RANK", "0")
    assert ended(RuntimeError("gloo/pair.cc:537 Connection closed by peer"), tmp_path) == 1
    assert sum(waits) - first > first


HEAD = "import sys\nfrom megatron.cli_errors import guarded\n@guarded\ndef main():\n    "
TAIL = "\nsys.exit(main())"


@pytest.mark.parametrize(
    "body", ["[print(n) for n in range(10**6)]", "print('short')", "sys.exit(print('and out'))"]
)
def test_a_reader_that_has_gone_ends_it_quietly(body):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", HEAD + body + TAIL]
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, env=unlaunched(), check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("unbuffered", "message"),
    [
        ("", f"standard output: cannot be written ({REASON}) - {CURE}\n"),
        ("1", f"-c: {SPACE}"),
    ],
)
def test_output_that_cannot_be_written_is_a_fault(unbuffered, message):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", HEAD + "print('short')" + TAIL],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=unlaunched() | {"PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, message)


def test_closed_output_changes_nothing(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(HEAD + f"open({str(tmp_path / 'ran')!r}, 'x'); print('word')" + TAIL)
    shell = f"{sys.executable} {script} >&- 2>&-"
    assert subprocess.run(shell, shell=True, env=unlaunched(), check=False).returncode == 0
    assert (tmp_path / "ran").exists()


def test_a_crash_and_a_request_show_what_every_thread_does():
    crash = run("-c", HEAD + "import ctypes; ctypes.string_at(0)" + TAIL)
    assert crash.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in crash.stderr
    body = "print('ready', flush=True); import time; time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD + body + TAIL],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=unlaunched(),
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR2)
    time.sleep(0.2)
    assert process.poll() is None
    process.terminate()
    assert "in main" in process.communicate(timeout=20)[1]


def test_the_handler_costs_light_commands_nothing_and_the_package_alone_is_left_alone():
    code = "import sys, megatron.cli_errors; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert run("-c", code).stdout == "False False\n"
    code = "import sys, prepare_data; print('torch' in sys.modules)"
    assert run("-c", code).stdout == "False\n"
    code = "import faulthandler, megatron; print(faulthandler.is_enabled())"
    assert run("-c", code).stdout == "False\n"


COMMANDS = ["evaluate", "generate", "prepare_data", "tools/sweep", "tools/probe", "tools/doctor"]


def test_a_verb_starts_the_script_of_its_name():
    assert run("-m", "megatron", "sweep", "--help").stdout.startswith("usage: sweep.py")
    done = run("-m", "megatron", "sweeep")
    assert done.returncode == 1
    assert "VERB one of" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_handler(name):
    text = (ROOT / f"{name}.py").read_text()
    handlers = ("@guarded\ndef main(", "LastResort().status_of(", "-> NoReturn:\n    run(")
    assert any(handler in text for handler in handlers)
    assert "print(fault" not in text
