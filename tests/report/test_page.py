"""The page of results, read by a parser: every number in its place, gaps named, no links."""

import re

import pytest

from megatron.report.evidence import Evidence, Gap
from megatron.report.page import page_of_rows
from tests.report.support import ROWS, Reader, row
from tests.results.rows import rows, seeds_of, with_bytes


@pytest.fixture(scope="module")
def page():
    return page_of_rows(ROWS, [], {}).html("Results <of> mine")


def tables(*arguments):
    return Reader(page_of_rows(*arguments).html("t")).tables


def test_the_page_is_well_formed_and_takes_nothing_from_elsewhere(page):
    read = Reader(page)
    assert all(reference.startswith("#") for reference in read.references), read.references
    assert len(read.ids) == len(set(read.ids))
    for target in re.findall(r'(?:href="#|url\(#)([^")]+)', page):
        assert target in read.ids
    style = "".join(re.findall(r"<style.*?</style>", page, flags=re.DOTALL))
    assert "@import" not in style
    assert not re.search(r"url\((?!#)", style)


def test_no_text_of_a_row_is_markup():
    evil = '<script>alert("x")</script><b>&\'"'
    keys = ("pos_emb", "corpus", "part", "protocol", "checkpoint", "device", "commit", "reason")
    hostile = dict.fromkeys(keys, evil) | {"pos_emb_args": {"kernels": [evil]}}
    found = [one | hostile | {"perplexity": None, "loss": None} for one in ROWS[:2]]
    probe = {"probe": "copy", "length": 9, "step": 1, "config_hash": evil, "reason": evil}
    evidence = {evil: Evidence(settings={evil: evil}, gaps=[Gap(evil, evil)])}
    page = page_of_rows([*found, *ROWS], [probe | hostile], evidence).html(evil)
    assert "<script>alert" not in page
    assert "<b>" not in page
    assert page.count("<script") == 1
    Reader(page)


def test_every_number_of_the_rows_is_in_the_table(page):
    table = Reader(page).tables[0]
    lines = {line[0]: line[1:] for line in table}
    assert table[0] == ["pos_emb", "seeds", "512*", "1024"]
    assert lines["alibi"] == ["2", "11.00 ± 1.41", "9.25 ± 0.35"]
    assert lines["mep"] == ["1", "11.25", "3.5e+05"]
    assert lines["learned"] == ["1", "13.50", "n/a"]
    for one in ROWS:
        if one["perplexity"] is not None:
            assert f"seed {one['seed']}: {one['perplexity']:.6g}" in page


def test_each_text_and_protocol_has_a_section_and_two_texts_of_a_run_are_no_two_seeds():
    found = [row("mep", 1, 512, 10.0, text="a"), row("mep", 1, 512, 20.0, text="b")]
    found += [row("mep", 1, 512, 30.0, protocol="tail", tail=128)]
    headings = [section.heading for section in page_of_rows(found, [], {}).sections]
    assert headings[0] == "stdlib valid: equal_tokens"
    assert headings[1].endswith("protocol equal_tokens, text b")
    assert headings[2] == "stdlib valid: tail"
    shown = [table[1] for table in tables(found, [], {}) if table[0][0] == "pos_emb"]
    assert shown == [["mep", "1", "10.00"], ["mep", "1", "20.00"], ["mep", "1", "30.00"]]


def test_a_pass_by_position_is_shown_at_the_shorter_lengths_that_it_holds():
    edges, losses = [0, 512, 1024, 1500, 2048], [3.0, 2.0, 1.0, 2.0]
    measured = {"protocol": "position", "position_edges": edges, "position_losses": losses}
    one = row("mep", 1, 2048, 7.389, loss=2.0, windows=1, **measured)
    table = tables([one], [], {})[0]
    assert table[0] == ["pos_emb", "seeds", "512*", "1024", "2048"]
    assert table[1][2:4] == ["20.09", "12.18"]  # exp(3) and exp(2.5)


def test_encodings_are_compared_on_the_same_text_or_the_page_says_why_not():
    shifts = {"a": [0.0, 0.0, 0.0], "b": [0.2, 0.21, 0.22], "c": [0.1]}
    found = [one for name, of_seeds in shifts.items() for one in seeds_of(name, of_seeds)]
    page = page_of_rows(found, [], {}, "a").html("t")
    (table,) = [one for one in Reader(page).tables if one[0][0] == "loss - a"]
    assert table[1][0] == "b"
    assert table[1][1].startswith("†+0.210 [")
    assert table[2][1].startswith("+0.100 [")
    assert "+0.2000 (seed 1), +0.2100 (seed 2)" in page
    assert "Holm" in page
    apart = page_of_rows([row(name, 1, 512, 10.0) for name in ("alibi", "mep")], [], {}).html("t")
    assert "nothing can be compared with alibi:" in apart
    assert "mep: no losses by window" in apart


def test_bits_per_byte_have_a_table_where_rows_have_them():
    found = with_bytes(rows("alibi", {512: 20.0, 1024: 18.0}), 30_000)
    bits = tables(found, [], {})[1]
    assert bits[1] == ["alibi", "1", "1.1802", "1.1387"]
    assert len(tables(rows("alibi", {512: 20.0}), [], {})) == 2


def test_models_that_differ_in_known_settings_are_lines_of_their_own():
    evidence = {ROWS[0]["checkpoint"]: Evidence(settings={"lr": 1.0, "seed": 1})}
    evidence[ROWS[1]["checkpoint"]] = Evidence(settings={"lr": 2.0, "seed": 2})
    one = Evidence(settings={"lr": 1.0, "pos_emb_args": {"kernels": ["exp"]}})
    evidence[ROWS[4]["checkpoint"]] = one
    one.metrics = [{"step": 5, "kind": "train", "loss": 3.5, "tokens_per_second": 77.0}]
    found = tables(ROWS, [], evidence)
    labels = [line[0] for line in found[0]]
    assert labels == ["pos_emb", "alibi, config_hash h1", "alibi, config_hash h2", "mep", "learned"]
    (settings,) = [table for table in found if table[0][0] == "key"]
    assert ["lr", "1.0", "alibi, config_hash h1; mep"] in settings
    (models,) = [table for table in found if table[0][0] == "checkpoint"]
    of_mep = dict(zip(models[0], models[3], strict=True))
    assert (of_mep["options"], of_mep["tokens per second"]) == ("kernels [exp, <b>&]", "77")


def test_probes_of_each_model_have_a_figure():
    shared = {"pos_emb": "mep", "seed": 1, "step": 10, "corpus": "stdlib", "part": "valid"}
    shared |= {"config_hash": "a", "length": 512}
    answer = {"accuracy": 0.5, "low": 0.3, "high": 0.7, "log_probability": -1.0, "without": -2.5}
    probes = [
        shared | {"probe": "passkey", "depth": 0.5, "guess": 0.1, **answer},
        shared | {"probe": "receptive_field", "reach": 500},
        shared | {"probe": "copy", "window": 64, "reason": "it ends"},
    ]
    page = page_of_rows([], probes, {})
    labels = [label for label, _ in page.probed]
    assert [label.split(", ")[-1] for label in labels] == ["window none", "window 64"]
    assert {"probes-1", "probes-2"} <= page.figures.keys()
    shown = page.html("t")
    assert {"0.50", "(0.1)", "+1.50"} <= set(Reader(shown).texts)
    assert page.gaps["it ends"] == [f"copy of {labels[1]} at 512"]
    assert "Does the model repeat the tokens?" in shown


def test_curves_that_stay_low_are_drawn_once_more():
    found = [*ROWS[:4], row("rotary", 1, 512, 11.0), row("rotary", 1, 1024, 10.0), *ROWS[4:6]]
    page = page_of_rows(found, [], {})
    whole, near = (page.figures[name].axes[0] for name in ("perplexity", "perplexity-near"))
    highest = [max(line.get_ydata()) for line in near.lines if len(line.get_ydata()) == 2]
    assert max(highest) < 13
    assert max(max(line.get_ydata()) for line in whole.lines) > 1e5


def test_what_is_missing_is_said_once_for_each_cause():
    evidence = {f"runs/{name}": Evidence(gaps=[Gap(f"runs/{name}", "gone")]) for name in "abcd"}
    page = page_of_rows(ROWS, [], evidence).html("t")
    missing = page[page.index("<h2>What is missing") :]
    assert "stdlib valid: equal_tokens, learned at 1024: learned positions end at 512" in missing
    assert "No rows of tools/probe.py were given" in page
    assert "4 times: runs/a; runs/b; runs/c; and 1 more: gone" in missing
    assert "No metrics.jsonl was found" in page
