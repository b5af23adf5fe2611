"""Which steps are saved, and which of those checkpoints stay."""

import pytest

from megatron.checkpoints.saved import steps_in
from megatron.config import load
from megatron.errors import UserError
from megatron.training.run import train
from megatron.training.saves import is_saved
from tests.training.conftest import records, settings, tiny


def saved_steps(*words: str) -> list[int]:
    config = load([], tiny("train_iters=100", *words))
    return [step for step in range(101) if is_saved(step, config.checkpoint)]


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], []),
        (["checkpoint_factor=30"], [30, 60, 90]),
        (["checkpoint_scale=log", "checkpoint_factor=2"], [1, 2, 4, 8, 16, 32, 64]),
        (["checkpoint_scale=log", "checkpoint_factor=3"], [1, 3, 9, 27, 81]),
        (["extra_save_iters=[0, 5]", "save_interval=50"], [0, 5, 50, 100]),
        (["extra_save_iters=7,9"], [7, 9]),
    ],
    ids=["none", "linear", "log-2", "log-3", "extra", "extra-words"],
)
def test_checkpoints_are_written_at_the_steps_of_gpt_neox(words, steps):
    assert saved_steps(*words) == steps


def test_a_log_scale_needs_a_factor():
    with pytest.raises(UserError, match="checkpoint_scale: log saves at the powers of save_interv"):
        load([], tiny("train_iters=4", "checkpoint_scale=log"))


@pytest.mark.parametrize("how", ["precision=fp32", "precision=bf16"])
def test_extra_checkpoints_stay_and_the_initial_one_can_be_continued(grid, corpus, tmp_path, how):
    words = ["extra_save_iters=[0, 3]", "save_interval=2", "keep_last_n_checkpoints=2", how]
    train(settings(corpus, tmp_path / "a", *words), grid)
    assert steps_in(tmp_path / "a") == [0, 3, 6, 8]
    start = f"load={tmp_path / 'a' / 'global_step0'}"
    train(settings(corpus, tmp_path / "b", *words, start), grid)
    first, second = records(tmp_path / "a"), records(tmp_path / "b")
    assert first.keys() == second.keys()
    assert [first[step]["loss"] for step in first] == [second[step]["loss"] for step in first]
