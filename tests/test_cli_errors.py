"""Every exception ends a command with one message and a status."""

import argparse
import ast
import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.cli_errors import command_parser, guarded, status_of
from megatron.errors import UserError
from megatron.evaluation.options import options_of_words
from tests.support import ROOT, run, unlaunched

COMMAND = Path(sys.argv[0]).name
HEAD = "import sys\nfrom megatron.cli_errors import guarded\n@guarded\ndef main():\n    "
TAIL = "\nsys.exit(main())"


def ended(fault):
    def command():
        raise fault

    return status_of(command)


def test_a_fault_of_ours_has_its_traceback_without_values(capsys):
    def command():
        password = "hunter" + str(3)
        raise RuntimeError(f"it broke{password and ''}\nsecond line")

    assert status_of(command) == 1
    shown = capsys.readouterr().err
    assert "Traceback (most recent call last)" in shown
    assert shown.endswith("RuntimeError: it broke\nsecond line\n")
    assert "hunter3" not in shown


def test_faults_of_users_disks_and_memory_say_what_to_do(capsys):
    full, cure = "No space left on device", "free some space, or choose another disk"
    cases = {
        "here: this - do that": UserError("here: this - do that"),
        f"/data/a.jsonl: {full} - {cure}": OSError(errno.ENOSPC, full, "/data/a.jsonl"),
        f"{COMMAND}: {full} - {cure}": OSError(errno.ENOSPC, full),
        f"{COMMAND}: the GPU is out of memory (CUDA out": torch.OutOfMemoryError(
            "CUDA out of memory"
        ),
    }
    for message, fault in cases.items():
        assert ended(fault) == 1
        assert capsys.readouterr().err.startswith(message)
    for command in (lambda: np.empty(2**50), lambda: torch.empty(2**50)):
        assert guarded(command)() == 1
        message = f"{COMMAND}: the machine is out of memory ("
        assert capsys.readouterr().err.startswith(message)


def test_an_interruption_is_quiet_and_a_status_passes(capsys):
    assert ended(KeyboardInterrupt()) == 130
    with pytest.raises(SystemExit) as raised:
        ended(SystemExit(7))
    assert raised.value.code == 7
    assert guarded(lambda: None)() == 0
    assert guarded(lambda status: status)(3) == 3
    assert capsys.readouterr().err == ""


def test_output_without_a_reader_a_disk_or_a_place(tmp_path):
    """141 after `| head`, 1 for a full disk, and `>&-` changes nothing."""

    def status(body, output):
        command = [sys.executable, "-c", HEAD + body + TAIL]
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.PIPE, text=True, env=unlaunched(), check=False
        )
        return done.returncode, done.stderr

    reading, writing = os.pipe()
    os.close(reading)
    assert status("[print(n) for n in range(10**6)]", writing) == (141, "")
    os.close(writing)
    with open("/dev/full", "w") as full:
        message = "-c: No space left on device - free some space, or choose another disk\n"
        assert status("print('short')", full) == (1, message)
    script = tmp_path / "script.py"
    script.write_text(HEAD + f"open({str(tmp_path / 'ran')!r}, 'x'); print('word')" + TAIL)
    shell = f"{sys.executable} {script} >&- 2>&-"
    assert subprocess.run(shell, shell=True, env=unlaunched(), check=False).returncode == 0
    assert (tmp_path / "ran").exists()


def test_a_crash_shows_what_every_thread_does():
    crash = run("-c", HEAD + "import ctypes; ctypes.string_at(0)" + TAIL)
    assert crash.returncode == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in crash.stderr


def test_a_verb_starts_the_script_of_its_name():
    assert run("-m", "megatron", "prepare-data", "--help").stdout.startswith("usage: prepare_data")
    done = run("-m", "megatron", "sweeep")
    assert done.returncode == 1
    assert done.stderr == "megatron: there is no command sweeep - did you mean sweep?\n"


def test_the_commands_are_listed_by_what_people_do():
    listed = run("-m", "megatron").stdout
    scripts = [*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")]
    names = re.findall(r"^  (\S+)", listed, flags=re.MULTILINE)
    assert sorted(names) == sorted(path.stem.replace("_", "-") for path in scripts)
    assert max(map(len, listed.splitlines())) <= 100


def test_every_command_has_the_handler_and_light_ones_stay_light():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("tools/*.py")]:
        text = path.read_text()
        handlers = ("@guarded\ndef main(", "status_of(", "    run(main, ")
        assert any(handler in text for handler in handlers), path
    code = "import sys, prepare_data; print('torch' in sys.modules)"
    assert run("-c", code).stdout == "False\n"


def test_paths_of_the_command_line_are_read_as_a_shell_reads_them(monkeypatch, capsys):
    monkeypatch.setenv("HOME", "/home/anna")
    monkeypatch.delenv("GONE", raising=False)
    parser = command_parser("")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--checkpoint", type="path", nargs="+")
    parser.add_argument("--text")
    words = ["--output=~/x", "--checkpoint", "$HOME/a", "b~", "--text", "~ $HOME"]
    options = parser.parse_args(words)
    assert options.output == Path("/home/anna/x")
    assert options.checkpoint == ["/home/anna/a", "b~"]
    assert options.text == "~ $HOME"
    with pytest.raises(SystemExit):
        parser.parse_args(["--output", "${GONE}/x"])
    assert "the variable GONE is not set" in capsys.readouterr().err


def test_options_have_dashes_and_a_misspelt_one_gets_a_hint(capsys):
    parser = command_parser("")
    parser.add_argument("words", nargs="*")
    parser.add_argument("--head_dim", type=int)
    parser.add_argument("--protocol", choices=("equal_tokens", "tail"))
    for parse in (parser.parse_args, parser.parse_intermixed_args):
        for word in ("--head-dim=8", "--head_dim=8"):
            assert parse([word, "a_b"]) == argparse.Namespace(
                words=["a_b"], head_dim=8, protocol=None
            )
        hints = {
            "--haed-dim 8": "--head-dim",
            "--protcol=tail": "--protocol",
            "--protocol equal": "equal_tokens",
            "--protocol tial": "tail",
        }
        for words, meant in hints.items():
            with pytest.raises(SystemExit):
                parse(words.split())
            assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")
    assert "--head-dim" in parser.format_help()
    with pytest.raises(UserError, match="did you mean equal_tokens"):
        options_of_words(["--protocol", "equal_token"])


def test_every_command_reads_paths_so():
    """An option whose values are shown as a file, folder or prefix has one of the two types."""
    for script in [*ROOT.glob("*.py"), *ROOT.glob("tools/*.py"), *ROOT.glob("megatron/**/*.py")]:
        for call in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
            if not isinstance(call, ast.Call):
                continue
            written = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            if written.get("metavar") in ("'FILE'", "'DIR'", "'PREFIX'", "'FOLDER'", "'PAGE'"):
                assert written.get("type") in ("Path", "'path'"), (script, ast.unparse(call))
