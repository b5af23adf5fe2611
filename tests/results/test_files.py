"""Results files: what is written, read, replaced and refused."""

import pytest

from megatron.errors import UserError
from megatron.results.files import (
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


def test_a_log_is_read_without_the_line_that_a_kill_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5}\n{"step": 2, "lo')
    assert training_log(path) == [{"step": 1, "loss": 2.5}]
    for line in ('{"loss": 2.5}', '{"step": "a"}', "{"):
        path.write_text(line + "\n")
        with pytest.raises(ValueError, match="line 1: "):
            training_log(path)


def test_a_changed_digit_is_noticed(tmp_path):
    path = tmp_path / "a.jsonl"
    write_results(path, rows("t5", {512: 9.0}))
    path.write_text(path.read_text().replace("9.0", "8.0"))
    with pytest.raises(UserError, match=r"line 1: .* does not agree with its checksum"):
        read_rows([path])
