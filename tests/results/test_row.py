"""What makes two rows the same, and which stand in one table."""

import json

import pandas
import pytest

from megatron.results import read_results
from megatron.results.files import read_rows, write_results
from megatron.results.row import Row, agrees, by_text, measurement_of, value_of
from tests.results.rows import check_numbers, row, row_at_512, rows, texts
from tests.support import ROOT


def test_the_files_at_hand_are_rows_whose_numbers_agree():
    for path in (ROOT / "docs").rglob("*.jsonl"):
        for measured in read_rows([path]):
            assert {*measured} <= {*Row.__annotations__}
            check_numbers(measured)


def test_users_read_a_frame_with_a_line_for_each_row(tmp_path):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    write_results(paths[0], [row("alibi", texts())])
    write_results(paths[1], rows("rotary", {512: 9.0, 1024: None}, seed=None))
    frame = read_results(*paths)
    assert frame["pos_emb"].tolist() == ["alibi", "rotary", "rotary"]
    assert frame["seed"].astype(object).where(frame["seed"].notna(), None).tolist() == [
        1,
        None,
        None,
    ]
    assert frame["perplexity"].isna().tolist() == [False, False, True]
    assert frame["window_losses"][0] == texts().tolist()
    assert frame.groupby("pos_emb")["length"].max().to_dict() == {"alibi": 512, "rotary": 1024}
    assert read_results(paths[1]).equals(read_results(str(paths[1])))


def test_a_frame_keeps_variants_apart_and_becomes_parquet(tmp_path):
    path = ROOT / "docs/results/context/1235.jsonl"
    expected = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        read = json.loads(line)
        if (read["protocol"], read["pos_emb"], read["length"]) == ("tail", "kerple_log", 4096):
            expected[read.get("window")] = read["loss"]
    frame = read_results(path)
    tail = frame[frame.protocol == "tail"].pivot_table("loss", "label", "length")
    assert tail.loc["kerple_log", 4096] == expected[None]
    assert tail.loc["kerple_log, window 128", 4096] == expected["train_length"]

    other = tmp_path / "other.jsonl"
    layers = rows("rotary", {512: 9.0}, pos_emb_args={"kernels": ["exp", {"exp": 0.5}]}, window=64)
    write_results(other, [*layers, *rows("alibi", {512: 9.0}, pos_emb_args={})])
    frame = read_results(path, other)
    frame.to_parquet(tmp_path / "frame.parquet")
    again = pandas.read_parquet(tmp_path / "frame.parquet")
    assert again.loss.tolist() == frame.loss.tolist()
    assert set(again.window.dropna()) == {"64", "train_length", "32,none"}
    assert json.loads(again.pos_emb_args.iloc[-2]) == {"kernels": ["exp", {"exp": 0.5}]}


def test_a_key_changes_what_it_identifies():
    first = row_at_512(checkpoint="runs/a")
    for change in ({"window": 256}, {"start": 16000}, {"length": 1024}, {"text": "cd34"}):
        assert measurement_of(first | change) != measurement_of(first), change
    circumstances = {"commit": "b", "device": "b", "code": "b", "seconds": 1.0}
    # A switch that is off or not mentioned is the same.
    off = {"window": None, "logn_scale": False, "sinks": None, "method": None}
    for change in (circumstances, off):
        assert measurement_of(first | change) == measurement_of(first), change


def test_a_window_of_the_training_length_is_that_many_tokens():
    by_name, by_number = row_at_512(window="train_length"), row_at_512(window=512)
    assert value_of(by_name, "window") == 512
    assert agrees(by_number, by_name), "it answers the same question"


def test_an_answer_has_every_fact_of_the_question():
    assert agrees(row_at_512(), {"pos_emb": "rotary", "seed": 1234})
    assert not agrees(row_at_512(), {"seed": 1235})
    assert not agrees(row_at_512(), {"code": "ab"}), "it is not known which code measured it"


PAPER = {"protocol": "paper", "windows": 320}
TASK = {"protocol": "task", "windows": 256, "tokens": 1024}


@pytest.mark.parametrize(
    ("first", "other", "together"),
    [
        ({"text": "a"}, {"text": "a", "seed": 7}, True),
        ({}, {"length": 1024}, True),
        ({"text": "a"}, {"text": "b"}, False),  # another copy of the corpus
        ({"text": "a"}, {"text": "a", "corpus": "arxiv"}, False),
        ({"tail": 128, "protocol": "tail"}, {"tail": 256, "protocol": "tail"}, False),
        ({**PAPER, "text": "1", "seed": 1}, {**PAPER, "text": "2", "seed": 2}, True),
        ({**PAPER, "text": "1"}, {**PAPER, "text": "3", "length": 1024, "tokens": 327680}, True),
        ({**PAPER, "text": "1"}, {**PAPER, "text": "5", "seed": 3, "windows": 8}, False),
        ({**TASK, "text": "a"}, {**TASK, "text": "b", "length": 1024}, True),
        ({**TASK, "text": "a"}, {**TASK, "text": "b", "length": 1024, "windows": 8}, False),
        (
            {"text": "a", "protocol": "position"},
            {"text": "b", "protocol": "position", "length": 1024},
            False,
        ),
    ],
)
def test_only_rows_of_one_text_stand_together(first, other, together):
    groups = by_text([row_at_512(**first), row_at_512(**other)])
    assert len(groups) == 2 - together
