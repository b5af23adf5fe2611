"""Tables of perplexity and of bits per byte, and the notes beneath them."""

import math
from statistics import mean, stdev

import pytest

from megatron.results.statistics import bits_per_byte
from megatron.results.table import cell, table
from tests.results.rows import TWO, answers, rows, with_bytes

BEYOND = "pos_emb: learned positions end at 512, so length 1024 cannot be computed"


def test_the_table_has_a_line_per_encoding_a_column_per_length_and_the_protocol_above():
    assert table(TWO) == (
        "perplexity on stdlib valid, 8,192 tokens (16 x 512 to 8 x 1024), protocol equal_tokens\n"
        "pos_emb    512*   1024\n"
        "----------------------\n"
        "mep_free  12.31  12.10\n"
        "rotary    12.40  351.3\n"
        "each: step 2000, seed 1234\n"
        "* training length\n"
        "mep_free: config ab12cd34ef56\n"
        "rotary: config 0123456789ab"
    )
    assert table([*TWO, *rows("a|b", {512: 9.0})], form="markdown").startswith(
        "perplexity on stdlib valid, 8,192 tokens (16 x 512 to 8 x 1024), protocol equal_tokens\n"
        "\n"
        "| pos_emb | 512\\* | 1024 |\n"
        "| --- | ---: | ---: |\n"
        "| mep_free | 12.31 | 12.10 |\n"
        "| rotary | 12.40 | 351.3 |\n"
        "| a\\|b | 9.00 |  |\n"
        "\n"
    )
    *_, comment = table(TWO, form="latex").splitlines()
    assert comment == "% rotary: config 0123456789ab"
    seeds = rows("a_b", {512: 9.0}, seed=1) + rows("a_b", {512: 10.0}, seed=2)
    assert table(seeds, form="latex", over_seeds=True).splitlines()[1:7] == [
        r"\begin{tabular}{lrr}",
        r"\toprule",
        r"pos\_emb & seeds & 512* \\",
        r"\midrule",
        r"a\_b & 2 & 9.50 $\pm$ 0.71 \\",
        r"\bottomrule",
    ]


def test_rows_of_several_texts_or_protocols_have_a_table_each():
    tail = rows("rotary", {512: 13.0}, protocol="tail", tail=256, tokens=4096)
    arxiv = rows("rotary", {512: 14.0}, corpus="arxiv")
    text = table(TWO + tail + arxiv)
    assert [table(group) in text for group in (TWO, tail, arxiv)] == [True] * 3
    assert "protocol tail, tail 256\n" in text
    headings = [part for part in text.split("\n\n") if "\n" not in part]
    equal = "valid: equal_tokens"
    assert headings == [f"stdlib {equal}", "stdlib valid: tail", f"arxiv {equal}"]


def test_what_all_rows_share_stands_beneath_the_table():
    variant = {"window": "train_length", "logn_scale": True}
    measured = rows("rotary", {512: 12.0, 1024: 12.1}, **variant)
    assert "protocol equal_tokens, window 512, log n scale\n" in table(measured)
    assert "protocol equal_tokens\n" in table(measured + rows("rotary", {512: 12.0}))
    options = {"task_args": {"group": "S3"}, "tail": 128, "start": 0}
    optional = rows("rotary", {512: 12.0}, **options)
    assert "protocol equal_tokens, task_args group S3, tail 128\n" in table(optional)


def test_what_a_reader_must_know_of_numbers_is_noted():
    refused = rows("learned", {512: 13.0}) + rows("learned", {1024: None}, reason=BEYOND)
    assert "learned  13.00   n/a\n" in table(refused)
    assert f"learned: n/a at 1024: {BEYOND}" in table(refused)
    note = "each length has its own text: compare encodings at a length, not one encoding at two"
    paper = [row | {"protocol": "paper", "windows": 16, "epochs": 2} for row in TWO]
    assert note in table(paper)
    assert "length 1024: the part is short and was read up to 2 times" in table(paper)
    assert note not in table(TWO)
    assert "512*" not in table([row | {"step": 0} for row in TWO]), "it was not trained yet"
    longer = rows("alibi", {512: 9.0, 1024: 8.0}, train_length=1024)
    assert {"512*", "1024*"} < set(table(TWO + longer).split())


def test_a_note_does_not_repeat_its_label():
    measured = []
    for step in (2, 20):
        measured += rows("rotary", {512: 9.0}, step=step, seed=1)
    text = table(measured)
    assert "rotary, step 20 " in text
    assert "rotary, step 2:" not in text
    assert "rotary, step 20:" not in text
    measured[0] |= {"seed": 2, "config_hash": "cd"}
    assert "rotary, step 2: seed 2, config cd" in table(measured)


def test_a_mean_over_seeds_is_over_all_or_none():
    measured = rows("alibi", {512: 10.0, 1024: 9.0}, seed=1, config_hash="1")
    measured += rows("alibi", {512: 12.0, 1024: None}, seed=2, config_hash="2")
    lines = table(with_bytes(measured[::2], 30_000) + measured[1::2], over_seeds=True).splitlines()
    assert lines[3].split() == ["alibi", "2", "11.00", "±", "1.41", "n/a"]
    assert lines[-1] == "mean ± standard deviation over seeds"
    bits = [math.log2(perplexity) * 8192 / 30_000 for perplexity in (10.0, 12.0)]
    lines = table(measured[::2], bits_per_byte=True, over_seeds=True).splitlines()
    assert lines[3].split() == ["alibi", "2", f"{mean(bits):.4f}", "±", f"{stdev(bits):.4f}"]


def test_numbers_keep_what_matters_and_stay_narrow():
    numbers = {3.14159: "3.14", 99.996: "100.0", 123.45: "123.5", 999.96: "1000"}
    for value, text in {**numbers, 123456.0: "1.2e+05"}.items():
        assert cell(value) == text


# --- Accuracy of tasks ---


def test_a_task_has_tables_of_right_tokens_and_where_they_differ_of_right_answers():
    measured = answers("rotary", {512: (0.999, 0.99), 1024: (0.25, 0.0)}, seed=1)
    measured += answers("rotary", {512: (0.997, 0.97), 1024: (0.15, 0.0)}, seed=2)
    measured += answers("learned", {512: 1.0}) + answers("learned", {1024: None}, reason=BEYOND)
    setting = "256 problems of the largest size that fits, 1,024 answer tokens, protocol task"
    assert table(measured, over_seeds=True) == (
        f"token accuracy: % of answer tokens right on task:copy valid, {setting}\n"
        "pos_emb  seeds        512*        1024\n"
        "--------------------------------------\n"
        "rotary       2  99.8 ± 0.1  20.0 ± 7.1\n"
        "learned      1       100.0         n/a\n"
        "each: step 2000, config ab12cd34ef56\n"
        "* training length\n"
        f"learned: n/a at 1024: {BEYOND}\n"
        "mean ± standard deviation over seeds\n"
        "\n"
        f"accuracy: % of answers right in every token on task:copy valid, {setting}\n"
        "pos_emb  seeds        512*       1024\n"
        "-------------------------------------\n"
        "rotary       2  98.0 ± 1.4  0.0 ± 0.0\n"
        "learned      1       100.0        n/a\n"
        "mean ± standard deviation over seeds"
    )


# --- Bits per byte ---


def test_a_uniform_guess_over_bytes_needs_eight_bits():
    assert bits_per_byte(math.log(256), tokens=1000, size=1000) == pytest.approx(8)
    assert bits_per_byte(math.log(256), tokens=500, size=1000) == pytest.approx(4)
    assert bits_per_byte(1.0, tokens=3, size=0) is None


def test_runs_of_two_tokenizers_stand_in_one_table_with_the_bytes_that_they_scored():
    small = with_bytes(rows("alibi", {512: 20.0, 1024: 18.0}, tokenizer="aa"), 30_000)
    large = with_bytes(rows("alibi", {512: 40.0, 1024: 36.0}, tokenizer="bb"), 36_864.5, "card")
    old = rows("rotary", {512: 12.0}, tokenizer="aa")
    _, _, _, *lines = table([*small, *large, *old], bits_per_byte=True).splitlines()
    assert lines[0].split() == ["alibi,", "tokenizer", "aa", "1.1802", "1.1387"]
    assert lines[1].split() == ["alibi,", "tokenizer", "bb", "1.1826", "1.1489"]
    assert lines[2].startswith("30,000 to 36,864 bytes scored, counted by the tokenizer; estimated")
    assert lines[3].startswith("tokenizers differ")
    assert len(lines) == 4
