"""The search for tiles: what it tries and prints; times need a GPU."""

import pytest
import torch

from megatron.attention.triton_tiles import OTHERS, TILES, Sizes, Tiles
from tests.support import run

pytest.importorskip("triton")

from tune_attention import PROGRAMS, Candidate, candidates, in_use, pasted, prepared


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_default_tiles_are_the_first_candidate_and_nothing_is_tried_twice(program, dtype):
    tried = candidates([program], dtype, 64, 90)
    itemsize = 2 if dtype == "bf16" else 4
    assert tried[0].tiles == TILES[90][program][itemsize, 64].bias
    assert len(set(tried)) == len(tried) > 3
    if program == "query_and_table_gradients":  # sums along diagonals need squares
        assert all(one.tiles.queries == one.tiles.keys for one in tried)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_candidate_is_in_use_only_while_it_is_tried(program):
    candidate = Candidate(program, "fp32", 16, Tiles(16, 16, 4, 1))
    before = TILES[OTHERS][program][4, 64]
    with in_use(candidate, OTHERS):
        assert TILES[OTHERS][program][4, 64].bias == candidate.tiles
        found = prepared(candidate, 20, tokens=20, device="cpu")()
    assert TILES[OTHERS][program][4, 64] == before
    expected = {"forward": 1, "query_and_table_gradients": 4}.get(program, 3)
    found = [found] if isinstance(found, torch.Tensor) else found
    assert len(found) == expected


def test_the_fastest_tiles_are_printed_as_they_stand_in_the_table():
    fastest = Candidate("forward", "bf16", 64, Tiles(64, 64, 4, 3))
    names = {"Sizes": Sizes, "Tiles": Tiles}
    printed = eval("{" + pasted([fastest], 90) + "}", names)
    expected = TILES[90]["forward"][2, 64]._replace(bias=fastest.tiles)
    assert printed == {90: {"forward": {(2, 64): expected}}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with CUDA times them instead")
def test_candidates_that_spill_are_dropped(tmp_path):
    options = ["--programs", "query_gradient", "--dtypes", "fp32", "--archs", "90"]
    env = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = run("tools/bench/tune_attention.py", *options, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "| 90 | query_gradient | fp32 | 64 | 32 32 8 2 |" in done.stdout
    assert "| 64 32 8 2 |" not in done.stdout  # its one stage less spills too
    assert "candidates spill and are dropped; nothing was timed" in done.stdout
