"""Encodings against one of them: what is paired, what is a claim, and what is refused."""

import numpy as np
import pytest

from megatron.errors import UserError
from megatron.results.comparison import encodings
from tests.results.paired_rows import against, row, row_of_blocks, seeds_of, texts


def test_a_small_difference_shows_because_windows_are_pairs():
    hard = texts()
    noise = 0.01 * np.random.default_rng(1).standard_normal((2, 64))
    rows = [row("mep_free", hard), row("t5", hard + 0.02 + noise[0]), row("alibi", hard + noise[1])]
    reference, worse, same = against(rows)
    assert reference.difference is None
    low, high = worse.interval
    assert low < 0.02 < high < 0.03, "windows alone spread by 0.5"
    assert low > 0
    low, high = same.interval
    assert low < 0 < high


def test_the_interval_of_a_pair_covers_the_truth_at_its_nominal_rate():
    generator, hits = np.random.default_rng(3), 0
    for _ in range(400):
        hard, noise = texts(40), generator.standard_normal((2, 41))
        # Neighbours share half of their noise: a correlation of 0.2.
        first, second = (hard + 0.1 * (one[1:] + 0.21 * one[:-1]) for one in noise)
        low, high = against([row("a", first), row("b", second + 0.05)])[1].interval
        hits += low < 0.05 < high
    assert abs(hits / 400 - 0.95) < 3 * np.sqrt(0.95 * 0.05 / 400)


# --- Claims ---


def p_of_three(differences):
    """Student's two-sided p of three differences: closed form for two degrees of freedom."""
    t = abs(np.mean(differences)) / (np.std(differences, ddof=1) / np.sqrt(3))
    return 1 - t / np.sqrt(2 + t**2)


def test_two_seeds_make_no_claim_however_sure_the_text_is():
    rows = [*seeds_of("a", [0.0, 0.0]), *seeds_of("b", [0.2, 0.3], noise=0.01)]
    _, two = against(rows)
    assert (two.unit, two.is_claim, two.mark, two.p) == ("windows", False, "", None)
    low, _ = two.interval
    assert low > 0.2, "as windows they are as sure as can be"
    assert two.by_seed == pytest.approx({1: 0.2, 2: 0.3}, abs=0.005)
    assert not two.seeds_disagree


def test_two_seeds_that_disagree_in_sign_are_said_to():
    # Every window of a seed differs by about the same, so over windows p is below 0.0001.
    shifts = [0.03, -0.09]
    rows = [*seeds_of("a", [0.0, 0.0]), *seeds_of("b", shifts, noise=0.01)]
    _, two = against(rows)
    assert two.seeds_disagree
    assert two.mark == ""
    _, high = two.interval
    assert high < 0
    rows = [*seeds_of("a", [0.0] * 3), *seeds_of("b", [*shifts, 0.06], noise=0.01)]
    _, three = against(rows)
    assert three.p > 0.9
    assert three.mark == ""


def test_three_seeds_are_compared_by_seed():
    ours, theirs = [0.0, 0.1, -0.1], [0.05, 0.16, -0.06]
    rows = [*seeds_of("a", ours, noise=0.01), *seeds_of("b", theirs, noise=0.01)]
    _, three = against(rows)
    assert (three.unit, three.difference.n, three.seeds) == ("seeds", 3, (1, 2, 3))
    losses = np.array([one["loss"] for one in rows]).reshape(2, 3)
    assert three.p == pytest.approx(p_of_three(losses[1] - losses[0]))
    assert three.mark == "†"
    assert against(rows, "b")[0].mark == "‡"
    perplexities = np.exp(losses[1])
    assert (three.perplexity, three.std) == pytest.approx(
        (np.mean(perplexities), np.std(perplexities, ddof=1))
    )


def test_three_seeds_on_one_side_alone_are_no_claim():
    rows = [*seeds_of("a", [0.0, 0.1, 0.2]), *seeds_of("b", [0.1, 0.2])]
    assert not against(rows)[1].is_claim
    assert [*against(rows)[1].by_seed] == [1, 2]
    rows = [*seeds_of("a", [0.0, 0.1, 0.2]), *seeds_of("b", [0.1, 0.2, 0.3])]
    rows[5] |= {"seed": 9}
    assert not against(rows)[1].is_claim, "two seeds in common"
    others = [one | {"seed": one["seed"] + 10} for one in rows[3:]]
    strangers = against([*rows[:3], *others])[1]
    assert (strangers.by_seed, strangers.unit) == ({}, "windows")
    assert strangers.difference.mean == pytest.approx(0.1)


def test_many_claims_make_each_less_significant_and_what_is_no_claim_does_not():
    slight = [0.10, 0.11, 0.13]
    rows = [*seeds_of("a", [0.0] * 3), *seeds_of("b", slight)]
    no_claims = [row(f"c{number}", texts() + 0.1) for number in range(20)]
    claims = []
    for number in range(20):
        claims += seeds_of(f"d{number}", [0.01, -0.02, 0.03])
    alone, beside, among = (against([*rows, *more])[1] for more in ([], no_claims, claims))
    assert alone.mark == beside.mark == "†"
    assert alone.p == beside.p == pytest.approx(p_of_three(slight))
    assert among.p == pytest.approx(21 * alone.p)
    assert among.mark == ""


# --- Text ---


def losses_of_windows(shift=0.0, seed=0):
    """Losses of 8 windows of 16384, by block: [8, 32]; `shift` is larger in later blocks."""
    hard = 4 + 0.5 * np.random.default_rng(0).standard_normal((8, 32))
    rising = shift * np.log1p(np.arange(32)) / np.log1p(np.arange(32)).mean()
    return hard + rising + 0.25 * np.random.default_rng(seed).standard_normal((8, 32))


def test_77_against_56_is_resolved_on_eight_windows_by_their_blocks():
    shift = np.log(77 / 56)
    rows = [
        row_of_blocks("alibi", losses_of_windows(seed=1)),
        row_of_blocks("rotary", losses_of_windows(shift, seed=2)),
    ]
    by_block = against(rows)[1]
    assert (by_block.unit, by_block.over_text.estimate.n) == ("blocks", 256)
    low, high = by_block.interval
    assert 0.8 * shift < low < shift < high < 1.2 * shift
    old = [{key: value for key, value in one.items() if key != "block_losses"} for one in rows]
    by_window = against(old)[1]
    assert (by_window.unit, by_window.over_text.estimate.n) == ("windows", 8)
    assert by_window.difference.mean == pytest.approx(by_block.difference.mean)


def test_a_row_without_blocks_is_paired_by_window():
    rows = [row_of_blocks("a", losses_of_windows()), row_of_blocks("b", losses_of_windows(0.1, 3))]
    del rows[0]["block_losses"]
    assert against(rows)[1].unit == "windows"


def test_the_same_blocks_are_paired_at_every_length():
    generator = np.random.default_rng(4)
    hard = 3 + 0.5 * generator.standard_normal(64)
    noise = 0.1 * generator.standard_normal(64)
    for shape in ((64, 1), (16, 4), (2, 32)):
        rows = [
            row_of_blocks("a", hard.reshape(shape)),
            row_of_blocks("b", (hard + noise).reshape(shape)),
        ]
        estimate = against(rows)[1].over_text.estimate
        assert estimate.n == 64
        assert estimate.mean == pytest.approx(noise.mean())


def test_several_seeds_with_a_text_each_are_paired_within_their_seed():
    rows = []
    for name, shift in (("a", 0.0), ("b", 0.1)):
        for seed in range(2):
            losses = texts(9, seed) + shift
            rows.append(row(name, losses, seed, text=f"t{seed}", protocol="paper"))
    paired = against(rows)[1]
    assert paired.difference.mean == pytest.approx(0.1)
    assert paired.difference.n == 18


def test_sizes_of_a_sweep_are_no_seeds_of_each_other():
    hard = texts()
    cells = [("small", 1), ("small", 2), ("wide", 3), ("wide", 4)]
    rows = []
    for size, seed in cells:
        cell = {"data": "x", "size": size, "seed": seed}
        rows.append(row("a", hard + seed / 10, seed, cell=cell))
    assert [*encodings(rows)] == ["a, size small", "a, size wide"]
    rows = []
    for name in ("x", "y"):
        rows.append(row("a", hard, corpus=name, cell={"data": name, "pos_emb": "a", "seed": 1}))
    assert [*encodings(rows)] == ["a"]


def test_what_is_no_pair_is_refused_with_the_reason():
    hard = texts()
    refused = {
        "other text than a": row("b", hard, text="cd34"),
        "no losses by window in its results - measure it again": row("b", hard, window_losses=None),
        "b: positions end at 512": row(
            "b", hard, loss=None, perplexity=None, reason="positions end at 512"
        ),
        "a was not measured there, on as many tokens": row("b", hard, length=1024),
    }
    for reason, other in refused.items():
        with pytest.raises(UserError, match=f"nothing can be compared with a:\n  b at .*{reason}"):
            against([row("a", hard), other])
    both = against([row("a", hard), row("b", hard, text="cd34"), row("c", hard + 1)])
    assert [one.reason is None for one in both] == [True, False, True]


def test_a_seed_that_is_there_twice_is_refused():
    rows = [row("b", texts(), checkpoint="runs/x"), row("b", texts(), checkpoint="runs/y")]
    message = r"b: seed 1 is there twice at length 512: runs/x .* and runs/y .* - give the results"
    with pytest.raises(UserError, match=message):
        encodings(rows)


def test_an_encoding_to_compare_with_that_is_not_there_is_refused():
    message = "--against: 'c' is no encoding of these results - choose one of 'a', 'b'"
    with pytest.raises(UserError, match=message):
        against([row("a", texts()), row("b", texts())], "c")
