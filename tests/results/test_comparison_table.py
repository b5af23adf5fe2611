"""Comparisons as tables: headings, each seed's difference, and how the numbers were made."""

import numpy as np
import pytest

from megatron.results.comparison_table import tables
from tests.results.paired_rows import against, row, row_of_blocks, seeds_of, texts


def blocks(windows, in_window, seed=0):
    return 3 + 0.1 * np.random.default_rng(seed).standard_normal((windows, in_window))


def test_an_interval_of_fewer_than_three_seeds_is_headed_these_weights_on_this_text():
    rows = [*seeds_of("a", [0.0, 0.0]), *seeds_of("b", [0.2, 0.3], noise=0.01)]
    text = tables(against(rows))
    head = text.splitlines()[1]
    assert "95 %, these weights on this text" in head
    assert "over seeds" not in head
    assert head.split()[-1] == "n_eff", "and no p"
    for mark in ("†", "‡", "significant", "Holm"):
        assert mark not in text
    assert (
        "these weights on this text: 2 common seeds; an interval does not cover how other seeds"
        " would differ, so nothing is marked: a claim about an encoding needs 3 seeds"
    ) in text
    assert "1 common seed;" in tables(against([rows[0], rows[2]]))


def test_each_seeds_difference_is_shown_and_that_they_disagree_in_sign():
    rows = [*seeds_of("a", [0.0, 0.0])]
    rows += [*seeds_of("b", [0.2, 0.3]), *seeds_of("c", [0.03, -0.09])]
    lines = tables(against(rows)).splitlines()
    assert "b by seed: +0.2000 (seed 1), +0.3000 (seed 2)" in lines
    assert "c by seed: +0.0300 (seed 1), -0.0900 (seed 2); seeds disagree in sign" in lines


def test_three_seeds_have_marks_p_and_an_interval_over_seeds():
    rows = [*seeds_of("a", [0.0] * 3), *seeds_of("b", [0.20, 0.21, 0.22])]
    text = tables(against(rows))
    head, _, _, line = text.splitlines()[1:5]
    assert "95 %, over seeds" in head
    assert "these weights" not in text
    assert line.split()[:3] == ["b", "3", "†" + line.split()[2].removeprefix("†")]
    assert "over seeds: differences of the same seeds (3), Student's t over seeds" in text
    assert "p: two-sided, Holm's correction for 1 comparisons; 0.05 is significant" in text
    assert "† a is significantly better, ‡ significantly worse; ± std over seeds" in text
    assert "by seed" not in text
    among = tables(against([*rows, *seeds_of("c", [0.1, 0.2, -0.1])]))
    assert "c by seed: +0.1000 (seed 1), +0.2000 (seed 2), -0.1000 (seed 3); seeds disag" in among


def test_claims_and_others_have_a_column_of_intervals_each():
    rows = [*seeds_of("a", [0.0] * 3), *seeds_of("b", [0.20, 0.21, 0.22])]
    rows += seeds_of("c", [0.1], noise=0.01)
    text = tables(against(rows), markdown=True)
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    head, _, _, claim, other = cells
    over_seeds, over_text = head.index("95 %, over seeds"), head.index("p") - 2
    assert head[over_text] == "95 %, these weights on this text"
    assert (claim[over_seeds][0], claim[over_text]) == ("[", "")
    assert (other[over_seeds], other[over_text][0]) == ("", "[")
    assert other[head.index("p")] == ""


def test_the_unit_is_blocks_where_rows_have_them_and_one_window_is_noted():
    rows = [row_of_blocks(name, blocks(8, 32, seed)) for seed, name in enumerate("ab")]
    text = tables(against(rows))
    assert "differences of the same blocks of up to 512 targets; the error allows" in text
    assert "of 256 blocks" in text
    assert "n_eff: the number of independent blocks that would give the same error" in text
    assert "one window" not in text
    rows = [row_of_blocks(name, blocks(1, 32, seed)) for seed, name in enumerate("ab")]
    text = tables(against(rows))
    assert (
        "one window at length 16384: the interval does not cover what all its blocks share" in text
    )


def test_rows_of_few_windows_are_noted():
    rows = []
    for n in (19, 20):
        for seed, name in enumerate("ab"):
            rows.append(row(name, texts(n) + 0.01 * texts(n, seed), length=n))
    text = tables(against(rows))
    assert "few windows (19 at length 19): where neighbours" in text
    assert "Student's t over overlapping batches of 4 to 5 windows" in text


def test_the_effective_number_of_windows_is_of_all_texts():
    rows = []
    for name, shift in (("a", 0.0), ("b", 0.1)):
        for seed in range(2):
            losses = texts(9, seed) + shift + 0.01 * texts(9, [seed, *name.encode()])
            rows.append(row(name, losses, seed, text=f"t{seed}", protocol="paper"))
    paired = against(rows)
    worth = paired[1].over_text.estimate.n_eff * 512
    assert f"that would give the same error ({int(worth):,} tokens)" in tables(paired)


def test_another_start_or_region_of_a_run_is_a_comparison_of_its_own():
    hard = texts()
    paper = {"protocol": "paper", "start": 16000, "text": "cd34"}
    rows = [row("a", hard, protocol="paper", start=0), row("a", hard, **paper)]
    rows += [row("a", hard[:32], text="ef56")]
    rows += [row("b", hard + 0.1, protocol="paper", start=0), row("b", hard + 0.2, **paper)]
    rows += [row("b", hard[:32] + 0.3, text="ef56")]
    found = against(rows)
    differences = [one.difference.mean for one in found if one.difference]
    assert differences == pytest.approx([0.1, 0.2, 0.3])
    text = tables(found)
    assert "protocol paper\n" in text
    assert "protocol paper, start 16000\n" in text
    assert "16,384 tokens (32 x 512), protocol equal_tokens\n" in text


def test_a_window_is_said_in_the_heading_or_where_it_differs_in_the_labels():
    hard = texts()
    rows = [row("a", hard, window=512), row("b", hard + 0.1, window=512)]
    assert "protocol equal_tokens, window 512\n" in tables(against(rows))
    both = tables(against([*rows, row("a", hard + 0.2)]))
    assert "protocol equal_tokens\n" in both
    assert "a, window none" in both


def test_the_table_says_how_many_seeds_a_mean_has():
    rows = [row("a", texts(), 1), row("a", texts(seed=7), 2), row("b", texts() + 0.1, 1)]
    lines = tables(against(rows)).splitlines()
    assert [line.split()[:2] for line in lines[3:5]] == [["a", "2"], ["b", "1"]]
    assert "the difference over those that both have" in "\n".join(lines)
