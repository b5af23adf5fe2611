"""Encodings against one of them, from results files to marks."""

import json
import subprocess
import sys

import numpy as np
import pytest

from megatron.errors import UserError
from megatron.results.comparison import compared, encodings, tables
from tests.support import ROOT, run


def row(pos_emb, losses, seed=1, **more):
    losses = np.asarray(losses)
    facts = {
        "pos_emb": pos_emb,
        "config_hash": f"{pos_emb}{seed}",
        "step": 10,
        "seed": seed,
        "corpus": "stdlib",
    }
    facts |= {
        "part": "valid",
        "protocol": "equal_tokens",
        "checkpoint": f"runs/{pos_emb}-{seed}",
        "text": "ab12",
    }
    facts |= {
        "length": 512,
        "windows": len(losses),
        "tokens": 512 * len(losses),
        "loss": float(losses.mean()),
    }
    return (
        facts
        | {"perplexity": float(np.exp(losses.mean())), "window_losses": losses.tolist()}
        | more
    )


def against(rows, name=None):
    return compared(encodings(rows), name)


def texts(n=64, seed=0):
    """Losses of windows of a text, some much harder than others."""
    return 3 + 0.5 * np.random.default_rng(seed).standard_normal(n)


def test_a_small_difference_shows_because_windows_are_pairs():
    hard, noise = texts(), 0.01 * np.random.default_rng(1).standard_normal((2, 64))
    rows = [row("mep_free", hard), row("t5", hard + 0.02 + noise[0]), row("alibi", hard + noise[1])]
    reference, worse, same = against(rows)
    assert (reference.mark, worse.mark, same.mark) == ("", "†", "")
    low, high = worse.interval
    assert low < 0.02 < high < 0.03, "windows alone spread by 0.5"
    assert (
        worse.difference.mean == pytest.approx(worse.windows.mean) == pytest.approx(0.02, abs=0.005)
    )
    assert against(rows, "t5")[0].mark == "‡"


def test_the_interval_of_a_pair_covers_the_truth_at_its_nominal_rate():
    generator, hits = np.random.default_rng(3), 0
    for _ in range(400):
        hard, noise = texts(40), generator.standard_normal((2, 41))
        # Neighbours share half of their noise: a correlation of 0.2.
        first, second = (hard + 0.1 * (one[1:] + 0.21 * one[:-1]) for one in noise)
        low, high = against([row("a", first), row("b", second + 0.05)])[1].interval
        hits += low < 0.05 < high
    assert abs(hits / 400 - 0.95) < 3 * np.sqrt(0.95 * 0.05 / 400)


def test_three_seeds_are_compared_by_seed_and_two_by_window():
    hard, generator = texts(), np.random.default_rng(5)
    shifts = {"a": [0.0, 0.1, -0.1], "b": [0.05, 0.16, -0.06]}
    rows = [
        row(name, hard + shift + 0.01 * generator.standard_normal(64), seed)
        for name in shifts
        for seed, shift in enumerate(shifts[name])
    ]
    _, three = against(rows)
    assert (three.unit, three.difference.n, three.seeds) == ("seeds", 3, (0, 1, 2))
    assert three.difference.mean == pytest.approx(0.05, abs=0.005)
    values = [one["perplexity"] for one in rows[3:]]
    assert (three.perplexity, three.std) == pytest.approx((np.mean(values), np.std(values, ddof=1)))
    _, two = against([one for one in rows if one["seed"] < 2])
    assert (two.unit, two.difference.n) == ("windows", 64)
    assert two.difference.mean == pytest.approx(0.055, abs=0.005)


def test_several_seeds_with_a_text_each_are_paired_within_their_seed():
    rows = [row("a", texts(9, seed), seed, text=f"t{seed}", protocol="paper") for seed in range(2)]
    rows += [
        row("b", texts(9, seed) + 0.1, seed, text=f"t{seed}", protocol="paper") for seed in range(2)
    ]
    assert against(rows)[1].difference.mean == pytest.approx(0.1)
    assert against(rows)[1].difference.n == 18
    worth = against(rows)[1].windows.n_eff * 512  # windows of both texts
    assert f"that would give the same error; {worth:,.0f} tokens" in tables(against(rows))


def test_another_start_or_region_of_a_run_is_a_comparison_of_its_own():
    hard, paper = texts(), {"protocol": "paper", "start": 16000, "text": "cd34"}
    rows = [
        row(name, hard + shift, protocol="paper", start=0)
        for name, shift in (("a", 0.0), ("b", 0.1))
    ]
    rows += [row(name, hard + shift, **paper) for name, shift in (("a", 0.0), ("b", 0.2))]
    rows += [row(name, hard[:32] + shift, text="ef56") for name, shift in (("a", 0.0), ("b", 0.3))]
    found = against(rows)
    assert [round(one.difference.mean, 6) for one in found if one.difference] == [0.1, 0.2, 0.3]
    for heading in (
        "protocol paper\n",
        "protocol paper, start 16000\n",
        "16,384 tokens (32 x 512), protocol equal_tokens\n",
    ):
        assert heading in tables(found)


def test_sizes_of_a_sweep_are_no_seeds_of_each_other():
    hard = texts()
    cells = [("small", 1), ("small", 2), ("wide", 3), ("wide", 4)]
    rows = [
        row("a", hard + seed / 10, seed, cell={"data": "x", "size": size, "seed": seed})
        for size, seed in cells
    ]
    assert [*encodings(rows)] == ["a, size small", "a, size wide"]
    rows = [
        row("a", hard, corpus=name, cell={"data": name, "pos_emb": "a", "seed": 1})
        for name in ("x", "y")
    ]
    assert [*encodings(rows)] == ["a"]


def test_many_comparisons_make_each_less_significant():
    hard, generator = texts(), np.random.default_rng(4)
    noise = generator.standard_normal(64)
    slight = 0.01 * (noise - noise.mean()) + 0.0033
    rows = [row("a", hard), row("b", hard + slight)]
    many = [row(f"c{number}", hard + 0.01 * generator.standard_normal(64)) for number in range(20)]
    alone, among = against(rows)[1], against(rows + many)[1]
    assert (alone.mark, among.mark) == ("†", "")
    assert among.p > alone.p


def test_a_window_is_said_in_the_heading_or_where_it_differs_in_the_labels():
    hard = texts()
    rows = [row("a", hard, window=512), row("b", hard + 0.1, window=512)]
    assert "protocol equal_tokens, window 512\n" in tables(against(rows))
    both = tables(against([*rows, row("a", hard + 0.2)]))
    assert "protocol equal_tokens\n" in both
    assert "a, window none" in both


def test_the_table_says_how_many_seeds_a_mean_has():
    rows = [row("a", texts(), 1), row("a", texts(seed=7), 2), row("b", texts() + 0.1, 1)]
    told = tables(against(rows)).splitlines()
    assert [line.split()[:2] for line in told[3:5]] == [["a", "2"], ["b", "1"]]
    assert "the difference over those that both have" in "\n".join(told)


def test_rows_of_few_windows_are_noted():
    rows = [
        row(name, texts(n) + 0.01 * texts(n, seed), length=n)
        for n in (19, 20)
        for seed, name in enumerate("ab")
    ]
    assert "few windows (19 at length 19): where neighbours" in tables(against(rows))


def test_what_is_no_pair_is_refused_with_the_reason():
    hard = texts()
    refused = {
        "other text than a": row("b", hard, text="cd34"),
        "no losses by window in its results - measure it again": row("b", hard)
        | {"window_losses": None},
        "b: positions end at 512": row("b", hard)
        | {"loss": None, "perplexity": None, "reason": "positions end at 512"},
        "a was not measured there, on as many tokens": row("b", hard, length=1024),
    }
    for reason, other in refused.items():
        with pytest.raises(UserError, match=f"nothing can be compared with a:\n  b at .*{reason}"):
            against([row("a", hard), other])
    both = against([row("a", hard), row("b", hard, text="cd34"), row("c", hard + 1)])
    assert [one.reason is None for one in both] == [True, False, True]
    with pytest.raises(
        UserError, match=r"b: seed 1 is there twice at length 512: runs/x .* and runs/y"
    ):
        encodings([row("b", hard, checkpoint="runs/x"), row("b", hard, checkpoint="runs/y")])
    with pytest.raises(
        UserError,
        match="--against: 'c' is no encoding of these results - choose one of 'a', 'b'",
    ):
        against([row("a", hard), row("b", hard)], "c")


def test_a_reader_that_leaves_early_is_no_fault(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(row(name, texts())) + "\n" for name in "ab")
    )
    words = [sys.executable, "tools/compare.py", tmp_path / "a.jsonl"]
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


def test_the_tool_prints_a_table_for_each_length_and_writes_markdown_and_json(tmp_path):
    generator = np.random.default_rng(0)
    for name, worse in (("mep_free", 0.0), ("rotary", 0.2)):
        lines = [
            row(name, texts(n) + worse + generator.normal(0, 0.01, n), length=32768 // n)
            for n in (64, 32)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [tmp_path / "mep_free.jsonl", tmp_path / "rotary.jsonl"]
    done = run("tools/compare.py", *files, "-o", tmp_path / "a.json")
    assert done.returncode == 0, done.stderr
    assert "length 512: stdlib valid" in done.stdout
    assert "length 1024: stdlib valid" in done.stdout
    assert "Holm's correction for 2 comparisons" in done.stdout
    assert done.stdout.count("†") == 3  # two cells and the note
    assert "few windows" not in done.stdout
    cells = json.loads((tmp_path / "a.json").read_text())
    assert [(cell["encoding"], cell["length"], cell["mark"]) for cell in cells] == [
        ("mep_free", 512, ""),
        ("rotary", 512, "†"),
        ("mep_free", 1024, ""),
        ("rotary", 1024, "†"),
    ]
    low, high = cells[1]["ratio_interval"]
    assert low < np.exp(0.2) < high
    assert cells[1]["ratio"] == pytest.approx(np.exp(cells[1]["difference"]))
    assert run("tools/compare.py", *files, "-o", tmp_path / "a.md").returncode == 0
    assert "| rotary | 1 | †" in (tmp_path / "a.md").read_text()
    wrong = run("tools/compare.py", *files, "-o", tmp_path / "a.txt")
    assert (wrong.returncode, wrong.stderr) == (
        1,
        f"--output: {tmp_path}/a.txt is neither .md nor .json - name it so\n",
    )
