"""Files and folders that appear whole or not at all."""

import os
from pathlib import Path

import pytest

from megatron.files import atomic_write, atomic_write_all, folder_beside, write_text


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def fail_after_writing(path: Path) -> None:
    path.write_text("part")
    raise ValueError("half")


def test_a_file_takes_its_place_when_the_block_ends_well(tmp_path):
    path = tmp_path / "deep" / "a.txt"
    with atomic_write(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    write_text(path, "ü\r\n")
    assert path.read_bytes() == "ü\r\n".encode()
    assert [one.name for one in path.parent.iterdir()] == ["a.txt"]


def test_a_fault_leaves_the_old_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(ValueError, match="half"), atomic_write(path) as temporary:
        fail_after_writing(temporary)
    assert contents(tmp_path) == {"a.txt": "old"}


def test_files_that_belong_together_appear_together_the_last_one_last(tmp_path, monkeypatch):
    paths = [tmp_path / "a.bin", tmp_path / "a.json", tmp_path / "a.idx"]
    for path in paths:
        path.write_text("old")
    replace, present = os.replace, []

    def noted(source, target):
        present.append((Path(target).name, paths[-1].exists()))
        replace(source, target)

    monkeypatch.setattr(os, "replace", noted)
    with atomic_write_all(*paths) as (binary, _, index):
        binary.write_text("new")
        index.write_text("new")
        assert contents(tmp_path)["a.bin"] == "old"
    assert present == [("a.bin", False), ("a.idx", False)]
    assert contents(tmp_path) == {"a.bin": "new", "a.idx": "new"}  # a.json was not written again


def test_a_fault_in_one_of_several_files_keeps_all_of_the_old(tmp_path):
    paths = [tmp_path / "a.bin", tmp_path / "a.idx"]
    for path in paths:
        path.write_text("old")
    with pytest.raises(ValueError, match="half"), atomic_write_all(*paths) as (binary, _):
        fail_after_writing(binary)
    assert contents(tmp_path) == {"a.bin": "old", "a.idx": "old"}


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
    assert [one.name for one in tmp_path.iterdir()] == ["maps"]
