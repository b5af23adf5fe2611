"""The page of results, read by a parser: nothing from elsewhere, every number in its place, gaps named."""

import math
import re
from html.parser import HTMLParser

import numpy as np
import pytest

from megatron.errors import UserError
from megatron.report.groups import (
    Evidence,
    groups,
    interval,
    models,
    perplexity_curve,
    position_curve,
    position_differences,
    summary,
)
from megatron.report.html.figures import svg
from megatron.report.html.page import Page, by_checkpoint, with_prefixes
from megatron.report.html.paired import comparisons, intervals
from megatron.results.comparison import over_seeds
from megatron.results.row import last_of_each

SHARED = {
    "step": 10,
    "train_length": 512,
    "windows": 9,
    "tokens": 4608,
    "loss": 2.4,
    "corpus": "stdlib",
    "part": "valid",
}
SHARED |= {
    "protocol": "equal_tokens",
    "commit": "abc123",
    "device": "cpu",
    "tokens_per_second": 1234.5,
}
VOID = {"meta", "link", "br", "img", "input", "hr"}


def row(pos_emb, seed, length, perplexity, **more):
    found = {
        "pos_emb": pos_emb,
        "seed": seed,
        "length": length,
        "perplexity": perplexity,
        "config_hash": f"h{seed}",
    }
    return SHARED | found | {"checkpoint": f"runs/{pos_emb}-{seed}/global_step10"} | more


ROWS = [
    *(
        row("alibi", seed, n, p)
        for n, seed, p in ((512, 1, 10.0), (512, 2, 12.0), (1024, 1, 9.0), (1024, 2, 9.5))
    ),
    *(
        row("mep", 1, n, p, pos_emb_args={"kernels": ["exp", "<b>&"]})
        for n, p in ((512, 11.25), (1024, 345678.0))
    ),
    row("learned", 1, 512, 13.5),
    row("learned", 1, 1024, None, loss=None, reason="learned positions end at 512"),
]


class Reader(HTMLParser):
    """Checks that every element is closed in its turn; keeps references, and the texts of cells by table."""

    def __init__(self, page):
        super().__init__()
        self.open, self.references, self.ids, self.tables, self.texts = [], [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        told = dict(attributes)
        self.references += [
            told[key] for key in ("src", "href", "xlink:href", "action") if key in told
        ]
        self.ids += [told["id"]] if "id" in told else []
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += text


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


def texts(*encodings):
    """Rows of 64 windows each: (pos_emb, length, what its loss has more than alibi's in every window)."""
    hard = 3 + 0.5 * np.random.default_rng(0).standard_normal(64)
    noise = 0.01 * np.random.default_rng(1).standard_normal((len(encodings), 64))
    for (name, length, more), one in zip(
        encodings, noise - noise.mean(axis=1, keepdims=True), strict=True
    ):
        losses = hard + one + more
        numbers = {
            "loss": losses.mean(),
            "window_losses": losses.tolist(),
            "text": f"t{length}",
            "windows": 64,
        }
        yield row(name, 1, length, math.exp(losses.mean()), **numbers)


def test_bold_is_what_does_not_differ_significantly_from_the_lowest():
    rows = texts(
        *(("alibi", 512, 0.0), ("mep", 512, 0.0005), ("t5", 512, 0.05)),
        *(("alibi", 1024, 0.05), ("mep", 1024, 0.0), ("t5", 1024, 0.5)),
    )
    found = Page([*rows], [], {}).html("t")
    bold = re.findall(
        r'<tr><td>(\w+)</td><td[^>]*>1</td><td( class="best")?[^>]*>.*?</td><td( class="best")?',
        found,
    )
    assert [(name, bool(first), bool(second)) for name, first, second in bold] == [
        *(("alibi", True, False), ("mep", True, True), ("t5", False, False)),
    ]


@pytest.mark.parametrize(
    "change", [{"window_losses": [3.0, 3.1], "windows": 2}, {"window_losses": None}, {"text": "u"}]
)
def test_nothing_is_bold_where_a_number_cannot_be_tested(change):
    rows = [*texts(("alibi", 512, 0.0), ("mep", 512, 0.5), ("t5", 512, 0.1))]
    several = change.get("windows") == 2  # two windows say nothing about their error
    rows = [one | change if several or one["pos_emb"] == "t5" else one for one in rows]
    assert 'class="best"' not in Page(rows, [], {}).html("t")
    refused = [
        one | {"loss": None, "perplexity": None, "reason": "it ends before"} for one in rows[2:]
    ]
    assert several or 'class="best"' in Page([*rows[:2], *refused], [], {}).html("t")


def test_differences_are_from_the_lowest_at_the_longest_length_that_has_a_number():
    rows = [*texts(("alibi", 512, 0.0), ("mep", 512, 0.5))]
    rows += [
        row(name, 1, 1024, None, loss=None, reason="out of memory") for name in ("alibi", "mep")
    ]
    assert Reader(Page(rows, [], {}).html("t")).tables[1][0] == ["loss - alibi", "512", "1024"]


def test_differences_are_paired_against_the_lowest_at_the_longest_length_or_one_that_is_named():
    rows = [
        *texts(
            ("alibi", 512, 0.0),
            ("mep", 512, -0.03),
            ("t5", 512, 0.1),
            ("alibi", 1024, 0.0),
            ("mep", 1024, 0.2),
        )
    ]
    table = Reader(Page(rows, [], {}).html("t")).tables[1]
    assert table[0] == ["loss - alibi", "512", "1024"]
    assert [[text.split(" ")[0] for text in line] for line in table[1:]] == [
        ["mep", "‡-0.030", "†+0.200"],
        ["t5", "†+0.100", "-"],
    ]
    other = Reader(Page(rows, [], {}, against="mep").html("t")).tables[1]
    assert other[0] == ["loss - mep", "512", "1024"]
    assert other[1][0] == "alibi"
    with pytest.raises(
        UserError,
        match="--against: 'rope' is no encoding of these results - choose one of 'alibi', 'mep', 't5'",
    ):
        Page(rows, [], {}, against="rope").html("t")


def test_where_nothing_can_be_paired_the_page_says_why():
    rows = [row("alibi", 1, 512, 10.0), row("mep", 1, 512, 11.0)]
    assert "mep at 512: mep: no losses by window in its results - measure it again" in Page(
        rows, [], {}
    ).html("t")


def test_a_pass_by_position_is_shown_at_the_shorter_lengths_that_it_holds():
    told = {"protocol": "position", "position_edges": [0, 512, 1024, 1500, 2048], "windows": 1}
    rows = [
        row("mep", 1, 2048, math.exp(2.0), loss=2.0, position_losses=[3.0, 2.0, 1.0, 2.0], **told)
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


def test_a_pass_by_position_that_was_measured_counts_more_than_the_beginning_of_a_longer_one():
    rows = [
        row(
            "mep",
            1,
            n,
            9.0,
            loss=n / 1024,
            position_losses=[3.0] * len(edges[1:]),
            position_edges=edges,
            windows=1,
        )
        for n, edges in ((1024, [0, 512, 1024]), (2048, [0, 512, 1024, 2048]))
    ]
    shown = {one["length"]: one["loss"] for one in last_of_each(with_prefixes(rows))}
    assert shown == {512: 3.0, 1024: 1.0, 2048: 2.0}


def test_differences_by_position_are_those_of_the_same_text_over_half_octaves():
    told = {"protocol": "position", "position_edges": [0, 1, 2, 4, 5, 6, 8, 12], "text": "t"}
    text = np.array([9.0, 3.0, 5.0, 1.0, 2.0, 4.0, 8.0])
    more = {
        "alibi": 0.0,
        "mep": np.array([0.1, 0.2, 0.3, 0.4, 0.8, -0.2, 7.0]),
        "t5": 0.5,
        "other": 0.0,
    }
    rows = [
        row(
            name,
            1,
            12,
            9.0,
            position_losses=[*(text + one)],
            **told | ({"text": "u"} if name == "other" else {}),
        )
        for name, one in more.items()
    ]
    found = {curve.label: curve for curve in position_differences(groups(rows, {}), "alibi")}
    assert list(found["mep"].at) == [
        0.5,
        1.5,
        3.0,
        5.0,
    ]  # 5 is below 4 sqrt(2), 8 below 6 sqrt(2); the last is too far away
    assert list(found["mep"].values) == pytest.approx([0.1, 0.2, 0.3, 0.6])
    assert list(found["t5"].values) == pytest.approx([0.5] * 5)
    assert not found["other"].at
    assert not found["alibi"].at
    page = Page(rows, [], {}, against="alibi")
    page.html("t")
    assert "position-differences" in page.figures


def test_differences_by_position_are_drawn_past_a_few_tokens_of_chance_and_on_a_linear_axis():
    edges = [0, 1, 64, 128, 192, 320]
    more = {
        "alibi": [0.0] * 5,
        "mep": [2.0, 0.5, 0.004, 0.006, 0.004],
        "t5": [3.0, 0.1, 0.2, 1.5, 0.1],
    }
    told = {"protocol": "position", "position_edges": edges, "text": "t"}
    rows = [row("learned", 1, 320, None, loss=None, reason="ends at 64", protocol="position")]
    rows += [
        row(name, 1, 320, 9.0, position_losses=[3.0 + d for d in one], **told)
        for name, one in more.items()
    ]
    page = Page(rows, [], {}, against="alibi")
    page.html("t")
    axes, losses = (page.figures[name].axes[0] for name in ("position-differences", "position"))
    assert axes.get_yscale() == "linear"
    assert {text.get_text() for text in axes.texts} >= {"mep  +0.004", "t5  +0.200 at 96"}
    colours = [
        {text.get_text().split()[0]: text.get_color() for text in one.texts}
        for one in (axes, losses)
    ]
    assert all(colours[0][name] == colours[1][name] for name in ("mep", "t5"))


def test_what_is_missing_is_said(page):
    missing = page[page.index("<h2>What is missing") :]
    assert "stdlib valid, equal_tokens, learned at 1024: learned positions end at 512" in missing
    assert "no rows of tools/probe.py were given" in missing
    assert "No metrics.jsonl was found" in page
    gap = Page(
        ROWS[:1], [], {ROWS[0]["checkpoint"]: Evidence(gaps=["runs/x: not found from here"])}
    ).html("t")
    assert "runs/x: not found from here" in gap


def test_only_runs_that_differ_in_nothing_but_the_seed_are_one_line():
    same = [row("mep", seed, 512, 10.0 + seed) for seed in (1, 2)]
    assert [group.label for group in groups(same, {})] == ["mep"]
    assert [group.seeds for group in groups(same, {})] == [[1, 2]]
    evidence = {
        one["checkpoint"]: Evidence(settings={"lr": one["seed"], "seed": one["seed"]})
        for one in same
    }
    assert len(groups(same, evidence)) == 2, (
        "their configurations say that the learning rate is another"
    )
    cells = [
        one | {"cell": {"corpus": "a", "size": one["seed"], "seed": one["seed"]}} for one in same
    ]
    assert len(groups(cells, {})) == 2, "their cells say that the size is another"
    half = {
        same[0]["checkpoint"]: Evidence(settings={"lr": 1, "seed": 1}),
        same[1]["checkpoint"]: Evidence(),
    }
    assert len(groups(same, half)) == 1, "one checkpoint was found, the other was not"
    twins = [same[0], same[0] | {"config_hash": "other", "checkpoint": "elsewhere"}]
    assert len(groups(twins, {})) == 2, "one seed, two configurations"


def test_a_model_that_a_sweep_and_a_user_measured_is_one_with_a_short_name():
    cell = {"sweep": "cpu", "cell": {"pos_emb": "mep", "seed": 1}, "weights": "w1"}
    of_sweep = [
        row("mep", 1, 512, 10.0, **cell),
        row("mep", 2, 512, 11.0, **(cell | {"weights": "w2"})),
    ]
    own = row("mep", 1, 512, 9.0, window="train_length", weights="w1", checkpoint="copied/step10")
    evidence = {own["checkpoint"]: Evidence(settings={"lr": 1.0, "seed": 1})}
    assert [group.label for group in models([*of_sweep, own], evidence)] == ["mep"]
    labels = [group.label for group in groups([*of_sweep, own], evidence)]
    assert labels == ["mep, window none", "mep, window 512"]
    other = [own | {"config_hash": "other", "weights": "w3", "window": None}]
    assert [group.label for group in groups([*of_sweep, *other], evidence)] == [
        "mep, config_hash h1", "mep, config_hash other"
    ]  # fmt: skip


def test_settings_that_differ_make_two_groups_of_one_cell_name():
    cells = [
        row("mep", seed, 512, 10.0, cell={"seed": seed}, weights=f"w{seed}") for seed in (1, 2)
    ]
    evidence = {
        one["checkpoint"]: Evidence(settings={"lr": one["seed"], "seed": one["seed"]})
        for one in cells
    }
    assert len(groups(cells, {})) == 1
    assert len(groups(cells, evidence)) == 2, "the sweep's file was edited between its runs"


def test_the_band_of_one_seed_is_that_of_its_difference_where_another_has_the_same_text():
    rows = [*texts(("alibi", 512, 0.0), ("mep", 512, 0.02))]
    found = groups(rows, {})
    told, _ = comparisons(found, "alibi")
    reference, other = (perplexity_curve(group, intervals(told)) for group in found)
    (low, high) = told[1].interval
    mean = told[1].difference.mean
    assert reference.low is None
    assert (other.low[0], other.high[0]) == pytest.approx(
        (
            rows[1]["perplexity"] * math.exp(low - mean),
            rows[1]["perplexity"] * math.exp(high - mean),
        )
    )
    alone = perplexity_curve(found[1])
    assert alone.high[0] - alone.low[0] > 5 * (other.high[0] - other.low[0]), (
        "windows differ by much more than models"
    )


def test_runs_of_a_sweep_are_told_apart_by_its_axes():
    cells = [("github", "small"), ("arxiv", "small"), ("arxiv", "wide")]
    rows = [
        row(
            "mep",
            1,
            512,
            9.0,
            cell={"data": data, "size": size, "pos_emb": "mep", "seed": 1},
            config_hash=data + size,
        )
        for data, size in cells
    ]
    labels = ["mep, data github", "mep, data arxiv, size small", "mep, data arxiv, size wide"]
    assert [group.label for group in groups(rows, {})] == labels


def test_a_mean_over_seeds_is_over_all_of_them_or_none():
    assert summary([row("mep", 1, 512, 10.0), row("mep", 2, 512, None)]) is None
    found = summary([row("mep", 1, 512, 10.0), row("mep", 2, 512, 14.0)])
    assert (found.mean, found.std) == (12.0, pytest.approx(math.sqrt(8)))
    (group,) = groups(ROWS[:4], {})
    curve = perplexity_curve(group)
    assert list(curve.values) == [11.0, 9.25]
    assert list(curve.low) == pytest.approx([11 - math.sqrt(2), 9.25 - math.sqrt(0.125)])


def test_one_seed_has_the_interval_of_its_windows_which_is_wider_where_neighbours_are_alike():
    losses = [2.0] * 8 + [2.2] * 8
    low, high = map(
        math.log, interval(row("mep", 1, 512, math.exp(2.1), loss=2.1, window_losses=losses))
    )
    independent = 1.96 * 0.1 / math.sqrt(15)  # of windows that know nothing of each other
    assert (low + high) / 2 == pytest.approx(2.1)
    assert 1.5 * independent < high - 2.1 < 5 * independent
    assert interval(row("mep", 1, 512, 8.0, window_losses=losses[:7])) is None


def test_losses_by_position_are_drawn_between_their_edges():
    told = {"protocol": "position", "position_edges": [0, 1, 3, 512]}
    rows = [row("mep", seed, 512, 9.0, position_losses=[5.0, 4.0, seed], **told) for seed in (1, 3)]
    (group,) = groups(rows, {})
    curve = position_curve(group)
    assert (list(curve.at), list(curve.values)) == ([0.5, 2.0, 257.5], [5.0, 4.0, 2.0])
    page = Page(rows, [], {})
    assert "Loss by position" in page.html("t")
    assert "position" in page.figures


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
