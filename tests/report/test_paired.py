"""Differences from one encoding on the page: which are marked, what is bold, and why nothing is."""

import re

import pytest

from megatron.errors import UserError
from megatron.report.groups import groups
from megatron.report.html.page import Page
from megatron.report.html.paired import as_low_as_the_lowest
from tests.report.support import Reader, row, texts


def seeds_of(*encodings, seeds=3):
    """The rows of `texts` for several seeds, whose losses differ a little."""
    rows = []
    for seed in range(1, seeds + 1):
        shifted = [(name, length, more * (1 + seed / 50)) for name, length, more in encodings]
        for one in texts(*shifted):
            checkpoint = f"runs/{one['pos_emb']}-{seed}"
            rows.append(one | {"seed": seed, "config_hash": f"h{seed}", "checkpoint": checkpoint})
    return rows


def bold(rows, length):
    return as_low_as_the_lowest(groups(rows, {}), length)


def test_bold_is_what_does_not_differ_significantly_from_the_lowest():
    rows = seeds_of(
        *(("alibi", 512, 0.0), ("mep", 512, 0.0005), ("t5", 512, 0.05)),
        *(("alibi", 1024, 0.05), ("mep", 1024, 0.0), ("t5", 1024, 0.5)),
    )
    # mep at 512 is above alibi with one seed and below with another.
    first = next(one for one in rows if one["pos_emb"] == "mep" and one["length"] == 512)
    first["loss"] -= 0.002
    assert bold(rows, 512) == {"alibi", "mep"}
    assert bold(rows, 1024) == {"mep"}
    page = Page(rows, [], {}).html("t")
    assert len(re.findall('class="best"', page)) == 3
    assert "Bold: the lowest mean of a column" in page


def test_nothing_is_bold_or_marked_with_two_seeds_and_the_page_says_why():
    rows = seeds_of(("alibi", 512, 0.0), ("mep", 512, 0.2), ("t5", 512, 0.1), seeds=2)
    page = Page(rows, [], {}).html("t")
    assert 'class="best"' not in page
    assert "Nothing is bold: which encoding is lower is a claim about training, and needs" in page
    assert "at least 3 seeds of each" in page
    assert "In brackets: 95 % interval, these weights on this text." in page
    assert "a claim about an encoding needs 3 seeds" in page
    assert not {"†", "‡"} & set(page)
    assert "by seed: +0.2040 (seed 1), +0.2080 (seed 2)" in page
    assert "disagree" not in page
    each_seed = Reader(page).tables[2]
    assert each_seed == [
        ["each seed's loss - alibi", "512"],
        ["mep", "+0.204, +0.208"],
        ["t5", "+0.102, +0.104"],
    ]
    one_seed = [one for one in rows if one["seed"] == 1]
    heads = [table[0][0] for table in Reader(Page(one_seed, [], {}).html("t")).tables]
    assert heads[:2] == ["pos_emb", "loss - alibi"]
    assert "each seed's loss - alibi" not in heads


def test_seeds_that_disagree_in_sign_are_said_to_beside_their_difference():
    rows = seeds_of(("alibi", 512, 0.0), ("mep", 512, 0.2), seeds=2)
    losses = [one - 0.5 for one in rows[1]["window_losses"]]
    rows[1] |= {"loss": rows[1]["loss"] - 0.5, "window_losses": losses}
    table = Reader(Page(rows, [], {}, against="alibi").html("t")).tables[2]
    assert table[1][1] == "-0.296, +0.208 seeds disagree in sign"


def test_an_encoding_with_fewer_seeds_than_the_others_leaves_nothing_bold():
    rows = seeds_of(("alibi", 512, 0.0), ("mep", 512, 0.2), ("t5", 512, 0.1))
    assert bold(rows, 512) == {"alibi"}
    assert bold([one for one in rows if (one["pos_emb"], one["seed"]) != ("t5", 2)], 512) == set()


@pytest.mark.parametrize("change", [{"window_losses": None}, {"text": "u"}])
def test_nothing_is_bold_where_a_number_cannot_be_tested(change):
    rows = seeds_of(("alibi", 512, 0.0), ("mep", 512, 0.5), ("t5", 512, 0.1))
    without = [one for one in rows if one["pos_emb"] != "t5"]
    changed = [one | change for one in rows if one["pos_emb"] == "t5"]
    assert bold([*without, *changed], 512) == set()
    refused = {"loss": None, "perplexity": None, "reason": "it ends before"}
    assert bold([*without, *(one | refused for one in changed)], 512) == {"alibi"}


def test_differences_are_from_the_lowest_at_the_longest_length_that_has_a_number():
    rows = [*texts(("alibi", 512, 0.0), ("mep", 512, 0.5))]
    for name in ("alibi", "mep"):
        rows.append(row(name, 1, 1024, None, loss=None, reason="out of memory"))
    assert Reader(Page(rows, [], {}).html("t")).tables[1][0] == ["loss - alibi", "512", "1024"]


def test_differences_are_paired_against_the_lowest_at_the_longest_length_or_one_that_is_named():
    rows = seeds_of(
        *(("alibi", 512, 0.0), ("mep", 512, -0.03), ("t5", 512, 0.1)),
        *(("alibi", 1024, 0.0), ("mep", 1024, 0.2)),
    )
    table = Reader(Page(rows, [], {}).html("t")).tables[1]
    assert table[0] == ["loss - alibi", "512", "1024"]
    assert [[text.split(" ")[0] for text in line] for line in table[1:]] == [
        ["mep", "‡-0.031", "†+0.208"],
        ["t5", "†+0.104", "-"],
    ]
    other = Reader(Page(rows, [], {}, against="mep").html("t")).tables[1]
    assert other[0] == ["loss - mep", "512", "1024"]
    assert other[1][0] == "alibi"
    with pytest.raises(
        UserError,
        match="--against: 'rope' is no encoding of these results - choose one of 'alibi', 'mep'",
    ):
        Page(rows, [], {}, against="rope").html("t")


def test_where_nothing_can_be_paired_the_page_says_why():
    rows = [row("alibi", 1, 512, 10.0), row("mep", 1, 512, 11.0)]
    reason = "mep at 512: mep: no losses by window in its results - measure it again"
    assert reason in Page(rows, [], {}).html("t")
