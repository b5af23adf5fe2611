"""Weights that exploded or are no numbers never cost a run its last good checkpoint."""

import errno
import io
import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
from deepspeed.runtime import engine as engine_module

from megatron.checkpoints import write
from megatron.checkpoints.keep import Keeper
from megatron.checkpoints.manifest import read_record
from megatron.checkpoints.saved import steps_in
from megatron.errors import UserError
from megatron.training import checkpoint
from megatron.training.finite import not_finite, saved_numbers
from megatron.training.run import train
from tests.training.conftest import settings
from tests.training.test_engine import text, trainer


def run_of(folder, steps):
    for step in steps:
        (folder / f"global_step{step}").mkdir(parents=True)
        (folder / f"global_step{step}/checkpoint.json").write_text("{}")


def follow(keeper, losses, saves):
    """The run of these losses that saves after some steps, as the training loop follows it."""
    for step, loss in losses.items():
        keeper.follow([(step, loss)])
        if step in saves:
            run_of(keeper.folder, [step])
            keeper.wrote(step)


@pytest.mark.parametrize("count", [1, 2])
def test_an_explosion_never_deletes_the_last_good_checkpoint(tmp_path, caplog, count):
    keeper = Keeper(tmp_path, count)
    losses = {1: 5.0, 2: 4.0, 3: 3.9, 4: 3.8, 5: 3.9, 6: 9e4, 7: 8e4, 8: 1e5, 9: 7e4, 10: 9e4}
    follow(keeper, losses, {2, 3, 5, 6, 7, 9})
    assert 3 in steps_in(tmp_path)
    # Step 5 exploded: the loss after it is the first bad one.
    assert steps_in(tmp_path) == [3, *[6, 7, 9][-count:]][-count - 1 :]
    assert keeper.facts()["proven"] == 3
    assert "step 6: loss 9e+04 after 4.05: global_step5 follows an exploded update" in caplog.text


@pytest.mark.parametrize("usual", [3.0, 3.2])
def test_one_low_loss_freezes_no_proof(tmp_path, usual):
    keeper = Keeper(tmp_path, 1)
    follow(keeper, {1: usual, 2: 3.0, 3: 0.4, 4: 3.0, 5: 3.0, 6: 0.4, 7: 3.0, 8: 3.0}, {2, 4, 7})
    assert keeper.facts()["proven"] == 7
    assert steps_in(tmp_path) == [7]


def test_a_real_fall_lowers_the_bound_also_across_a_resumption(tmp_path):
    before = Keeper(tmp_path, 1)
    follow(before, {1: 3.0, 2: 1.0}, {2})
    resumed = Keeper(tmp_path, 1, started_at=2, record=before.facts())
    follow(resumed, {3: 1.0}, {})
    assert resumed.facts() == {"proven": 2, "usual_loss": 2.0, "last_loss": 1.0}


def test_a_resumed_run_remembers_what_was_proven(tmp_path):
    run_of(tmp_path, [4, 6, 8])
    resumed = Keeper(
        tmp_path, 1, started_at=8, record={"proven": 4, "usual_loss": 3.0, "vocab": 100}
    )
    follow(resumed, {9: 1e6, 10: 1e6}, {10})
    assert steps_in(tmp_path) == [4, 10]
    follow(resumed, {11: 3.1}, {})
    assert steps_in(tmp_path) == [10], "the update recovered"


def test_without_a_known_loss_guessing_is_the_bound(tmp_path):
    run_of(tmp_path, [4, 8])
    follow(
        Keeper(tmp_path, 1, started_at=8, record={"vocab": 100}),
        {9: math.log(100) + 2, 10: 40.0},
        {10},
    )
    assert steps_in(tmp_path) == [4, 8, 10], "nothing proved good, nothing goes"
    follow(Keeper(tmp_path, 1, started_at=10, record={"vocab": 100}), {11: math.log(100)}, {})
    assert steps_in(tmp_path) == [10]


def test_extra_checkpoints_stay_and_are_not_counted(tmp_path):
    keeper = Keeper(tmp_path, 1, stay=(0, 4))
    run_of(tmp_path, [0])
    follow(keeper, dict.fromkeys(range(1, 10), 3.0), {2, 4, 6, 8})
    assert steps_in(tmp_path) == [0, 4, 8]


def test_healthy_runs_keep_as_many_as_asked_once_the_newest_proved_good(tmp_path):
    keeper = Keeper(tmp_path, 2)
    follow(keeper, dict.fromkeys(range(1, 10), 3.0), {2, 4, 6, 8})
    assert steps_in(tmp_path) == [6, 8]


def test_a_run_that_explodes_leaves_a_checkpoint_with_which_training_goes_on(
    grid, corpus, tmp_path
):
    train(settings(corpus, tmp_path, "train_iters=3", "save_interval=1"), grid)
    wild = ["optimizer.params.lr=1e20", "gradient_clipping=0", "warmup=0", "save_interval=1"]
    try:
        train(settings(corpus, tmp_path, *wild, "keep_last_n_checkpoints=1"), grid)
    except UserError as fault:
        logging.getLogger(__name__).info("%s", fault)
    good = min(steps_in(tmp_path))
    assert good in (2, 3)
    again = settings(corpus, tmp_path / "again", f"load={tmp_path}/global_step{good}")
    saved = train(again, grid)
    assert read_record(saved)["usual_loss"] < math.log(512)


@pytest.mark.parametrize(
    "how",
    [[], ["precision=bf16"], ["zero_optimization.stage=3"]],
    ids=["fp32", "bf16", "zero3"],
)
def test_numbers_that_are_not_finite_are_found_in_weights_masters_and_averages(grid, how):
    run = trainer(grid, "pos_emb=alibi", *how)
    run.train_step([text(1)[0]])
    assert not_finite(saved_numbers(run.engine)) == []
    optimizer = run.engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    master, state = next(iter(optimizer.state.items()))
    state["exp_avg_sq"].view(-1)[3] = math.inf
    assert not_finite(saved_numbers(run.engine)) == ["exp_avg_sq 0"]
    state["exp_avg_sq"].view(-1)[3] = 0
    with torch.no_grad():
        master.view(-1)[3] = math.nan
    assert "master weights 0" in not_finite(saved_numbers(run.engine))


def test_weights_that_are_not_finite_are_not_saved(grid, tmp_path):
    run = trainer(grid, "pos_emb=alibi")
    run.train_step([text(1)[0]])
    checkpoint.save(run, tmp_path, {"vocab": 61})
    before = sorted(path.name for path in tmp_path.iterdir())
    run.train_step([text(1)[0]])
    with torch.no_grad():
        next(run.model.parameters())[0, 0] = math.nan
    with pytest.raises(UserError) as fault:
        checkpoint.save(run, tmp_path, {"vocab": 61})
    name = next(name for name, _ in run.model.named_parameters())
    assert str(fault.value) == (
        f"save: not finite after step 2: {name}, master weights 0 - nothing was saved,"
        f" {tmp_path}/global_step1 stays;"
        " lower optimizer.params.lr, raise warmup, or use precision: fp32"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_file_that_cannot_be_written_leaves_the_earlier_checkpoint(grid, tmp_path, monkeypatch):
    run = trainer(grid, "pos_emb=alibi", "zero_optimization.stage=1")
    run.train_step([text(1)[0]])
    checkpoint.save(run, tmp_path, {"vocab": 61})
    before = sorted(path.name for path in tmp_path.iterdir())
    run.train_step([text(1)[0]])

    class Full(io.BytesIO):
        def write(self, piece):
            raise OSError(errno.ENOSPC, "No space left on device")

    opened = Path.open

    def opens(path, mode="r", **how):
        return Full() if "optim" in path.name and "w" in mode else opened(path, mode, **how)

    monkeypatch.setattr(Path, "open", opens)
    with pytest.raises(
        UserError,
        match=r"save: .*partial_step2 cannot be written \(No space left on device; [\d.]+ GiB were"
        r" free\) - make room or save elsewhere; .*global_step1 stays",
    ):
        checkpoint.save(run, tmp_path, {"vocab": 61})
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def unremovable(path, *, strict=True, **_):
    raise OSError(errno.EBUSY, "Device or resource busy", str(path))


def test_a_checkpoint_that_cannot_be_deleted_ends_no_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "rmtree", unremovable)  # as NFS, while somebody reads a file
    follow(Keeper(tmp_path, 1), dict.fromkeys(range(1, 6), 3.0), {2, 4})
    assert steps_in(tmp_path) == [4]
    assert f"{tmp_path}/removing_global_step2: cannot be removed now (" in caplog.text


@pytest.mark.parametrize("name", ["copyfile", "write_record", "write_text"])
def test_what_the_first_rank_alone_cannot_write_ends_all_ranks(grid, tmp_path, monkeypatch, name):
    run = trainer(grid, "pos_emb=alibi", "zero_optimization.stage=1")
    run.train_step([text(1)[0]])
    barriers = []
    monkeypatch.setattr(engine_module.dist, "barrier", lambda *_, **__: barriers.append(1))
    checkpoint.save(run, tmp_path / "whole", {"vocab": 61})
    expected = len(barriers)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    where = engine_module if name == "copyfile" else write
    monkeypatch.setattr(where, name, full)
    barriers.clear()
    with pytest.raises(UserError, match=r"partial_step1 cannot be written \(No space left on dev"):
        checkpoint.save(run, tmp_path / "full", {"vocab": 61})
    assert len(barriers) == expected, "the others wait in the barrier that this rank left out"
