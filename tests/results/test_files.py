"""Results files: what is written, read, replaced and refused."""

import json

import pytest

from megatron.errors import UserError
from megatron.results.files import check_output, existing_results, read_results, write_results
from megatron.results.probes import existing_probes, read_probes
from tests.results.rows import TWO, rows


def test_results_survive_the_way_to_the_file_and_back(tmp_path):
    write_results(tmp_path / "new/a.jsonl", TWO[:2])
    write_results(tmp_path / "b.jsonl", TWO[2:])
    assert read_results([tmp_path / "new/a.jsonl", tmp_path / "b.jsonl"]) == TWO
    lines = (tmp_path / "b.jsonl").read_text().splitlines()
    assert [json.loads(line)["length"] for line in lines] == [512, 1024]


def test_of_two_lines_for_the_same_run_and_length_the_later_counts(tmp_path):
    write_results(tmp_path / "a.jsonl", rows("t5", {512: 9.0}) + rows("t5", {512: 8.0}))
    assert [row["perplexity"] for row in read_results([tmp_path / "a.jsonl"])] == [8.0]


def test_results_join_those_that_are_there_and_replace_the_same_measurement_only(tmp_path):
    path = tmp_path / "a.jsonl"
    write_results(path, rows("t5", {512: 9.0, 1024: 8.0}))
    write_results(path, rows("t5", {512: 7.0}) + rows("alibi", {512: 6.0}))
    assert [row["perplexity"] for row in read_results([path])] == [7.0, 8.0, 6.0]
    smaller = [row | {"tokens": 512} for row in rows("t5", {512: 5.0})]
    write_results(path, smaller)
    assert [row["perplexity"] for row in read_results([path])] == [7.0, 8.0, 6.0, 5.0]
    notes = tmp_path / "notes.txt"
    notes.write_text("my thesis\n")
    with pytest.raises(
        UserError,
        match=r"--output: .*notes.txt exists and holds something else - choose another name",
    ):
        write_results(notes, TWO)
    assert notes.read_text() == "my thesis\n"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.jsonl", "notes.txt"]


def test_a_fault_while_writing_leaves_the_old_results(tmp_path):
    write_results(tmp_path / "a.jsonl", TWO)
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_results(tmp_path / "a.jsonl", rows("t5", {512: float("nan")}))
    assert read_results([tmp_path / "a.jsonl"]) == TWO


def test_what_is_no_results_file_is_named_with_its_line(tmp_path):
    with pytest.raises(
        UserError, match=r"absent.jsonl: there is no such results file - evaluate.py writes one"
    ):
        read_results([tmp_path / "absent.jsonl"])
    path = tmp_path / "other.jsonl"
    path.write_text(json.dumps(TWO[0]) + "\n" + '{"pos_emb": "t5", "length": 512}\n')
    with pytest.raises(
        UserError,
        match=r"other.jsonl, line 2: is no result of evaluate.py, it lacks step, config_hash,"
        r" tokens, windows, loss, perplexity - give files of evaluate.py",
    ):
        read_results([path])
    path.write_text("[1, 2]\n")
    with pytest.raises(UserError, match=r"line 1: is no result of evaluate.py, it is no JSON obj"):
        read_results([path])
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"line 1: is no result of evaluate.py, it is no UTF-8"):
        read_results([path])
    path.write_text("")
    with pytest.raises(
        UserError, match=r"other.jsonl: is empty - leave it out, or write results with evaluate.py"
    ):
        read_results([path])


def test_a_place_that_cannot_be_written_is_named_before_anything_is_measured(tmp_path):
    check_output(tmp_path / "new/results.jsonl")
    assert list(tmp_path.rglob("*.*")) == []
    (tmp_path / "notes.txt").write_text("my thesis\n")
    for name, message in {
        "curve.png": "curve.png is the name of a picture - name the lines .*curve.jsonl",
        "new": "new is a folder - name a file in it, as in .*new/a.jsonl",
        "notes.txt/results.jsonl": r"notes.txt cannot be made \(.*\) - choose another place",
        "notes.txt": "notes.txt exists and holds something else - choose another name",
    }.items():
        with pytest.raises(UserError, match=f"--output: .*{message}"):
            check_output(tmp_path / name)


def test_an_absent_or_empty_file_has_no_rows_yet(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    for name in ("absent.jsonl", "empty.jsonl"):
        assert existing_results(tmp_path / name) == []
        assert existing_probes(tmp_path / name) == []
    write_results(tmp_path / "empty.jsonl", TWO)
    assert existing_results(tmp_path / "empty.jsonl") == TWO


def test_probes_have_the_same_reader_with_messages_of_their_own(tmp_path):
    path = tmp_path / "a.jsonl"
    write_results(path, TWO)
    with pytest.raises(
        UserError,
        match=r"a.jsonl, line 1: is no result of tools/probe.py, it lacks probe"
        r" - give files of tools/probe.py",
    ):
        read_probes([path])
    with pytest.raises(UserError, match=r"no such results file - tools/probe.py writes one"):
        read_probes([tmp_path / "absent.jsonl"])


def test_a_window_by_its_name_and_by_its_number_is_one_measurement(tmp_path):
    by_name = rows("t5", {512: 9.0}, window="train_length")
    by_number = rows("t5", {512: 8.0}, window=512)
    write_results(tmp_path / "a.jsonl", by_name)
    write_results(tmp_path / "a.jsonl", by_number)
    assert read_results([tmp_path / "a.jsonl"]) == by_number


def test_a_row_measured_again_stays_in_the_cell_of_its_sweep(tmp_path):
    cell = {"sweep": "small", "cell": {"pos_emb": "t5"}}
    write_results(tmp_path / "sweep.jsonl", [TWO[0] | cell])
    write_results(tmp_path / "again.jsonl", [TWO[0] | {"seconds": 7.0}])
    (row,) = read_results([tmp_path / "sweep.jsonl", tmp_path / "again.jsonl"])
    assert row == TWO[0] | {"seconds": 7.0} | cell


def test_every_flipped_byte_of_a_line_is_noticed_or_changes_no_fact(tmp_path):
    path = tmp_path / "a.jsonl"
    write_results(path, rows("t5", {512: 9.0}))
    (row,) = read_results([path])
    whole = path.read_bytes()
    noticed = 0
    for place in range(len(whole) - 1):
        flipped = bytearray(whole)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        try:
            (found,) = read_results([path])
        except UserError:
            noticed += 1
            continue
        assert {key: found[key] for key in row} == row
    # The key "checksum" under another name, and a digit beyond the precision of a number.
    assert noticed >= len(whole) - 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": "abc"}, "its loss is 'abc', not a number or null"),
        ({"loss": True}, "its loss is True, not a number or null"),
        ({"step": 1.5}, "its step is 1.5, not a whole number"),
        ({"step": 10**400}, "its step is a number of too many digits, not a whole number"),
        ({"pos_emb": None}, "its pos_emb is null, not text"),
        ({"cell": [1]}, "its cell is a list, not an object"),
        ({"window_losses": "x" * 99}, r"its window_losses is 'x{39}…, not a list of numbers"),
        ({"window": []}, "its window is a list, not a whole number or text or null"),
        ({"windows": 0}, "its windows is 0, not 1 or more"),
        ({"perplexity": 9.1}, r"its perplexity is 9.1, but exp\(loss\) is 9.0000"),
        ({"loss": None}, "its loss is null, its perplexity 9"),
        ({"loss": -1.0}, "its loss is -1, below 0"),
        ({"window_losses": [2.0]}, "it has 1 window_losses of 16 windows"),
        ({"window_losses": [2.0] * 16}, "its loss is 2.197225, but the mean of its window_losses"),
        ({"window_losses": [2.0] * 16, "window_tokens": [1]}, "it has 1 window_tokens and 16 wind"),
        ({"block_losses": [2.0] * 15}, "its blocks have 7680 tokens, the row 8192"),
        ({"block_losses": [2.0] * 16}, "its loss is 2.197225, but the mean of its block_losses"),
        ({"position_edges": [0, 1], "position_losses": []}, "its 2 position_edges do not enclose"),
        ({"position_edges": [0, 1], "position_losses": [1.0]}, "the mean of its position_losses"),
    ],
)
def test_facts_of_another_type_or_that_disagree_are_named(tmp_path, change, message):
    (row,) = rows("t5", {512: 9.0})
    path = tmp_path / "a.jsonl"
    write_results(path, [row | change])
    with pytest.raises(UserError, match=f"a.jsonl, line 1: .*{message}.* - remove the line, and"):
        read_results([path])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"loss": NaN}', "it has NaN, which is no number in JSON"),
        ('{"loss": -Infinity}', "it has -Infinity, which is no number in JSON"),
        ('{"loss": 1e999}', "it has 1e999, which is too large for a number"),
        ('{"loss": 1' + "0" * 5000 + "}", "it has a number of thousands of digits"),
        ('{"loss": 1, "loss": 2}', "it has the key 'loss' twice"),
        ("[" * 100_000, "it is nested too deeply"),
        ('{"pos_emb": "\\ud800"}', "it has half a character"),
        ("{", "it is no JSON (Expecting property name enclosed in double quotes, column 2)"),
        ("[]", "it is no JSON object"),
    ],
)
def test_what_python_would_read_and_json_does_not_have_is_refused(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(UserError) as caught:
        read_results([path])
    assert f"{path}, line 1: is no result of evaluate.py, {message}" in str(caught.value)


def test_a_line_may_be_edited_without_its_checksum(tmp_path):
    path = tmp_path / "a.jsonl"
    write_results(path, rows("t5", {512: 9.0}))
    line = json.loads(path.read_text())
    path.write_text(json.dumps(line | {"corpus": "renamed"}) + "\n")
    with pytest.raises(UserError, match=r"\(if you edited it, remove its key checksum\)"):
        read_results([path])
    del line["checksum"]
    path.write_text(json.dumps(line | {"corpus": "renamed"}) + "\n")
    assert read_results([path])[0]["corpus"] == "renamed"
