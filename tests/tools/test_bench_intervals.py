"""Intervals over blocks hold the truth as often as they claim, in simulations of known truth."""

import intervals as bench
import numpy as np
import pytest

INDEPENDENT, *_ = bench.NOISES
NOISE = {noise.name: noise for noise in bench.NOISES}
RUNS = 400
SPREAD = np.sqrt(0.95 * 0.05 / RUNS)  # standard deviation of a rate whose expectation is 0.95


@pytest.mark.parametrize("shape", [(1, 32), (8, 32), (20, 32), (32, 8), (20, 1), (40, 1), (320, 1)])
@pytest.mark.parametrize("name", ["independent", "AR(1) 0.2", "AR(1) 0.4", "AR(1) 0.6"])
def test_an_interval_over_blocks_covers_the_truth_where_neighbours_correlate(name, shape):
    # With 20 to 40 blocks and 0.6 the long table has 93 %.
    lowest = 0.93 if name == "AR(1) 0.6" else 0.95
    rate = bench.coverage(NOISE[name], *shape, runs=RUNS)
    assert rate.covered > lowest - 3 * SPREAD
    if shape[0] * shape[1] >= 256:
        assert rate.width < 1.3, "beside an interval that knows the true error"


@pytest.mark.parametrize("shape", [(2, 32), (4, 32), (8, 32), (20, 32), (32, 8), (128, 2)])
@pytest.mark.parametrize("name", ["window 0.1", "window 0.3", "AR(1) 0.4, window 0.3"])
def test_an_interval_over_blocks_covers_what_the_blocks_of_a_window_share(name, shape):
    rate = bench.coverage(NOISE[name], *shape, runs=RUNS)
    assert rate.covered > 0.95 - 3 * SPREAD


def test_an_interval_over_320_windows_of_32_blocks_covers_the_truth():
    for name in ("AR(1) 0.4", "window 0.1"):
        rate = bench.coverage(NOISE[name], 320, 32, runs=100)
        assert rate.covered > 0.95 - 3 * np.sqrt(0.95 * 0.05 / 100)
        assert rate.width < 1.2


def test_a_difference_that_depends_on_the_position_in_a_window_is_no_error():
    with_profile = bench.coverage(NOISE["profile"], 8, 32, runs=RUNS)
    without = bench.coverage(INDEPENDENT, 8, 32, runs=RUNS)
    assert with_profile.covered == without.covered
    assert with_profile.width == pytest.approx(without.width)


def test_one_window_cannot_show_what_its_blocks_share_as_the_docs_say():
    assert bench.coverage(NOISE["window 0.3"], 1, 32, runs=RUNS).covered < 0.7


def test_neighbours_of_the_simulation_correlate_as_its_names_say():
    noise = NOISE["AR(1) 0.4"]
    blocks = bench.simulated(np.random.default_rng(1), noise, 1, 320, 32).ravel()
    correlations = [np.corrcoef(blocks[:-lag], blocks[lag:])[0, 1] for lag in (1, 2)]
    assert correlations == pytest.approx([0.4, 0.16], abs=0.03)
    shared = bench.simulated(np.random.default_rng(1), NOISE["window 0.3"], 1, 2000, 32)[0]
    assert shared.mean(axis=1).var() == pytest.approx(0.3 + 0.7 / 32, rel=0.15)
    assert shared.var() == pytest.approx(1, abs=0.05)


def test_the_tool_prints_the_table_of_the_docs(capsys, monkeypatch):
    monkeypatch.setattr(bench, "SHAPES", ((8, 32), (20, 1)))
    assert bench.main(["--runs", "20"]) == 0
    head, rule, windows, blocks = capsys.readouterr().out.splitlines()
    assert head.startswith("| windows x blocks | independent | AR(1) 0.2 |")
    assert head.count("|") == rule.count("|") == windows.count("|")
    assert windows.startswith("| 8 x 32 | ")
    assert blocks.endswith("| - | - | - | - | - |"), "a window of one block shares nothing"
