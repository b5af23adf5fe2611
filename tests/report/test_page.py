"""The page of results, read by a parser: every number in its place, gaps named, no links."""

import math
import re

import pytest

from megatron.report.evidence import Evidence, Gap
from megatron.report.html.drawn import grouped
from megatron.report.html.figures import svg
from megatron.report.html.page import Page
from megatron.report.html.probed import by_checkpoint
from megatron.results.comparison_table import over_seeds
from tests.report.support import ROWS, Reader, row, texts


@pytest.fixture(scope="module")
def page():
    return Page(ROWS, [], {}).html("Results <of> mine")


def test_the_page_is_well_formed_and_takes_nothing_from_elsewhere(page):
    read = Reader(page)
    assert all(reference.startswith("#") for reference in read.references), read.references
    assert len(read.ids) == len(set(read.ids))
    style = "".join(re.findall(r"<style.*?</style>", page, flags=re.DOTALL))
    assert "@import" not in style
    assert not re.search(r"url\((?!#)", style)
    assert "Results &lt;of&gt; mine" in page
    assert "<b>&" not in page


def test_every_number_of_the_rows_is_in_the_table(page):
    table = Reader(page).tables[0]
    lines = {line[0]: line[1:] for line in table}
    assert table[0] == ["pos_emb", "seeds", "512*", "1024"]
    assert lines["alibi"] == ["2", "11.00 ± 1.41", "9.25 ± 0.35"]
    assert lines["mep"] == ["1", "11.25", "3.5e+05"]
    assert lines["learned"] == ["1", "13.50", "n/a"]
    for one in ROWS:
        if one["perplexity"] is not None:
            assert f"seed {one['seed']}: {one['perplexity']:.6g} (loss 2.4)" in page
    assert 'class="best"' not in page, "without losses by window nothing is known to be better"


def test_a_reason_that_holds_at_several_lengths_is_one_line():
    rows = [row(name, 1, n, 10.0) for name in ("alibi", "mep") for n in (512, 1024)]
    page = Page(rows, [], {}).html("t")
    assert "<p>nothing can be compared with alibi:</p>" in page
    assert "<li>2 times: mep at 512; mep at 1024: mep: no losses by window" in page


def test_a_pass_by_position_is_shown_at_the_shorter_lengths_that_it_holds():
    measured = {"protocol": "position", "position_edges": [0, 512, 1024, 1500, 2048], "windows": 1}
    rows = [
        row(
            "mep",
            1,
            2048,
            math.exp(2.0),
            loss=2.0,
            position_losses=[3.0, 2.0, 1.0, 2.0],
            **measured,
        )
    ]
    table = Reader(Page(rows, [], {}).html("t")).tables[0]
    assert table[0] == ["pos_emb", "seeds", "512*", "1024", "2048"]
    assert table[1][2:4] == [f"{math.exp(3.0):.2f}", f"{math.exp(2.5):.2f}"]
    assert table[1][4].startswith("7.39")


def test_speed_is_of_all_tokens_that_pass_and_a_window_has_its_own():
    rows = [row("mep", 1, 512, 9.0, tokens_per_second=1000.0)]
    rows += [
        row("mep", 1, 512, 9.0, protocol="tail", tail=128, tokens=9 * 128, tokens_per_second=500.0)
    ]
    rows += [row("mep", 1, 512, 9.0, window=64, tokens_per_second=4000.0)]
    (speed,) = [
        table
        for table in Reader(Page(rows, [], {}).html("t")).tables
        if table[0][:2] == ["pos_emb", "device"]
    ]
    assert speed[1:] == [["mep, window none", "cpu", "1,500"], ["mep, window 64", "cpu", "4,000"]]


def test_probes_of_two_variants_or_models_are_no_single_model():
    one = {
        "pos_emb": "mep",
        "seed": 1,
        "step": 10,
        "corpus": "stdlib",
        "part": "valid",
        "config_hash": "a",
    }
    one |= {
        "probe": "receptive_field",
        "length": 512,
        "reach": 500,
        "pos_emb_args": {"kernels": ["exp"]},
    }
    assert [*by_checkpoint([one, one | {"length": 1024}])] == ["mep, seed 1, step 10, stdlib valid"]
    others = [
        one | {"window": 64},
        one | {"pos_emb_args": {"kernels": ["log"]}, "config_hash": "b"},
    ]
    assert [
        label.removeprefix("mep, seed 1, step 10, stdlib valid, ")
        for label in by_checkpoint([one, *others])
    ] == [
        "pos_emb_args kernels [exp], window none",
        "pos_emb_args kernels [exp], window 64",
        "pos_emb_args kernels [log]",
    ]


def test_two_texts_of_one_run_are_no_two_seeds():
    rows = [row("mep", 1, 512, 10.0, text="a"), row("mep", 1, 512, 20.0, text="b", tokens=9216)]
    page = Page(rows, [], {}).html("t")
    assert Reader(page).tables[0][1] == ["mep", "1", "20.00"]
    assert "mep: several texts were scored at length 512; the last is shown" in page
    assert "mep          1  20.00" in over_seeds(rows)


def test_what_is_missing_is_said(page):
    missing = page[page.index("<h2>What is missing") :]
    assert "stdlib valid, equal_tokens, learned at 1024: learned positions end at 512" in missing
    assert "no rows of tools/probe.py were given" in missing
    assert "No metrics.jsonl was found" in page
    evidence = {ROWS[0]["checkpoint"]: Evidence(gaps=[Gap("runs/x", "not found from here")])}
    assert "runs/x: not found from here" in Page(ROWS[:1], [], evidence).html("t")


def test_gaps_of_one_cause_are_one_line_with_their_number():
    gaps = [Gap(f"runs/{name}", "not found") for name in "abcde"] + [Gap("probes", "none given")]
    assert grouped([*gaps, gaps[0]]) == [
        "5 times: runs/a; runs/b; runs/c; and 2 more: not found",
        "probes: none given",
    ]


def test_differences_say_when_no_configuration_could_be_read():
    unknown = Page(ROWS, [], {}).html("t")
    assert "Unknown: no configuration could be read." in unknown
    evidence = {ROWS[0]["checkpoint"]: Evidence(settings={"lr": 1.0, "seed": 1})}
    some = Page(ROWS, [], evidence).html("t")
    assert "Configurations of 1 of 3 models were read." in some
    assert "They differ in nothing but their seeds." in some
    options = [{"kernels": ["exp"]}, {"kernels": ["exp", "gaussian"], "normalise": True}]
    for one, args in zip((ROWS[4], ROWS[6]), options, strict=True):
        evidence[one["checkpoint"]] = Evidence(settings={"lr": 2.0, "pos_emb_args": args})
    table = next(
        table for table in Reader(Page(ROWS, [], evidence).html("t")).tables if table[0][0] == "key"
    )
    assert table[0] == ["key", "value", "models"]
    assert table[1:] == [
        ["lr", "1.0", "alibi"],
        ["lr", "2.0", "mep; learned"],
        ["pos_emb_args", "kernels [exp]", "mep"],
        ["pos_emb_args", "kernels [exp, gaussian], normalise on", "learned"],
    ]


def test_options_in_the_table_of_runs_are_written_as_in_labels(page):
    (runs,) = [table for table in Reader(page).tables if table[0][0] == "checkpoint"]
    assert runs[0][2] == "options"
    assert [line[2] for line in runs[1:]] == ["-", "-", "kernels [exp, <b>&]", "-"]


def test_a_caption_describes_the_bands_that_the_figure_has():
    def caption(rows):
        found = re.search("<figcaption>(.*?)</figcaption>", Page([*rows], [], {}).html("t"))
        return found[1] if found else ""

    lengths = (512, 1024)
    plain = [row(name, 1, n, 10.0) for name in ("alibi", "mep") for n in lengths]
    assert caption(plain) == ""
    both = [row("alibi", seed, n, 9.0 + seed) for seed in (1, 2) for n in lengths]
    assert caption(both) == "Means over seeds. Bands: one standard deviation over seeds."
    one = texts(*(("alibi", n, 0.0) for n in lengths))
    assert caption(one).startswith("Bands of single seeds: 95 % interval over windows")
    two = texts(*((name, n, 0.0) for name in ("alibi", "mep") for n in lengths))
    assert "difference from alibi, which has no band" in caption(two)
    assert "standard deviation" not in caption(two)


def test_curves_that_stay_low_are_drawn_once_more_in_the_same_colours():
    rows = [
        *ROWS[:4],
        row("rotary", 1, 512, 11.0),
        row("rotary", 1, 1024, 10.0),
        row("mep", 1, 512, 9.0),
        ROWS[5],
    ]
    page = Page(rows, [], {})
    page.html("t")
    whole, near = page.figures["perplexity"].axes[0], page.figures["perplexity-near"].axes[0]
    colours = {
        line.get_color(): list(line.get_ydata())
        for line in whole.lines
        if len(line.get_ydata()) == 2
    }
    again = {
        line.get_color(): list(line.get_ydata())
        for line in near.lines
        if len(line.get_ydata()) == 2
    }
    assert [11.0, 9.25] in again.values()
    assert [9.0, 345678.0] not in again.values()
    assert again.items() <= colours.items()


def test_a_figure_takes_the_colours_of_the_page_and_ids_of_its_own():
    page = Page(ROWS, [], {})
    page.html("t")
    text = svg(page.figures["perplexity"], 7, "perplexity")
    assert text.startswith('<svg role="img" aria-label="perplexity"')
    assert "stroke: currentColor" in text
    assert not re.search(r"(stroke|fill): #(000000|666666|e3e3e3)", text, flags=re.IGNORECASE)
    for target in re.findall(r'(?:href="#|url\(#)([^")]+)', text):
        assert f'id="{target}"' in text
        assert target.startswith("f7-")
    assert ">alibi" in text
