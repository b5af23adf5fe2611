"""A finished run that keeps its weights: still evaluated, no longer resumed."""

import pytest

from megatron.checkpoints.keep import keep_weights_only
from megatron.checkpoints.read import load_for_evaluation
from megatron.config import load
from megatron.errors import UserError
from megatron.training.run import train
from tests.training.conftest import tiny


def test_weights_alone_can_be_evaluated_and_say_what_resuming_lacks(grid, corpus, tmp_path, caplog):
    folder = tmp_path / "run"
    paths = [f"data_path={corpus}", f"save={folder}", f"load={folder}", "save_interval=1"]
    train(load([], tiny(*paths, "train_iters=2", "pos_emb=mep_param")), grid)
    before = {path.name for path in (folder / "global_step2").iterdir()}
    keep_weights_only(folder)
    for step in (1, 2):
        left = {path.name for path in (folder / f"global_step{step}").iterdir()}
        assert left == {"checkpoint.json", "config.yml", "model.safetensors"}
    assert before - left == {"mp_rank_00_model_states.pt"}
    assert load_for_evaluation(folder)[2]["step"] == 2
    caplog.set_level("INFO")
    saved = train(load([], tiny(*paths, "train_iters=2", "pos_emb=mep_param")), grid)
    assert saved == folder / "global_step2"
    assert "step 2 of 2: nothing left to train" in caplog.messages
    more = load([], tiny(*paths, "train_iters=3", "pos_emb=mep_param"))
    with pytest.raises(UserError, match="holds weights only, training cannot continue from it"):
        train(more, grid)
