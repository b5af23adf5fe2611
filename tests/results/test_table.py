import json

import pytest

from megatron.errors import UserError
from megatron.results.files import check_output, read_results, write_results
from megatron.results.labels import runs
from megatron.results.table import cell, table

BEYOND = "pos_emb: learned positions end at 512, so length 1024 cannot be computed"


def rows(pos_emb, perplexities, **facts):
    row = {
        "pos_emb": pos_emb,
        "loss": 1.0,
        "step": 2000,
        "config_hash": "ab12cd34ef56",
        "train_length": 512,
        "corpus": "stdlib",
        "part": "valid",
        "protocol": "equal_tokens",
        "seed": 1234,
    }
    return [
        {
            **row,
            "length": length,
            "windows": 8192 // length,
            "tokens": 8192,
            "perplexity": perplexity,
            **facts,
        }
        for length, perplexity in perplexities.items()
    ]


TWO = rows("mep_free", {512: 12.314, 1024: 12.1}) + rows(
    "rotary", {512: 12.4, 1024: 351.26}, config_hash="0123456789ab"
)


def test_the_table_has_a_line_per_encoding_a_column_per_length_and_the_protocol_beneath():
    assert table(TWO) == (
        "pos_emb    512*   1024\n"
        "----------------------\n"
        "mep_free  12.31  12.10\n"
        "rotary    12.40  351.3\n"
        "\n"
        "perplexity on stdlib valid, 8,192 tokens (16 x 512 to 8 x 1024), protocol equal_tokens\n"
        "each: step 2000, seed 1234\n"
        "* training length\n"
        "mep_free: config ab12cd34ef56\n"
        "rotary: config 0123456789ab"
    )


def test_a_measurement_of_another_text_stands_beside_the_first_and_is_said(tmp_path):
    first, other = (
        rows("rotary", {512: value}, text=text)[0] for text, value in (("ab", 12.0), ("cd", 13.0))
    )
    write_results(tmp_path / "a.jsonl", [first])
    write_results(tmp_path / "a.jsonl", [other, first | {"perplexity": 12.5}])
    found = read_results([tmp_path / "a.jsonl"])
    assert sorted((row["text"], row["perplexity"]) for row in found) == [("ab", 12.5), ("cd", 13.0)]
    assert "rotary: several texts were scored at length 512; the last is shown" in table(found)


def test_a_window_that_all_rows_share_is_said_beneath_the_table():
    seen = {"window": "train_length", "logn_scale": True}
    found = rows("rotary", {512: 12.0, 1024: 12.1}, **seen)
    assert "protocol equal_tokens, window 512, logn_scale on\n" in table(found)
    assert "protocol equal_tokens\n" in table(found + rows("rotary", {512: 12.0}))


def test_labels_say_none_off_and_on():
    found = rows("rotary", {512: 12.0})
    found += rows("rotary", {512: 12.1}, window=512) + rows(
        "rotary", {512: 12.2}, window=512, logn_scale=True
    )
    assert list(runs(found)) == [
        "rotary, window none",
        "rotary, window 512, logn_scale off",
        "rotary, window 512, logn_scale on",
    ]


def test_the_markdown_table_says_the_same():
    assert table(TWO, markdown=True) == (
        "| pos_emb | 512\\* | 1024 |\n"
        "| --- | ---: | ---: |\n"
        "| mep_free | 12.31 | 12.10 |\n"
        "| rotary | 12.40 | 351.3 |\n"
        "\n"
        "perplexity on stdlib valid, 8,192 tokens (16 x 512 to 8 x 1024), protocol equal_tokens  \n"
        "each: step 2000, seed 1234  \n"
        "\\* training length  \n"
        "mep_free: config ab12cd34ef56  \n"
        "rotary: config 0123456789ab"
    )


def test_a_length_that_could_not_be_computed_says_why_beneath_the_table():
    found = table(
        rows("learned", {512: 13.0}) + rows("learned", {1024: None, 2048: None}, reason=BEYOND)
    )
    assert "learned  13.00   n/a   n/a\n" in found
    assert f"learned: n/a at 1024, 2048: {BEYOND}" in found


def test_numbers_keep_what_matters_and_stay_narrow():
    values = [None, 3.14159, 99.994, 99.996, 123.45, 999.96, 12345.6, 123456.0, 1e300]
    assert [cell(value) for value in values] == [
        "n/a",
        "3.14",
        "99.99",
        "100.0",
        "123.5",
        "1000",
        "12346",
        "1.2e+05",
        "1.0e+300",
    ]


def test_runs_of_one_encoding_are_told_apart_by_what_differs():
    one, other = rows("t5", {512: 9.0}, seed=1235), rows("t5", {512: 9.1}, seed=1236)
    assert list(runs(one + other)) == ["t5, seed 1235", "t5, seed 1236"]
    early, late = rows("t5", {512: 9.0}, step=100), rows("t5", {512: 8.0}, step=200)
    assert list(runs(early + late + rows("alibi", {512: 8.5}))) == [
        "t5, step 100",
        "t5, step 200",
        "alibi",
    ]
    short, long = (
        rows("t5", {512: 9.0}),
        rows("t5", {512: 9.0}, train_length=1024, config_hash="0123456789ab"),
    )
    assert list(runs(short + long)) == ["t5, train_length 512", "t5, train_length 1024"]
    here, there = (
        rows("t5", {512: 9.0}, checkpoint="runs/a"),
        rows("t5", {512: 9.0}, checkpoint="runs/b"),
    )
    assert list(runs(here + there)) == ["t5, checkpoint runs/a", "t5, checkpoint runs/b"]


def test_lengths_of_a_protocol_that_scores_other_text_at_each_are_not_to_be_compared():
    said = "every length has other text: compare encodings at a length, not one encoding at two"
    for protocol, there in (
        ("paper", True),
        ("position", True),
        ("tail", False),
        ("equal_tokens", False),
    ):
        assert (said in table([one | {"protocol": protocol} for one in TWO])) == there


def test_windows_that_repeat_text_are_told():
    assert "repeat text" not in table(TWO)
    repeated = [one | {"epochs": 2} if one["length"] == 1024 else one for one in TWO]
    assert (
        "length 1024: the part is short and was read up to 2 times: windows repeat text"
        in table(repeated)
    )


def test_rows_on_different_text_are_called_incomparable():
    assert "not comparable" not in table(TWO)
    mixed = TWO + rows("alibi", {512: 7.0}, corpus="arxiv")
    assert "not comparable: corpus is stdlib for some and arxiv for others" in table(mixed)
    fewer = TWO + rows("alibi", {512: 7.0}, tokens=4096)
    assert "not comparable: 4,096 to 8,192 tokens were scored at length 512" in table(fewer)


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
        match=r"--output: .*notes.txt is there and holds something else - choose another name",
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
        match=r"other.jsonl, line 2: is no result of evaluate.py, it lacks windows, tokens",
    ):
        read_results([path])
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"other.jsonl: cannot be read as text"):
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
        "curve.png": r"--output: .*curve.png is the name of a picture - name the lines .*curve.jsonl",
        "new": r"--output: .*new cannot be written - choose another place",
        "notes.txt/results.jsonl": r"--output: .*notes.txt cannot be made \(.*\) - choose another place",
        "notes.txt": r"--output: .*notes.txt is there and holds something else - choose another name",
    }.items():
        with pytest.raises(UserError, match=message):
            check_output(tmp_path / name)


def test_two_mixtures_are_told_apart_by_their_kernels():
    first = rows("mep", {512: 9.0}, pos_emb_args={"kernels": ["exp", "gaussian"]}, config_hash="a")
    second = rows(
        "mep", {512: 8.0}, pos_emb_args={"kernels": ["exp", {"exp": 0.5}]}, config_hash="b"
    )
    found = list(runs(first + second))
    assert [label.split(", config")[0] for label in found] == [
        "mep, pos_emb_args kernels [exp, gaussian]",
        "mep, pos_emb_args kernels [exp, {exp: 0.5}]",
    ]
