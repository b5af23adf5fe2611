"""One owner at a time, and nothing that a dead one leaves is in the way."""

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace

import pytest

from megatron import folder_lock
from megatron.errors import UserError
from megatron.files import Together, atomic_write, folder_beside
from megatron.folder_lock import owned_file, owned_folder
from megatron.process import this_process
from tests.support import ROOT

WHO = r"process \d+ on \S+, started \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
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
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert started.stdout is not None
    worker = int(started.stdout.readline())
    yield started
    os.kill(worker, signal.SIGKILL)
    started.kill()
    started.wait()
    started.stdout.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def signed_by(process, folder):
    """A folder whose owner did not give it back."""
    folder.mkdir()
    (folder / ".owner").write_text(json.dumps(asdict(process)))
    return folder


def test_the_second_owner_is_told_who_the_first_is_and_what_to_do(tmp_path, process):
    with (
        pytest.raises(UserError) as refused,
        owned_folder(tmp_path / "run", "save"),
    ):
        pass
    expected = (
        rf"save: {tmp_path}/run is in use by process {process.pid} on {os.uname().nodename},"
        r" started \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        r" - wait until it has ended, end it, or choose another folder"
    )
    assert re.fullmatch(expected, str(refused.value))
    assert (tmp_path / "run" / ".owner").exists()


def test_a_killed_owner_blocks_nobody_and_leaves_nothing(tmp_path, process, caplog):
    """Not even while a worker that it has forked still runs."""
    folder = tmp_path / "run"
    assert [name for name in names(folder) if name.startswith(".big.bin.")]
    process.kill()
    process.wait()
    with owned_folder(folder, "save"):
        assert names(folder) == [".owner"]
    assert not folder.exists() or names(folder) == []
    note = rf"{folder}: {WHO}, did not finish here and has ended - taking over"
    assert re.fullmatch(note, caplog.messages[-1])


def test_what_a_live_process_writes_stays(tmp_path, process):
    folder = tmp_path / "run"
    before = names(folder)
    with owned_file(folder / "a.jsonl", "--output"), atomic_write(folder / "big.bin") as temporary:
        temporary.write_text("mine")
        assert set(before) < set(names(folder))
    assert [*before, "big.bin"] == names(folder)


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


def test_the_file_of_a_lock_that_was_given_back_meanwhile_is_not_mistaken_for_it(
    tmp_path, monkeypatch
):
    """The second opens the first one's file, which is removed before it is locked."""
    with ExitStack() as first:
        first.enter_context(owned_folder(tmp_path, "save"))
        flock = fcntl.flock

        def late(descriptor, operation):
            monkeypatch.setattr(fcntl, "flock", flock)
            first.close()
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", late)
        with owned_folder(tmp_path, "save"):
            assert names(tmp_path) == [".owner"]
            with pytest.raises(UserError, match="is in use"), owned_folder(tmp_path, "save"):
                pass


def test_the_owner_before_a_restart_of_the_machine_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_lock, "_mount_of", lambda path: ("ext4", ["rw"]))
    folder = signed_by(replace(this_process(), kernel="earlier", pid=1), tmp_path / "run")
    with owned_folder(folder, "save"):
        pass
    assert names(folder) == []


@pytest.mark.parametrize(
    ("kind", "options", "taken_over"),
    [
        ("nfs4", ["rw", "local_lock=none"], True),
        ("nfs", ["rw", "nolock", "local_lock=all"], False),
        ("lustre", ["rw", "flock"], True),
        ("lustre", ["rw", "localflock"], False),
        ("fuse.sshfs", ["rw"], False),
        ("", [], False),
    ],
)
def test_an_owner_on_another_machine_is_gone_where_locks_reach_it(
    kind, options, taken_over, tmp_path, monkeypatch
):
    monkeypatch.setattr(folder_lock, "_mount_of", lambda path: (kind, options))
    elsewhere = replace(this_process(), host="node8", kernel="another", pid=4711)
    folder = signed_by(elsewhere, tmp_path / "run")
    if taken_over:
        with owned_folder(folder, "save"):
            pass
        return
    with pytest.raises(UserError) as refused, owned_folder(folder, "save"):
        pass
    assert str(refused.value) == (
        f"save: {folder} was taken by process 4711 on node8, started {elsewhere.started};"
        " whether that still runs cannot be known from here"
        f" - if it has ended, remove {folder}/.owner; else wait, or choose another folder"
    )
    assert names(folder) == [".owner"]


def test_without_locks_of_the_file_system_the_text_decides(tmp_path, monkeypatch):
    def missing(descriptor, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    with (
        owned_folder(tmp_path, "save"),
        pytest.raises(UserError, match="whether that still runs cannot be known"),
        owned_folder(tmp_path, "save"),
    ):
        pass
    recycled = replace(this_process(), ticks=1)  # its number is ours now
    folder = signed_by(recycled, tmp_path / "run")
    with owned_folder(folder, "save"):
        pass


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', "\0" * 100])
def test_a_damaged_text_blocks_nobody(text, tmp_path):
    (tmp_path / ".owner").write_text(text)
    with owned_folder(tmp_path, "save"):
        pass


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path):
    (tmp_path / "precious").write_text("text")
    (tmp_path / ".owner").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="cannot be written"), owned_folder(tmp_path, "save"):
        pass
    assert (tmp_path / "precious").read_text() == "text"


def test_the_mount_of_a_path_is_found():
    kind, options = folder_lock._mount_of(folder_lock.Path("/proc/self"))
    assert kind == "proc"
    assert "rw" in options or "ro" in options


def test_litter_of_dead_processes_is_removed_before_anything_is_written(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    with atomic_write(tmp_path / "a.txt") as temporary:
        tail = temporary.name.removeprefix(".a.txt.").split(".")
        temporary.touch()
    old = time.time() - 25 * 3600
    for name, place, age in [
        ("a.txt", tail[2], 0),
        ("b.txt", tail[2], 0),
        ("c.txt", "0" * 8, 0),
        ("c.txt", "1" * 8, old),
    ]:
        path = tmp_path / f".{name}.{dead.pid}.{tail[1]}.{place}.tmp"
        path.write_text("half")
        if age:
            os.utime(path, (age, age))
    (tmp_path / ".mine.tmp").write_text("a user's")
    with atomic_write(tmp_path / "a.txt") as temporary:
        left = names(tmp_path)
        temporary.write_text("whole")
    assert [name for name in left if name.startswith(".a.txt")] == []
    assert [name for name in left if name.startswith(".b.txt")]
    with owned_folder(tmp_path, "save"):
        left = names(tmp_path)
    assert left == [f".c.txt.{dead.pid}.{tail[1]}.{'0' * 8}.tmp", ".mine.tmp", ".owner", "a.txt"]


def test_litter_of_folders_and_of_files_that_belong_together_is_removed_too(tmp_path):
    with folder_beside(tmp_path / "maps") as temporary:
        _, _, ticks, place, _ = temporary.name.rsplit(".", 4)
    for name in ("maps", "a.bin", "a.idx"):
        folder = tmp_path / f".{name}.{2**22 + 5}.{ticks}.{place}.tmp"  # no process has this number
        folder.mkdir()
        (folder / "half").write_text("half")
    with Together(tmp_path / "a.bin", tmp_path / "a.idx") as paths:
        for path in paths:
            path.write_text("whole")
    (tmp_path / "maps").rmdir()
    with folder_beside(tmp_path / "maps"):
        pass
    assert names(tmp_path) == ["a.bin", "a.idx", "maps"]
