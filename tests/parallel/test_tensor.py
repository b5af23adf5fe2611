"""Ranks that share each layer compute what one process does."""

import json

import pytest
from safetensors import safe_open

from megatron.config import load
from megatron.errors import UserError
from megatron.parallel.grid import Grid
from megatron.positions import REGISTRY
from megatron.positions.base import Position
from megatron.training.loop import train
from megatron.training.trainer import shares_of
from tests.parallel import tensor_ranks as ranks
from tests.training.conftest import grid, records, tiny  # noqa: F401

EXACT = 1e-5


def shapes(folder, step):
    with safe_open(folder / f"global_step{step}" / "model.safetensors", framework="pt") as weights:
        return {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118


@pytest.mark.distributed
def test_ranks_that_share_layers_train_and_continue_as_one_does(forks, grid, corpus, tmp_path):  # noqa: F811
    whole = tmp_path / "whole"
    twice = "gradient_accumulation_steps=2"
    train(ranks.recipe(corpus, whole, None, 9, twice), grid)

    file, log = tmp_path / "found.json", tmp_path / "log"
    forks.run_ranks(4, ranks.__file__, file, corpus, whole, tmp_path, log=log)
    results = json.loads(file.read_text())

    computed = results["differences"].keys() | results["refused"].keys()
    assert computed == {case for case, _ in ranks.cases()}
    for name in results["refused"]:
        encoding = REGISTRY[name]
        whole_heads = ("on_scores", "block_scores", "on_queries_keys_by_content", "on_queries_keys")
        whole_heads += ("score_scale",)
        assert any(getattr(encoding, hook) is not getattr(Position, hook) for hook in whole_heads)
    for case, differences in results["differences"].items():
        assert len(differences) > 20
        assert max(differences.values()) <= EXACT, (case, differences)
    assert results["skipped"] == [[True] * 4] * 2
    assert results["exact"] == [True] * 4

    # Each stage's checkpoint continues on the other stages, above, and on one rank.
    expected = records(whole)
    for stage, at in ranks.CONTINUED:
        shared, alone = tmp_path / f"shared{at}", tmp_path / f"one{at}"
        assert shapes(shared, at + 1) == shapes(whole, at + 1)
        step = at + 2
        train(ranks.recipe(corpus, alone, shared / f"global_step{at + 1}", step, twice), grid)
        for folder in (shared, alone):
            for number, record in records(folder).items():
                for key in ("loss", "grad_norm"):
                    close = pytest.approx(expected[number][key], rel=EXACT)
                    assert record[key] == close, (stage, folder, number, key)


def test_what_ranks_cannot_share_is_refused(grid):  # noqa: F811
    def fault_of(act):
        with pytest.raises(UserError) as fault:
            act()
        return str(fault.value)

    two, three = "model_parallel_size=2", "model_parallel_size=3"
    for words, message in {
        (two, "pos_emb=cope"): "CoPE cannot be computed for some of the heads, because on_scores",
        (two, "pos_emb=path"): "Path cannot be computed for some of the heads, because block_sc",
        (two, "pos_emb=ssmax"): "SSMax cannot be computed for some of the heads, because score_",
        (two, "torch_compile=true"): "torch_compile: compiles no exchange between",
        (two, "context_parallel_size=2"): "2 ranks that share a text do not share layers too",
        ("pipe_parallel_size=4",): "must be <= 1, got 4; there are no pipeline stages: to divide",
    }.items():
        assert message in fault_of(lambda words=words: load([], tiny(*words)))
    message = fault_of(lambda: Grid(0, 4).sharing(1, 3))
    assert message.startswith("model_parallel_size: 3 ranks that share need a multiple of 3 ranks")
    shared = load([], tiny(three))
    message = fault_of(lambda: shares_of(shared))
    assert "3 ranks cannot share num_attention_heads = 4 equally - take" in message
    assert shared.hash == load([], tiny()).hash
