"""Bits per byte: the formula, the rows that have them, and the tables that show them."""

import math
from statistics import mean, stdev

import pytest

from megatron.errors import UserError
from megatron.report.groups import groups
from megatron.report.html.bits import bits_per_byte as in_page
from megatron.report.html.bits import over_tokenizers
from megatron.report.html.page import Page
from megatron.results.bits import lines, table
from megatron.results.check import fault_of
from megatron.results.files import write_results
from megatron.results.row import Row, measurement_of
from megatron.results.statistics import bits_per_byte
from megatron.results.table import by_length
from tests.results.paired_rows import row, texts
from tests.results.rows import rows
from tools.compare import main as compare
from tools.show_results import main as show_results


def with_bytes(found, size, way="tokenizer"):
    for one in found:
        bits = one["loss"] * one["tokens"] / (math.log(2) * size)
        one |= {"bytes": size, "bytes_from": way, "bits_per_byte": bits}
    return found


def test_a_uniform_guess_over_bytes_needs_eight_bits():
    assert bits_per_byte(math.log(256), tokens=1000, size=1000) == pytest.approx(8)
    assert bits_per_byte(math.log(256), tokens=500, size=1000) == pytest.approx(4)
    assert bits_per_byte(1.0, tokens=3, size=0) is None


def test_a_row_whose_bits_disagree_with_its_loss_is_damaged():
    (good,) = with_bytes(rows("alibi", {512: 20.0}), 30_000)
    assert fault_of(good, Row) is None
    assert "loss, tokens and bytes give" in fault_of(good | {"bits_per_byte": 1.0}, Row)
    assert "its bytes are 0, not above 0" in fault_of(good | {"bytes": 0}, Row)
    assert measurement_of(good) == measurement_of(rows("alibi", {512: 20.0})[0])


def test_runs_of_two_tokenizers_stand_in_one_table_with_the_bytes_that_they_scored():
    small = with_bytes(rows("alibi", {512: 20.0, 1024: 18.0}, tokenizer="aa"), 30_000)
    large = with_bytes(rows("alibi", {512: 40.0, 1024: 36.0}, tokenizer="bb"), 36_864.5, "card")
    old = rows("rotary", {512: 12.0}, tokenizer="aa")
    assert table([*small, *large, *old]).splitlines() == [
        "pos_emb                512*    1024",
        "-----------------------------------",
        "alibi, tokenizer aa  1.1802  1.1387",
        "alibi, tokenizer bb  1.1826  1.1489",
        "",
        "bits per byte on stdlib valid, 8,192 tokens (16 x 512 to 8 x 1024), protocol equal_tokens",
        "alibi, tokenizer aa: 30,000 bytes scored, bytes counted by the tokenizer",
        "alibi, tokenizer bb: 36,864 bytes scored, bytes estimated: tokens times the mean of the"
        " whole corpus",
        "tokenizers differ: the same number of tokens is not the same text, so compare runs that"
        " scored about the same bytes of the same part",
        "",
        "left out: 1 rows without bits per byte - measure again with evaluate.py where the"
        " tokenizer's files or a new card exist",
    ]


def test_what_all_runs_scored_is_one_line():
    found = with_bytes(rows("alibi", {512: 20.0}), 30_000)
    found += with_bytes(rows("rotary", {512: 25.0}, config_hash="0123456789ab"), 30_000)
    assert table(found).splitlines()[-1] == (
        "each: 30,000 bytes scored, bytes counted by the tokenizer"
    )


def test_bits_over_seeds_are_their_mean_with_its_spread(tmp_path, capsys):
    found = []
    for seed, perplexity in ((1, 20.0), (2, 22.0), (3, 27.0)):
        run = {"seed": seed, "config_hash": f"{seed:012}", "checkpoint": f"runs/{seed}"}
        found += with_bytes(rows("alibi", {512: perplexity}, **run), 30_000)
    write_results(tmp_path / "a.jsonl", found)
    assert show_results([str(tmp_path / "a.jsonl"), "--bits-per-byte", "--over-seeds"]) == 0
    bits = [math.log2(perplexity) * 8192 / 30_000 for perplexity in (20.0, 22.0, 27.0)]
    out = capsys.readouterr().out.splitlines()
    assert out[2].split() == ["alibi", "3", f"{mean(bits):.4f}", "±", f"{stdev(bits):.4f}"]
    assert out[-1] == "mean ± standard deviation over seeds"


def test_rows_without_bits_are_one_message(tmp_path, capsys):
    write_results(tmp_path / "a.jsonl", rows("alibi", {512: 20.0}))
    assert show_results([str(tmp_path / "a.jsonl"), "--bits-per-byte"]) == 1
    assert "none of these rows has them - measure again" in capsys.readouterr().err
    assert lines(rows("alibi", {512: 20.0})) == []


def test_a_run_has_a_line_of_bits():
    found = with_bytes(rows("alibi", {512: 20.0, 1024: 18.0}), 30_000)
    assert lines(found) == [
        "alibi: bits per byte 1.1802 at 512, 1.1387 at 1024 (bytes counted by the tokenizer)"
    ]


def test_the_beginning_of_a_window_has_no_bits_of_the_whole_window():
    (whole,) = with_bytes(rows("alibi", {1024: 20.0}), 30_000)
    loss = whole["loss"]
    whole |= {"position_edges": [0, 512, 1024], "position_losses": [loss, loss]}
    shorter, same = by_length([whole], [512, 1024])
    assert "bytes" not in shorter
    assert "bits_per_byte" not in shorter
    assert same["bits_per_byte"] == whole["bits_per_byte"]


def test_a_comparison_has_a_column_of_bits_where_it_is_asked_for(tmp_path, capsys):
    found = with_bytes([row("alibi", texts()), row("rotary", texts() + 0.1)], 100_000)
    write_results(tmp_path / "a.jsonl", found)
    assert compare([str(tmp_path / "a.jsonl")]) == 0
    assert "bits per byte" not in capsys.readouterr().out
    assert compare([str(tmp_path / "a.jsonl"), "--bits-per-byte"]) == 0
    out = capsys.readouterr().out
    assert "bits per byte" in out
    for one in found:
        assert f"{one['bits_per_byte']:.4f}" in out


def test_the_page_has_a_table_of_bits_where_rows_have_them():
    old = rows("alibi", {512: 20.0})
    assert in_page(groups(old, {}), old) == ""
    found = with_bytes(old, 30_000) + rows("rotary", {512: 12.0}, config_hash="0123456789ab")
    page = in_page(groups(found, {}), found)
    assert "1.1802" in page
    assert "not measured" in page
    assert "bytes counted by the tokenizer" in page


def test_the_page_shows_runs_that_were_measured_at_other_lengths():
    found = with_bytes(rows("alibi", {512: 20.0}), 30_000)
    found += with_bytes(rows("rotary", {1024: 12.0}, config_hash="0123456789ab"), 30_000)
    assert in_page(groups(found, {}), found).count("not measured") == 2


def test_the_page_has_a_table_of_all_tokenizers_with_the_bytes_that_were_scored():
    small = with_bytes(rows("alibi", {512: 20.0, 1024: 18.0}, tokenizer="aa"), 30_000)
    large = with_bytes(rows("alibi", {512: 40.0}, tokenizer="bb"), 36_864.5, "card")
    page = over_tokenizers([*small, *large])
    for text in ("alibi, tokenizer aa", "1.1387", "30,000", "alibi, tokenizer bb", "36,864"):
        assert text in page
    assert over_tokenizers(small) == ""
    headings = [section.heading for section in Page([*small, *large], [], {}).results()]
    text = "stdlib valid: equal_tokens, tokenizer"
    assert headings == [f"{text} aa", f"{text} bb", "Bits per byte of all tokenizers"]


def test_a_comparison_keeps_the_tables_of_tokenizers_apart(tmp_path, capsys):
    found = []
    for name in ("aa", "bb"):
        found.append(row("alibi", texts(), tokenizer=name, text=name, checkpoint=f"runs/{name}"))
        found.append(row("rope", texts(), tokenizer=name, text=name, checkpoint=f"runs/2{name}"))
    write_results(tmp_path / "a.jsonl", found)
    assert compare([str(tmp_path / "a.jsonl")]) == 0
    out = capsys.readouterr().out
    assert out.count(", tokenizer aa\n") == out.count(", tokenizer bb\n") == 1


def test_no_rows_with_bits_is_a_fault():
    with pytest.raises(UserError, match="none of these rows"):
        table(rows("alibi", {512: 20.0}))
