"""Files and folders that appear whole or not at all, with one owner at a time."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import UserError
from megatron.files import atomic_write, atomic_write_all, folder_beside, read_small, write_text
from megatron.folder_lock import owned_file, owned_folder
from tests.support import unlaunched

OWNS = """
import os, sys, time
from pathlib import Path
from megatron.files import atomic_write
from megatron.folder_lock import owned_folder
folder = Path(sys.argv[1])
with owned_folder(folder, "save"), atomic_write(folder / "big.bin") as temporary:
    temporary.write_text("half")
    if not os.fork():
        print(os.getpid(), flush=True)  # by now it has closed what it has of the lock
    time.sleep(60)
"""


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def fail_after_writing(path):
    path.write_text("part")
    raise ZeroDivisionError


# --- Whole or not at all ---


def test_a_file_takes_its_place_when_the_block_ends_well(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    with atomic_write(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    write_text(path, "ü\r\n")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as temporary:
        fail_after_writing(temporary)
    assert path.read_bytes() == "ü\r\n".encode()
    assert names(path.parent) == ["a.txt"]
    assert read_small(path, 4) == path.read_bytes()
    with pytest.raises(OSError, match="it has more than 3 bytes"):
        read_small(path, 3)


def test_files_that_belong_together_appear_together_the_last_one_last(tmp_path, monkeypatch):
    paths = [tmp_path / "a.bin", tmp_path / "a.json", tmp_path / "a.idx"]
    for path in paths:
        path.write_text("old")
    replace, present = os.replace, []

    def noted(source, target):
        present.append((Path(target).name, paths[-1].exists()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", noted)
    with pytest.raises(ZeroDivisionError), atomic_write_all(*paths) as (binary, _, index):
        fail_after_writing(binary)
    assert contents(tmp_path) == {"a.bin": "old", "a.json": "old", "a.idx": "old"}
    with atomic_write_all(*paths) as (binary, _, index):
        binary.write_text("new")
        index.write_text("new")
        assert contents(tmp_path)["a.bin"] == "old"
    assert present == [("a.bin", False), ("a.idx", False)]
    assert contents(tmp_path) == {"a.bin": "new", "a.idx": "new"}  # a.json was not written again


def test_a_folder_appears_whole_and_the_first_of_two_stays(tmp_path):
    tmp_path.chmod(0o755)
    path = tmp_path / "maps"
    with folder_beside(path) as temporary:
        (temporary / "a").write_text("first")
        assert not path.exists()
    assert path.stat().st_mode & 0o777 == 0o755
    second = folder_beside(path)
    second.__enter__().joinpath("a").write_text("second")
    with pytest.raises(OSError, match="not empty"):
        second.__exit__(None, None, None)
    assert contents(path) == {"a": "first"}
    assert names(tmp_path) == ["maps"]


# --- One owner ---


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


def test_the_second_owner_is_refused_and_a_killed_one_blocks_nobody(tmp_path, process):
    """Not even while a worker that it has forked still runs."""
    folder = tmp_path / "run"
    before = names(folder)
    with (
        pytest.raises(UserError, match=f"save: {folder} is in use by another process"),
        owned_folder(folder, "save"),
    ):
        pass
    with owned_file(folder / "a.jsonl", "--output"), atomic_write(folder / "big.bin") as temporary:
        temporary.write_text("mine")
        assert set(before) < set(names(folder))
    assert [*before, "big.bin"] == names(folder)
    process.kill()
    process.wait()
    with owned_folder(folder, "save"):
        assert names(folder) == [".owner", "big.bin"]
    assert names(folder) == ["big.bin"]


def test_folders_that_were_made_for_an_owner_go_with_it_if_they_stay_empty(tmp_path):
    with pytest.raises(ZeroDivisionError), owned_folder(tmp_path / "a" / "b", "save"):
        raise ZeroDivisionError
    assert names(tmp_path) == []


def test_a_file_and_its_folder_have_different_owners(tmp_path):
    with (
        owned_folder(tmp_path, "save"),
        owned_file(tmp_path / "a.jsonl", "--output"),
        owned_file(tmp_path / "b.jsonl", "--output"),
        pytest.raises(UserError, match=r"--output: .*/a.jsonl is in use by "),
        owned_file(tmp_path / "a.jsonl", "--output"),
    ):
        pass
    assert names(tmp_path) == []


def test_litter_of_dead_processes_is_removed_and_nothing_else(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    with atomic_write(tmp_path / "a.txt") as temporary:
        host = temporary.name.split(".")[-2]
        temporary.touch()
    other_machine = f".c.txt.{dead.pid}.elsewhere.tmp"
    for name in (f".a.txt.{dead.pid}.{host}.tmp", f".b.txt.{dead.pid}.{host}.tmp", other_machine):
        (tmp_path / name).write_text("half")
    (tmp_path / ".mine.tmp").write_text("a user's")
    with atomic_write(tmp_path / "a.txt") as temporary:
        temporary.write_text("whole")
        assert not [name for name in names(tmp_path) if name.startswith(f".a.txt.{dead.pid}.")]
        assert [name for name in names(tmp_path) if name.startswith(".b.txt")]
    with owned_folder(tmp_path, "save"):
        assert names(tmp_path) == [other_machine, ".mine.tmp", ".owner", "a.txt"]
