"""What a checkpoint holds, which ones stay, and what a missing or damaged one says."""

import errno
import math
import shutil

import pytest
import torch

from megatron.checkpoints import write
from megatron.checkpoints.read import load_for_evaluation
from megatron.checkpoints.saved import keep_weights_only, latest_step, steps_in
from megatron.config import load
from megatron.errors import UserError
from megatron.training import checkpoint
from megatron.training.checkpoint import is_saved
from megatron.training.loop import train
from tests.faults.damage import found_by_use, own_encoding
from tests.faults.damage import settings as damage_settings
from tests.training.conftest import copy_of, settings, text, tiny, trainer

ELSEWHERE = "tools/inspect_files.py shows which are undamaged"


def test_a_checkpoint_gives_back_the_trained_model_and_its_own_configuration(
    grid, corpus, tmp_path
):
    config = settings(corpus, tmp_path, "precision=bf16", "train_iters=4")
    train(config, grid)
    model, saved, meta = load_for_evaluation(tmp_path)
    facts = [meta[key] for key in ("step", "config_hash", "vocab", "corpus", "threads")]
    assert facts == [4, config.hash, 512, "tiny", torch.get_num_threads()]
    assert saved.flat() == config.flat()
    # Float32 masters, not bfloat16 copies: most of them are no bfloat16 numbers.
    weight = model.layers[0].mlp.dense_h_to_4h.weight
    assert (weight != weight.bfloat16().float()).float().mean() > 0.9


# --- damage ---------------------------------------------------------------------------------------


def test_no_damage_to_any_file_is_used(grid, corpus, tmp_path):
    """`make faults` does so for every engine."""
    with own_encoding(tmp_path):
        train(damage_settings(corpus, tmp_path, "fp32"), grid)
        outcomes = found_by_use(corpus, tmp_path, "fp32", grid)
    assert not [outcome for outcome in outcomes if outcome.message is None]
    assert all(outcome.named for outcome in outcomes), [
        outcome for outcome in outcomes if not outcome.named
    ]
    assert all(ELSEWHERE in outcome.message for outcome in outcomes)
    assert latest_step(tmp_path / "run") == 2


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_one_message(
    grid, corpus, trained, tmp_path, monkeypatch
):
    """As keep_last_n_checkpoints deletes it; a new run may take its weights from there, too."""
    folder, opening = copy_of(trained, tmp_path), torch.UntypedStorage.from_file

    def deleted(*words, **more):
        shutil.rmtree(folder / "global_step4")
        return opening(*words, **more)

    config = settings(corpus, tmp_path / "new", f"load={folder}", "finetune=true")
    for read in (lambda: load_for_evaluation(folder), lambda: train(config, grid)):
        with monkeypatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "from_file", deleted)
            with pytest.raises(UserError, match=r"global_step4/model\.safetensors: .*No such file"):
                read()
        shutil.copytree(trained / "global_step4", folder / "global_step4")


@pytest.fixture(scope="module")
def three(grid, corpus, tmp_path_factory):
    """A run with checkpoints of steps 1, 2 and 3; not to be changed."""
    folder = tmp_path_factory.mktemp("three")
    train(settings(corpus, folder, "train_iters=3", "save_interval=1"), grid)
    return folder


# --- writing --------------------------------------------------------------------------------------


def test_checkpoints_are_written_at_the_steps_of_gpt_neox():
    cases = [
        ([], []),
        (["checkpoint_factor=30"], [30, 60, 90]),
        (["checkpoint_scale=log", "checkpoint_factor=3"], [1, 3, 9, 27, 81]),
        (["extra_save_iters=[0, 5]", "save_interval=50"], [0, 5, 50, 100]),
    ]
    for words, steps in cases:
        config = load([], tiny("train_iters=100", *words))
        assert [step for step in range(101) if is_saved(step, config.checkpoint)] == steps


def begun(grid, folder, *words):
    """A run with a checkpoint of its first step, which stands at the second."""
    run = trainer(grid, "pos_emb=alibi", *words)
    run.train_step([text(1)[0]])
    checkpoint.save(run, folder, {"vocab": 61})
    run.train_step([text(1)[0]])
    return run


@pytest.mark.parametrize("how", ["precision=fp32", "zero_optimization.stage=3"])
def test_weights_that_are_not_finite_are_not_saved(grid, tmp_path, how):
    run = begun(grid, tmp_path, how)
    before = sorted(path.name for path in tmp_path.iterdir())
    optimizer = run.engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    state = next(iter(optimizer.state.values()))
    state["exp_avg_sq"].view(-1)[3] = math.inf  # of the first matrix
    with pytest.raises(UserError) as fault:
        checkpoint.save(run, tmp_path, {"vocab": 61})
    for word in ("step 2: exp_avg_sq.word_embeddings.weight ", "earlier ones were kept"):
        assert word in str(fault.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_file_that_cannot_be_written_leaves_the_earlier_checkpoint(grid, tmp_path, monkeypatch):
    run = begun(grid, tmp_path, "zero_optimization.stage=1")
    before = sorted(path.name for path in tmp_path.iterdir())

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("save_file", "write_record"):
        with monkeypatch.context() as patched:
            patched.setattr(write, name, full)
            with pytest.raises(UserError) as fault:
                checkpoint.save(run, tmp_path, {"vocab": 61})
        message = str(fault.value)
        assert "partial_step2 cannot be written (No space left on device) " in message
        assert message.endswith("or save elsewhere")
        assert sorted(path.name for path in tmp_path.iterdir()) == before


# --- which ones stay ------------------------------------------------------------------------------


def test_the_newest_stay_and_a_run_that_was_set_back_deletes_nothing_newer(grid, corpus, tmp_path):
    train(settings(corpus, tmp_path, "save_interval=2", "extra_save_iters=[0]"), grid)
    (tmp_path / "latest").write_text("global_step2")
    words = ["train_iters=4", "keep_last_n_checkpoints=1", "extra_save_iters=[0]"]
    train(settings(corpus, tmp_path, *words), grid)
    assert latest_step(tmp_path) == 4
    assert steps_in(tmp_path) == [0, 4, 6, 8]


def test_weights_alone_can_be_evaluated_and_go_on_with_a_fresh_optimizer(
    grid, corpus, three, tmp_path, caplog
):
    folder = copy_of(three, tmp_path)
    keep_weights_only(folder)
    for step in (1, 2, 3):
        left = {path.name for path in (folder / f"global_step{step}").iterdir()}
        assert left == {"checkpoint.json", "config.yml", "model.safetensors"}
    assert load_for_evaluation(folder)[2]["step"] == 3
    caplog.set_level("INFO")
    assert train(settings(corpus, folder, "train_iters=3"), grid) == folder / "global_step3"
    assert "step 3 of 3: nothing left to train" in caplog.messages
    train(settings(corpus, folder, "train_iters=4", "no_load_optim=true"), grid)
    assert latest_step(folder) == 4
