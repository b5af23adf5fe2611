"""Encodings against one of them: what is paired, what is a claim, and what is refused."""

import numpy as np
import pytest

from megatron.errors import UserError
from megatron.results.comparison_table import tables
from tests.results.rows import against, row, row_of_blocks, seeds_of, texts

# --- Claims ---


def p_of_three(differences):
    """Student's two-sided p of three differences: closed form for two degrees of freedom."""
    t = abs(np.mean(differences)) / (np.std(differences, ddof=1) / np.sqrt(3))
    return 1 - t / np.sqrt(2 + t**2)


def test_two_seeds_are_these_weights_on_this_text_and_nothing_is_marked():
    rows = [*seeds_of("a", [0.0, 0.0]), *seeds_of("b", [0.2, 0.3], noise=0.01)]
    rows += seeds_of("c", [0.03, -0.09])
    comparisons = against(rows)
    _, two, _ = comparisons
    assert (two.difference.unit, two.difference.is_claim, two.mark, two.p) == (
        "windows",
        False,
        "",
        None,
    )
    assert two.difference.estimate.interval()[0] > 0.2, "as windows they are as sure as can be"
    assert two.difference.by_seed == pytest.approx({1: 0.2, 2: 0.3}, abs=0.005)
    text = tables(comparisons)
    head = text.splitlines()[1]
    assert "p" not in head.split()
    assert not {"†", "‡"} & set(text)
    assert "c by seed: +0.0300 (seed 1), -0.0900 (seed 2); seeds disagree in sign" in text


def test_three_seeds_are_compared_by_seed():
    ours, theirs = [0.0, 0.1, -0.1], [0.05, 0.16, -0.06]
    rows = [*seeds_of("a", ours, noise=0.01), *seeds_of("b", theirs, noise=0.01)]
    comparisons = against([*rows, *seeds_of("c", [0.1], noise=0.01)])
    _, three, _ = comparisons
    assert (three.difference.unit, three.difference.estimate.n) == ("seeds", 3)
    losses = np.array([measured["loss"] for measured in rows]).reshape(2, 3)
    assert three.p == pytest.approx(p_of_three(losses[1] - losses[0]))
    assert three.mark == "†"
    assert against(rows, "b")[0].mark == "‡"
    perplexities = np.exp(losses[1])
    spread = (np.mean(perplexities), np.std(perplexities, ddof=1))
    assert three.perplexity == pytest.approx(spread)

    text = tables(comparisons, form="markdown")
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    *_, claim, other = (dict(zip(cells[0], line, strict=True)) for line in cells)
    assert claim["ratio [95 %]"].startswith(f"{np.exp(np.mean(losses[1] - losses[0])):.4f} [")
    assert (claim["95 %"][0], claim["p"]) == ("[", f"{three.p:.4f}")
    assert (other["95 %"][0], other["p"]) == ("[", "")
    assert claim["perplexity"].startswith("†")


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


def test_77_against_56_is_resolved_on_eight_windows_by_their_blocks():
    shift = np.log(77 / 56)
    normal = [np.random.default_rng(seed).standard_normal((8, 32)) for seed in range(3)]
    hard = 4 + 0.5 * normal[0]  # 8 windows of 16384, by block
    noise = 0.25 * np.stack(normal[1:])
    later = np.log1p(np.arange(32)) / np.log1p(np.arange(32)).mean()
    rows = [
        row_of_blocks("alibi", hard + noise[0]),
        row_of_blocks("rotary", hard + noise[1] + shift * later),
    ]
    by_block = against(rows)[1].difference
    assert (by_block.unit, by_block.estimate.n) == ("blocks", 256)
    low, high = by_block.estimate.interval()
    assert 0.8 * shift < low < shift < high < 1.2 * shift


def test_what_is_no_pair_is_refused_with_the_reason():
    hard = texts()
    ends = {"loss": None, "perplexity": None, "reason": "positions end at 512"}
    refused = {
        "on other text": row("b", hard, text="cd34"),
        "other windows than the reference": row("b", hard) | {"window_losses": [3.0]},
        "b: positions end at 512": row("b", hard, **ends),
        "a was not measured here": row("b", hard, length=1024),
    }
    for reason, other in refused.items():
        with pytest.raises(UserError, match=f"nothing can be compared with a:\n  b at .*{reason}"):
            against([row("a", hard), other])
    both = against([row("a", hard), row("b", hard, text="cd34"), row("c", hard + 1)])
    assert [not pair.reason for pair in both] == [True, False, True]
    twice = [row("b", hard, text=text) for text in ("ab12", "cd34")]
    with pytest.raises(UserError, match="b: a seed was measured on two texts at length 512"):
        against(twice)


def test_differences_beside_the_encoding_are_named():
    fair = {"parent_model": "t5 step 9", "windows_per_step": 8, "dtype": "float32"}
    measured = [row("a", texts(), **fair), row("b", texts() + 1, **fair)]
    measured[1] |= {"cell": {"encoding": "b", "optimizer": "muon", "data": "stdlib"}}
    measured[1]["windows_per_step"] = None
    assert "more than the encoding" not in tables(against(measured))
    measured.append(
        row("c", texts() + 1, dtype="bfloat16", windows_per_step=16, trained_on="wiki 1")
    )
    measured[-1]["cell"] = {"encoding": "c", "optimizer": "adam", "data": "wiki"}
    text = tables(against(measured, "b"))
    assert text.count("in more than the encoding") == 1
    assert (
        "dtype bfloat16, not float32; trained_on wiki 1, not one corpus; parent_model none, not t5"
        " step 9; optimizer adam, not muon; data wiki, not stdlib"
    ) in text


def test_each_place_is_a_table_of_its_own_under_its_setting():
    hard = texts()
    paper = {"protocol": "paper", "start": 16000, "text": "cd34"}
    rows = [row("a", hard, tokenizer="aa"), row("a", hard, **paper)]
    rows += [row("b", hard + 0.1, tokenizer="aa"), row("b", hard + 0.2, **paper)]
    other_split = {"tokenizer": "aa", "split": "8,1,1", "text": "ef56"}
    rows += [row("a", hard, **other_split), row("b", hard + 0.3, **other_split)]
    comparisons = against(rows)
    means = [pair.difference.estimate.mean for pair in comparisons if pair.difference]
    assert means == pytest.approx([0.1, 0.2, 0.3])
    text = tables(comparisons)
    assert "protocol paper, start 16000\n" in text
    assert "protocol equal_tokens\n" in text
    assert "protocol equal_tokens, split 8,1,1\n" in text
