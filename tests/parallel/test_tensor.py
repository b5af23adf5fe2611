"""Ranks that share each layer compute what one process does."""

import json

import pytest
from safetensors import safe_open

from megatron.positions import REGISTRY
from megatron.positions.base import Position
from megatron.training.loop import train
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
