"""Means over seeds with their bands, by length and by position."""

import math

import numpy as np
import pytest

from megatron.report.groups import groups
from megatron.report.html.measured import caption_of, with_prefixes
from megatron.report.html.page import Page
from megatron.report.html.paired import comparisons, intervals
from megatron.report.series import (
    interval,
    perplexity_curve,
    position_curve,
    position_differences,
    summary,
)
from megatron.results.row import last_of_each
from tests.report.support import ROWS, row, texts


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
    measured = {"protocol": "position", "position_edges": [0, 1, 2, 4, 5, 6, 8, 12], "text": "t"}
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
            **measured | ({"text": "u"} if name == "other" else {}),
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
    measured = {"protocol": "position", "position_edges": edges, "text": "t"}
    rows = [row("learned", 1, 320, None, loss=None, reason="ends at 64", protocol="position")]
    rows += [
        row(name, 1, 320, 9.0, position_losses=[3.0 + d for d in one], **measured)
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


def test_the_band_of_one_seed_is_that_of_its_difference_where_another_has_the_same_text():
    rows = [*texts(("alibi", 512, 0.0), ("mep", 512, 0.02))]
    found = groups(rows, {})
    compared_with, _ = comparisons(found, "alibi")
    reference, other = (perplexity_curve(group, intervals(compared_with)) for group in found)
    (low, high) = compared_with[1].interval
    mean = compared_with[1].difference.mean
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
    measured = {"protocol": "position", "position_edges": [0, 1, 3, 512]}
    rows = []
    for seed in (1, 3):
        losses = [5.0, 4.0, seed]
        rows.append(row("mep", seed, 512, 9.0, position_losses=losses, **measured))
    (group,) = groups(rows, {})
    curve = position_curve(group)
    assert (list(curve.at), list(curve.values)) == ([0.5, 2.0, 257.5], [5.0, 4.0, 2.0])
    page = Page(rows, [], {})
    assert "Loss by position" in page.html("t")
    assert "position" in page.figures


def test_a_curve_with_an_interval_at_some_lengths_only_has_no_band_and_no_caption_of_one():
    rows = [
        row("mep", 1, 512, 9.0),
        row("mep", 1, 1024, 9.0, window_losses=[2.0, 2.1] * 8, window_tokens=1024),
    ]
    (group,) = groups(rows, {})
    assert interval(rows[1]) is not None
    curve = perplexity_curve(group)
    assert (curve.values, curve.low, curve.high, curve.band) == ([9.0, 9.0], None, None, "")
    assert caption_of([curve], [group], None) == ""
