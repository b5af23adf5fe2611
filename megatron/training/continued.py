"""The learning rate of a run that continues: the checkpoint's schedule or the configuration's."""

import logging
from dataclasses import replace

from megatron.config import Config
from megatron.config.schema import Optimizer
from megatron.errors import UserError

logger = logging.getLogger(__name__)

SCHEDULE = ("min_lr", "lr_decay_style", "lr_decay_iters", "warmup", "lr_schedule")
"""Keys of the section `optimizer` that shape the learning rate, beside optimizer.params.lr."""


def with_schedule(config: Config, trained: Config | None, step: int) -> Config:
    """The configuration with the schedule that a run follows from `step` on.

    trained: the configuration of the checkpoint it continues; None for a new run, whose schedule
        is its own
    UserError where only a changed train_iters would change the schedule: whether the old one shall
    be stretched is asked, because each choice is a different experiment.
    """
    if trained is None or step >= config.training.train_iters:
        return config
    if config.checkpoint.use_checkpoint_lr_scheduler:
        return replace(config, optimizer=_of_checkpoint(config.optimizer, trained.optimizer))
    now, then = config.optimizer.lr_decay_iters, trained.optimizer.lr_decay_iters
    steps, steps_before = config.training.train_iters, trained.training.train_iters
    if now == then:
        if steps > steps_before and steps > now:
            logger.info(
                f"train_iters is {steps}, was {steps_before}: the learning rate follows the old"
                f" schedule of lr_decay_iters = {now} steps and then stays at its end;"
                f" lr_decay_iters={steps} would stretch it"
            )
        return config
    asked = "lr_decay_iters" not in config.given and not config.checkpoint.override_lr_scheduler
    if asked:
        raise UserError(
            f"lr_decay_iters: follows train_iters = {steps} and was {then} when step {step} was"
            " trained, so the learning rate would change in the middle of the run - say which is"
            f" meant: lr_decay_iters={then} keeps the old schedule, and the rate stays at its end"
            f" from there on; lr_decay_iters={now} or override_lr_scheduler=true stretches the"
            f" schedule over {now} steps"
        )
    logger.info(
        f"lr_decay_iters is {now}, was {then}: the learning rate follows the new schedule from step"
        f" {step} on; lr_decay_iters={then} would keep the old one"
    )
    return config


def _of_checkpoint(here: Optimizer, there: Optimizer) -> Optimizer:
    """The optimizer's settings with the schedule of another one."""
    rate = {"params": here.optimizer.params.model_copy(update={"lr": there.lr})}
    update = {key: getattr(there, key) for key in SCHEDULE}
    return here.model_copy(update={**update, "optimizer": here.optimizer.model_copy(update=rate)})
