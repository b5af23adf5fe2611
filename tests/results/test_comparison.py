"""Encodings against one of them: what is paired, what is a claim, and what is refused."""

import numpy as np
import pytest

from megatron.errors import UserError
from megatron.results.comparison import encodings
from megatron.results.comparison_table import tables
from tests.results.rows import against, row, row_of_blocks, seeds_of, texts, with_bytes


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
    message = r"b: seed 1 is there twice at length 512: runs/x and runs/y - give the results"
    with pytest.raises(UserError, match=message):
        encodings(rows)


# --- Tables ---


def test_fewer_than_three_seeds_are_these_weights_on_this_text_and_nothing_is_marked():
    rows = [*seeds_of("a", [0.0, 0.0]), *seeds_of("b", [0.2, 0.3], noise=0.01)]
    rows += seeds_of("c", [0.03, -0.09])
    text = tables(against(rows))
    head = text.splitlines()[1]
    assert "95 %, these weights on this text" in head
    assert head.split()[-1] == "n_eff", "and no p"
    assert not {"†", "‡"} & set(text)
    assert (
        "these weights on this text: 2 common seeds; an interval does not cover how other" in text
    )
    assert "c by seed: +0.0300 (seed 1), -0.0900 (seed 2); seeds disagree in sign" in text
    assert "differences of the same windows; Student's t over overlapping batches of 8" in text
    one_seed = tables(against([rows[0], rows[2]]), bits_per_byte=True)
    assert "1 common seed;" in one_seed
    assert "bits per byte" in one_seed


def test_three_seeds_have_marks_p_and_an_interval_over_seeds():
    rows = [*seeds_of("a", [0.0] * 3), *seeds_of("b", [0.20, 0.21, 0.22])]
    text = tables(against([*rows, *seeds_of("c", [0.1], noise=0.01)]), markdown=True)
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    head, _, _, claim, other = cells
    over_seeds, over_text = head.index("95 %, over seeds"), head.index("p") - 2
    assert head[over_text] == "95 %, these weights on this text"
    assert (claim[over_seeds][0], claim[over_text]) == ("[", "")
    assert (other[over_seeds], other[over_text][0], other[head.index("p")]) == ("", "[", "")
    assert claim[2].startswith("†")
    assert "over seeds: differences of the same seeds (3), Student's t over seeds" in text
    assert "p: two-sided, Holm's correction for 1 comparisons; 0.05 is significant" in text
    assert "the difference over those that both have" in text


def test_each_place_is_a_table_of_its_own_under_its_setting():
    hard = texts()
    paper = {"protocol": "paper", "start": 16000, "text": "cd34"}
    rows = [row("a", hard, tokenizer="aa"), row("a", hard, **paper)]
    rows += [row("b", hard + 0.1, tokenizer="aa"), row("b", hard + 0.2, **paper)]
    found = against(rows)
    assert [one.difference.mean for one in found if one.difference] == pytest.approx([0.1, 0.2])
    text = tables(found)
    assert "protocol paper, start 16000, tokenizer unknown\n" in text
    assert "protocol equal_tokens, tokenizer aa\n" in text
    windowed = [row("a", hard, window=512), row("b", hard + 0.1, window=512)]
    assert "protocol equal_tokens, window 512\n" in tables(against(windowed))


def test_one_window_of_blocks_is_noted():
    generator = np.random.default_rng(0)
    rows = [row_of_blocks(name, 3 + generator.standard_normal((1, 32))) for name in "ab"]
    text = tables(against(rows))
    assert "one window at length 16384: the interval does not cover what all its blocks" in text
    assert "n_eff: the number of independent blocks that would give the same error" in text


def test_the_numbers_for_json_are_those_of_the_table():
    rows = with_bytes([*seeds_of("a", [0.0] * 3), *seeds_of("b", [0.20, 0.21, 0.22])], 9_000)
    _, one = against(rows)
    facts = one.plain()
    assert facts["difference"] == pytest.approx(0.21)
    assert facts["ratio"] == pytest.approx(np.exp(0.21))
    assert (facts["unit"], facts["interval_is_about"], facts["mark"]) == (
        "seeds",
        "over seeds",
        "†",
    )
    assert facts["by_seed"].keys() == {1, 2, 3}
    assert f"{facts['bits_per_byte']:.4f}" in tables([one], bits_per_byte=True)
