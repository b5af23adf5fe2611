"""The table of keys, and what makes two rows the same."""

import re
from pathlib import Path

import pytest

from megatron.results import row as of_rows
from megatron.results.files import read_results
from megatron.results.row import (
    COLUMNS,
    KEYS,
    NEEDED,
    NOTES,
    Role,
    Row,
    agrees,
    by_setting,
    kind_of,
    last_of_each,
    measurement_of,
    place_of,
    plain,
    run_of,
    setting_of,
    value_of,
)
from tests.results.rows import rows
from tests.support import ROOT

RESULTS = sorted((ROOT / "docs").rglob("*.jsonl"))
ALL = (run_of, kind_of, measurement_of, setting_of, place_of)


def one(**facts):
    (found,) = rows("rotary", {512: 9.0}, **facts)
    return found


def test_every_key_of_a_row_has_a_role_and_nothing_else_has():
    assert KEYS.keys() == Row.__annotations__.keys()
    assert {key.role for key in KEYS.values()} == {*Role}


def test_every_key_of_a_row_says_its_unit_or_meaning_or_needs_none():
    text = Path(of_rows.__file__).read_text(encoding="utf-8")
    plain_words = {"pos_emb", "seed", "corpus", "protocol", "reason", "windows", "device", "commit"}
    plain_words |= {"corpus_documents", "corpus_tokens", "attention_backend", "seconds"}
    for key in Row.__annotations__.keys() - plain_words:
        assert re.search(rf"^    {key}: .*  # \S", text, re.MULTILINE), key


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_files_at_hand_have_no_key_without_a_role(path):
    if "probes" not in path.name:
        assert {key for row in read_results([path]) for key in row} <= KEYS.keys()


def test_what_every_line_needs_is_what_identifies_and_measures_it():
    needed = {"pos_emb", "step", "config_hash", "length", "tokens", "windows", "loss", "perplexity"}
    assert {*NEEDED} == needed


# How a change of one key alone changes what a row is: letters as in `ALL`, m: measurement.
@pytest.mark.parametrize(
    ("change", "differing"),
    [
        ({"pos_emb": "t5"}, {run_of, kind_of, measurement_of}),
        ({"pos_emb_args": {"base": 500}}, {kind_of}),  # of a run, config_hash tells it
        ({"seed": 7}, {run_of, measurement_of}),
        ({"step": 7}, {run_of, kind_of, measurement_of}),
        ({"window": 256}, {run_of, kind_of, measurement_of}),
        ({"logn_scale": True}, {run_of, kind_of, measurement_of}),
        ({"blockwise": True}, {run_of, kind_of, measurement_of}),
        ({"sinks": 4}, {run_of, kind_of, measurement_of}),
        ({"clip_distance": 511}, {run_of, kind_of, measurement_of}),
        ({"method": "rerope,window=256"}, {run_of, kind_of, measurement_of}),
        ({"dtype": "bfloat16"}, {run_of, kind_of, measurement_of}),
        ({"corpus": "arxiv"}, {run_of, measurement_of, setting_of, place_of}),
        ({"protocol": "tail"}, {run_of, measurement_of, setting_of, place_of}),
        ({"tokenizer": "ff"}, {run_of, measurement_of, setting_of, place_of}),
        ({"length": 1024}, {measurement_of, place_of}),
        ({"tokens": 4096}, {measurement_of, place_of}),
        ({"start": 16000}, {measurement_of, place_of}),
        ({"text": "cd34"}, {measurement_of}),
        ({"train_length": 1024}, {kind_of}),
        ({"config_hash": "b"}, {run_of, measurement_of}),
        ({"checkpoint": "runs/b"}, {run_of, measurement_of}),
        ({"sweep": "mine"}, {kind_of}),
        *[
            ({key: "other"}, set())
            for key in ("commit", "device", "attention_backend", "code", "weights", "seconds")
        ],
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_key_changes_what_its_role_says(change, differing):
    first = one(checkpoint="runs/a")
    other = first | change
    assert {of for of in ALL if of(first) != of(other)} == differing


def test_a_window_of_the_training_length_is_that_many_tokens():
    by_name, by_number = one(window="train_length"), one(window=512)
    assert value_of(by_name, "window") == 512
    for of in ALL:
        assert of(by_name) == of(by_number)
    assert agrees(by_number, by_name), "it answers the same question"


def test_a_switch_that_is_off_or_not_mentioned_is_the_same():
    for of in ALL:
        assert of(one()) == of(one(window=None, logn_scale=False, blockwise=False))
        assert of(one()) == of(one(sinks=None, clip_distance=None, method=None))


def test_an_answer_has_every_fact_of_the_question():
    assert agrees(one(), {"pos_emb": "rotary", "seed": 1234})
    assert not agrees(one(), {"seed": 1235})
    assert not agrees(one(), {"code": "ab"}), "it is not known which code measured it"


def test_a_run_that_scored_two_texts_of_a_length_counts_once_in_a_mean():
    first, other, longer = one(text="a"), one(text="b", perplexity=8.0), one(length=1024)
    assert last_of_each([first, longer, other]) == [other, longer]


def test_rows_of_a_setting_stand_together():
    github, arxiv = one(), one(corpus="arxiv")
    assert [*by_setting([github, arxiv, github]).values()] == [[github, github], [arxiv]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (True, "on"),
        (False, "off"),
        (512, "512"),
        ({}, "defaults"),
        ({"kernels": ["exp", {"exp": 0.5}]}, "kernels [exp, {exp: 0.5}]"),
    ],
)
def test_values_are_short_texts(value, text):
    assert plain(value) == text


def test_columns_and_notes_follow_the_table_of_keys():
    assert [key for key in KEYS if key in COLUMNS] == [*COLUMNS]
    roles = [KEYS[key].role for key in NOTES]
    assert roles == sorted(roles, key=[*Role].index)
    assert COLUMNS["config_hash"] == "config"
    assert NOTES["step"].format(1000) == "step 1000"
