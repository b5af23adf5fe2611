"""Tables of perplexity and the notes beneath them."""

import math

import pytest

from megatron.results.files import read_results, write_results
from megatron.results.table import by_length, cell, setting, table
from tests.results.rows import TWO, rows

BEYOND = "pos_emb: learned positions end at 512, so length 1024 cannot be computed"


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


def test_a_measurement_of_another_text_stands_beside_the_first_and_has_a_note(tmp_path):
    first, other = (
        rows("rotary", {512: value}, text=text)[0] for text, value in (("ab", 12.0), ("cd", 13.0))
    )
    write_results(tmp_path / "a.jsonl", [first])
    again = first | {"loss": math.log(12.5), "perplexity": 12.5}
    write_results(tmp_path / "a.jsonl", [other, again])
    found = read_results([tmp_path / "a.jsonl"])
    assert sorted((row["text"], row["perplexity"]) for row in found) == [("ab", 12.5), ("cd", 13.0)]
    assert "rotary: several texts were scored at length 512; the last is shown" in table(found)


def test_a_window_that_all_rows_share_stands_beneath_the_table():
    variant = {"window": "train_length", "logn_scale": True}
    found = rows("rotary", {512: 12.0, 1024: 12.1}, **variant)
    assert "protocol equal_tokens, window 512, logn_scale on\n" in table(found)
    assert "protocol equal_tokens\n" in table(found + rows("rotary", {512: 12.0}))


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


def test_lengths_of_a_protocol_that_scores_other_text_at_each_are_not_to_be_compared():
    note = "every length has other text: compare encodings at a length, not one encoding at two"
    for protocol, noted in (
        ("paper", True),
        ("position", True),
        ("tail", False),
        ("equal_tokens", False),
    ):
        assert (note in table([one | {"protocol": protocol} for one in TWO])) == noted


def test_windows_that_repeat_text_have_a_note():
    assert "repeat text" not in table(TWO)
    repeated = [one | {"epochs": 2} if one["length"] == 1024 else one for one in TWO]
    assert (
        "length 1024: the part is short and was read up to 2 times: windows repeat text"
        in table(repeated)
    )


def test_rows_of_several_corpora_or_protocols_have_a_table_and_a_footer_each():
    tail = rows("rotary", {512: 13.0}, protocol="tail", tail=256, tokens=4096)
    arxiv = rows("rotary", {512: 14.0}, corpus="arxiv")
    found = table(TWO + tail + arxiv)
    _, first, _, second, _, third, why = found.split("\n\n")
    assert first.startswith(
        "perplexity on stdlib valid, 8,192 tokens (16 x 512 to 8 x 1024), protocol equal_tokens\n"
    )
    assert second.startswith(
        "perplexity on stdlib valid, 4,096 tokens (16 x 512), protocol tail, tail 256\n"
    )
    assert third.startswith(
        "perplexity on arxiv valid, 8,192 tokens (16 x 512), protocol equal_tokens\n"
    )
    assert [table(group) in found for group in (TWO, tail, arxiv)] == [True] * 3
    assert why.splitlines() == [
        "not comparable across tables: corpus is stdlib or arxiv",
        "not comparable across tables: protocol is equal_tokens or tail",
    ]


def test_the_footer_of_a_figure_names_every_protocol():
    mixed = [*TWO, *rows("t5", {512: 9.0}, protocol="sliding", stride=256)]
    assert setting(mixed) == (
        "stdlib valid, 8,192 tokens (16 x 512 to 8 x 1024), protocol equal_tokens;"
        " stdlib valid, 8,192 tokens (16 x 512), protocol sliding, stride 256"
    )


def test_rows_that_counted_differently_are_called_incomparable():
    assert "not comparable" not in table(TWO)
    fewer = TWO + rows("alibi", {512: 7.0}, tokens=4096)
    assert "not comparable: 4,096 to 8,192 tokens were scored at length 512" in table(fewer)


def test_a_row_with_losses_by_position_has_a_number_for_every_shorter_length():
    # Two windows of 4; means over positions 0-1 and 2-3.
    (whole,) = rows("t5", {4: 9.0}, position_edges=[0, 2, 4], position_losses=[3.0, 1.0])
    whole |= {"windows": 2, "tokens": 8, "loss": 2.0, "window_losses": [2.5, 1.5]}
    whole |= {"block_losses": [2.0], "block_tokens": [8]}
    short, long = by_length([whole], [2, 4])
    assert (short["length"], short["tokens"], short["loss"]) == (2, 4, 3.0)
    assert short["perplexity"] == pytest.approx(math.exp(3.0))
    assert (long["length"], long["tokens"], long["loss"]) == (4, 8, 2.0)
    assert "window_losses" in long
    assert not {"window_losses", "block_losses", "block_tokens"} & short.keys()
