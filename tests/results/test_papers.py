"""A paper's numbers beside ours: the numbers, the difference, and what is not compared."""

import json
import re

import pytest

from megatron.results.papers import (
    Requirements,
    compare,
    published,
    published_tables,
    render,
)
from tests.support import ROOT
from tools.reproduce import main

FACTS = {"train_length": 512, "step": 50000, "part": "valid", "start": 16000, "windows": 320}
REQUIRED = Requirements(FACTS, {("github", "alibi"): {"a1"}}, tokens=819_200_000)
ROW = {
    **FACTS,
    "pos_emb": "alibi",
    "length": 1024,
    "protocol": "paper",
    "config_hash": "a1",
    "corpus_tokens": 10**10,
    "cell": {"data": "github"},
    "dtype": "float32",  # as evaluate.py writes it into every row
}


def cell_of(rows):
    cells = compare(published("kerple-table3"), rows, REQUIRED)
    place = ("github", "alibi", 1024)
    return next(cell for cell in cells if (cell.corpus, cell.encoding, cell.length) == place)


@pytest.mark.parametrize(  # typed from the paper once more
    ("table", "corpus", "encoding", "length", "number"),
    [
        ("kerple-table3", "openwebtext2", "kerple_log", 16384, ["21.4", "0.6"]),
        ("kerple-table3", "arxiv", "rotary", 4096, ["30.1", "4.32"]),
        ("kerple-table4", "github", "t5", 512, ["0.340"]),
        ("kerple-table5", "github", "kerple_log_3para", 8192, ["2.68", "0.04"]),
        ("kerple-table5", "arxiv", "kerple_bias_wht", 16384, "out of memory"),
        ("kerple-table6", "openwebtext2", "kerple_bias_2para", 512, ["58.4", "71.6"]),
        ("kerple-table6", "github", "kerple_wht_2para", 4096, ["2.93", "0.09"]),
        ("kerple-table7", "github", "kerple_bias_3para", 512, ["0.351"]),
        ("kerple-table9-len1024", "arxiv", "t5", 16384, ["16.0", "4.77"]),
        ("kerple-table9-1.3b", "openwebtext2", "kerple_log", 8192, ["16.9", "0.7"]),
        ("alibi-table5", "wikitext103", "alibi+trained_at_1024", 2048, ["18.05"]),
        ("kerple-table10", "wikitext103", "alibi", 3072, ["18.40"]),
        ("kerple-table10-len2048", "wikitext103", "kerple_log", 3072, ["17.56"]),
        ("su-rerope", "not_repeated", "rotary+rerope_256+logn", 4096, ["48.85"]),
    ],
)
def test_published_numbers_are_the_papers(table, corpus, encoding, length, number):
    cells = published(table).cells[corpus][encoding][length]
    assert (cells if isinstance(cells, str) else list(map(str, cells))) == number


def test_every_table_says_where_it_was_read_and_has_one_name_in_both_spellings():
    for name in published_tables():
        assert published(name.replace("_", "-")) == published(name)
        assert published(name).provenance


def test_a_difference_is_counted_in_standard_errors():
    rows = [
        ROW | {"seed": seed, "perplexity": value}
        for seed, value in ((1, 3.20), (2, 3.30), (3, 3.40))
    ]
    cells = cell_of(rows)  # the paper: 3.15 ± 0.17 of five seeds; ours: 3.3 ± 0.1 of three
    errors = 0.15 / (0.1**2 / 3 + 0.17**2 / 5) ** 0.5
    assert cells.difference(5) == pytest.approx((0.15, errors))
    assert cells.difference(None) == (pytest.approx(0.15), None)
    assert cell_of(rows[:1]).difference(5) == (pytest.approx(0.05), None), "one seed has no spread"
    text = render(published("kerple-table3"), compare(published("kerple-table3"), rows, REQUIRED))
    assert "github alibi 1024 3.15 ± 0.17 3.30 ± 0.10 3 +0.15 +1.6" in " ".join(text.split())
    assert "1 of 108 cells have our numbers" in text
    for digits in ("3.40 ± 0.20", "22.0 ± 0.6", "6674 ± 5696"):  # as the paper prints them
        assert f"  {digits}  " in text


def test_the_second_row_of_a_seed_is_refused():
    values = ((1, 3.2), (1, 3.9), (2, 3.3))
    cells = cell_of([ROW | {"seed": seed, "perplexity": value} for seed, value in values])
    assert cells.ours == [3.2, 3.3]
    assert cells.refused == ["seed 1 has several rows: give the results of one run"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"windows": 8}, "windows is 8, the table's is 320"),
        ({"start": 0}, "start is 0, the table's is 16000"),
        ({"window": 512}, "evaluated with window 512"),
        ({"config_hash": "b2"}, "configuration b2 is none of the sweep's"),
        ({"corpus_tokens": 23_226_347}, "a stand-in"),
        ({"corpus_tokens": None}, "not known"),
        ({"perplexity": None, "reason": "the loss is nan"}, "the loss is nan"),
    ],
)
def test_a_row_that_answers_another_question_is_refused_with_the_reason(change, reason):
    rows = [ROW | {"seed": 1, "perplexity": 3.2} | change]
    assert cell_of(rows).ours == []
    text = render(published("kerple-table3"), compare(published("kerple-table3"), rows, REQUIRED))
    assert re.search(f"refused: .*{reason}.*github alibi 1024", text)


def test_a_table_may_leave_the_number_of_windows_open_and_another_protocol_is_no_answer(tmp_path):
    facts = {"paper": "mine", "provenance": "here", "sweep": "a.yml", "quantity": "perplexity"}
    facts |= {"part": "valid", "protocol": "equal_tokens", "windows": None}
    cells = {"github": {"alibi": {512: [3.0], 1024: [3.0]}}}
    (tmp_path / "mine.yml").write_text(json.dumps(facts | {"cells": cells}))
    measured = {"seed": 1, "perplexity": 3.2, "protocol": "equal_tokens", "start": None}
    rows = [ROW | measured | {"length": n, "windows": 2048 // n} for n in (512, 1024)]
    rows.append(ROW | {"seed": 2, "perplexity": 3.3})
    mine = published(str(tmp_path / "mine.yml"))
    any_windows = {key: FACTS[key] for key in ("train_length", "step", "part")} | {"start": None}
    cells = compare(mine, rows, REQUIRED._replace(facts=any_windows))
    assert [cell.ours for cell in cells] == [[3.2], [3.2]]


def test_the_command_shows_what_is_there_and_what_cannot_be_had(tmp_path, capsys):
    folder = tmp_path / "none"
    assert main(["kerple-table5", "--folder", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("missing") >= 36
    assert "0 of 36 cells have our numbers" in shown
    assert f"missing cells have no rows in {folder}\n" in shown
    assert main(["kerple_table5", "--results", str(ROOT / "docs/demo.jsonl")]) == 0
    assert "missing cells have no rows in " in capsys.readouterr().out
    assert main(["mep", "--folder", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "NOT FOUND" in shown
    assert "second-hand" in shown
    assert main(["kerple-table10"]) == 1
    assert "cannot be reproduced here: the paper used ALiBi's fairseq" in capsys.readouterr().err
    assert not folder.exists()
