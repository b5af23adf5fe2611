"""A finished run that gets more steps: which schedule its learning rate follows is asked."""

import re

import pytest

from megatron.config import load
from megatron.errors import UserError
from megatron.training.continued import with_schedule
from megatron.training.schedule import learning_rate

MODEL = ["num_layers=1", "hidden_size=8", "num_attention_heads=2", "seq_length=8"]
THEN = load([], [*MODEL, "train_iters=8", "optimizer.params.lr=0.5", "min_lr=0.1"])


def with_steps(*words: str):
    return load([], [*MODEL, "train_iters=12", "optimizer.params.lr=0.5", "min_lr=0.1", *words])


def test_more_steps_alone_do_not_say_which_schedule_is_meant():
    with pytest.raises(UserError) as fault:
        with_schedule(with_steps(), THEN, 8)
    assert re.search(
        r"lr_decay_iters: follows train_iters = 12 and was 8 .* lr_decay_iters=8 keeps the old"
        r" schedule, .* lr_decay_iters=12 or override_lr_scheduler=true stretches the schedule",
        str(fault.value),
    )


def test_the_old_schedule_ends_at_the_floor(caplog):
    with caplog.at_level("INFO"):
        config = with_schedule(with_steps("lr_decay_iters=8"), THEN, 8)
    assert learning_rate(10, config.optimizer) == pytest.approx(0.1)
    assert "the old schedule of lr_decay_iters = 8 steps" in caplog.messages[0]
    assert "lr_decay_iters=12 would stretch it" in caplog.messages[0]


@pytest.mark.parametrize("words", ["lr_decay_iters=12", "override_lr_scheduler=true"])
def test_the_schedule_is_stretched_where_that_is_said(words, caplog):
    with caplog.at_level("INFO"):
        config = with_schedule(with_steps(words), THEN, 8)
    assert learning_rate(10, config.optimizer) > 0.11
    assert "the new schedule from step 8 on; lr_decay_iters=8 would keep the old one" in caplog.text


def test_the_checkpoints_schedule_is_kept_where_that_is_said():
    given = ["use_checkpoint_lr_scheduler=true", "optimizer.params.lr=0.9", "warmup=0.5"]
    config = with_schedule(with_steps(*given, "weight_decay=0.3", "lr_decay_style=linear"), THEN, 4)
    for step in range(12):
        assert learning_rate(step, config.optimizer) == learning_rate(step, THEN.optimizer)
    assert config.optimizer.weight_decay == 0.3


def test_nothing_is_asked_of_a_run_that_is_new_finished_or_unchanged():
    shorter = with_steps("train_iters=6")
    assert with_schedule(shorter, None, 0) is shorter
    assert with_schedule(shorter, THEN, 8) is shorter
    assert with_schedule(THEN, THEN, 4) is THEN


def test_both_schedules_cannot_be_taken():
    with pytest.raises(UserError, match=r"override_lr_scheduler: .* keep one of them"):
        with_steps("override_lr_scheduler=true", "use_checkpoint_lr_scheduler=true")
