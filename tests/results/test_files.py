"""Results files: what is written, read, replaced and refused."""

import pytest

from megatron.errors import UserError
from megatron.results.files import (
    existing_results,
    read_rows,
    training_log,
    write_results,
)
from tests.results.rows import TWO, rows


def test_results_join_those_that_are_there_and_replace_the_same_measurement_only(tmp_path):
    path = tmp_path / "a.jsonl"
    write_results(path, rows("t5", {512: 9.0, 1024: 8.0}))
    write_results(path, rows("t5", {512: 7.0}) + rows("alibi", {512: 6.0}))
    assert [row["perplexity"] for row in read_rows([path])] == [7.0, 8.0, 6.0]
    write_results(path, rows("t5", {512: 5.0}, tokens=512, windows=1))
    assert [row["perplexity"] for row in read_rows([path])] == [7.0, 8.0, 6.0, 5.0]
    (tmp_path / "notes.txt").write_text("my thesis\n")
    with pytest.raises(UserError, match=r"notes.txt, line 1: is no result of evaluate.py"):
        write_results(tmp_path / "notes.txt", TWO)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_results(path, rows("t5", {512: float("nan")}))
    assert len(read_rows([path])) == 4, "a fault while writing leaves the old results"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "notes.txt"]


def test_an_absent_or_empty_file_has_no_rows_yet(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    for name in ("absent.jsonl", "empty.jsonl"):
        assert existing_results(tmp_path / name) == []


def test_every_flipped_byte_of_a_line_is_noticed_or_changes_no_fact(tmp_path):
    path = tmp_path / "a.jsonl"
    write_results(path, rows("t5", {512: 9.0}))
    (row,) = read_rows([path])
    whole = path.read_bytes()
    noticed = 0
    for place in range(len(whole) - 1):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        try:
            (again,) = read_rows([path])
        except UserError:
            noticed += 1
            continue
        assert {key: again[key] for key in row} == row
    # The key "checksum" under another name, and a digit beyond the precision of a number.
    assert noticed >= len(whole) - 10


def test_a_log_is_read_without_the_line_that_a_kill_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert training_log(path) == [{"step": 1, "loss": 2.5}]
    for line in ('{"loss": 2.5}', '{"step": "a"}', "{"):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match="line 1: "):
            training_log(path)
