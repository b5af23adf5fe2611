"""One owner at a time, and nothing that a dead one leaves is in the way."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from megatron.errors import UserError
from megatron.files import atomic_write, atomic_write_all, folder_beside
from megatron.folder_lock import owned_file, owned_folder
from tests.support import unlaunched

WHO = r"process \d+ on \S+, since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
OWNS = """
import os, sys, time
from pathlib import Path
from megatron.files import atomic_write
from megatron.folder_lock import owned_folder
folder = Path(sys.argv[1])
with owned_folder(folder, "save"), atomic_write(folder / "big.bin") as temporary:
    temporary.write_text("half")
    forked = os.fork()
    if forked:
        print(forked, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def process(tmp_path):
    """A process that owns tmp_path/run, writes a file there, and has forked a worker."""
    command = [sys.executable, "-c", OWNS, str(tmp_path / "run")]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=unlaunched())
    assert started.stdout is not None
    worker = int(started.stdout.readline())
    yield started
    os.kill(worker, signal.SIGKILL)
    started.kill()
    started.wait()
    started.stdout.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_second_owner_reads_who_the_first_is_and_disturbs_nothing(tmp_path, process):
    folder = tmp_path / "run"
    before = names(folder)
    with pytest.raises(UserError) as refused, owned_folder(folder, "save"):
        pass
    expected = (
        rf"save: {folder} is in use by process {process.pid} on {os.uname().nodename},"
        r" since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        r" - wait until it has ended, end it, or choose another folder"
    )
    assert re.fullmatch(expected, str(refused.value))
    with owned_file(folder / "a.jsonl", "--output"), atomic_write(folder / "big.bin") as temporary:
        temporary.write_text("mine")
        assert set(before) < set(names(folder))
    assert [*before, "big.bin"] == names(folder)


def test_a_killed_owner_blocks_nobody_and_leaves_nothing(tmp_path, process, caplog):
    """Not even while a worker that it has forked still runs."""
    folder = tmp_path / "run"
    assert [name for name in names(folder) if name.startswith(".big.bin.")]
    process.kill()
    process.wait()
    with owned_folder(folder, "save"):
        assert names(folder) == [".owner"]
    assert names(folder) == []
    note = rf"{folder}: {WHO}, did not finish here and has ended - taking over"
    assert re.fullmatch(note, caplog.messages[-1])


def test_folders_that_were_made_for_an_owner_go_with_it_if_they_stay_empty(tmp_path):
    with pytest.raises(ZeroDivisionError), owned_folder(tmp_path / "a" / "b", "save"):
        raise ZeroDivisionError
    assert names(tmp_path) == []
    with owned_folder(tmp_path / "a" / "b", "save"):
        (tmp_path / "a" / "b" / "weights").touch()
    assert names(tmp_path / "a" / "b") == ["weights"]


def test_a_file_and_its_folder_have_different_owners(tmp_path):
    with (
        owned_folder(tmp_path, "save"),
        owned_file(tmp_path / "a.jsonl", "--output"),
        owned_file(tmp_path / "b.jsonl", "--output"),
        pytest.raises(UserError, match=r"--output: .*/a.jsonl is in use by .* choose another file"),
        owned_file(tmp_path / "a.jsonl", "--output"),
    ):
        pass
    assert names(tmp_path) == []


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / ".owner").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot be written"), owned_folder(tmp_path, "save"):
        pass
    assert (tmp_path / "precious").read_text() == "text"


def test_litter_of_dead_processes_is_removed_before_anything_is_written(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    with atomic_write(tmp_path / "a.txt") as temporary:
        place = temporary.name.split(".")[-2]
        temporary.touch()
    old = time.time() - 25 * 3600
    for name, of, age in (
        ("a.txt", place, 0),
        ("b.txt", place, 0),
        ("c.txt", "0" * 8, 0),
        ("c.txt", "1" * 8, old),
    ):
        path = tmp_path / f".{name}.{dead.pid}.{of}.tmp"
        path.write_text("half")
        if age:
            os.utime(path, (age, age))
    (tmp_path / f".maps.{dead.pid}.{place}.tmp").mkdir()
    (tmp_path / ".mine.tmp").write_text("a user's")
    with folder_beside(tmp_path / "maps"):
        pass
    with atomic_write_all(tmp_path / "a.idx", tmp_path / "a.txt") as paths:
        left = names(tmp_path)
        paths[1].write_text("whole")
    assert [name for name in left if name.startswith((".a.txt", ".maps"))] == []
    assert [name for name in left if name.startswith(".b.txt")]
    with owned_folder(tmp_path, "save"):
        left = names(tmp_path)
    assert left == [f".c.txt.{dead.pid}.{'0' * 8}.tmp", ".mine.tmp", ".owner", "a.txt", "maps"]
