"""The steps after which a run is saved."""

from megatron.config.schema import Checkpoint


def is_saved(step: int, settings: Checkpoint) -> bool:
    """Whether a checkpoint is due after this step."""
    if step in settings.extra_save_iters:
        return True
    interval = settings.save_interval
    if not interval or not step:
        return False
    if settings.checkpoint_scale == "log":
        return _is_power(step, interval)
    return step % interval == 0


def _is_power(step: int, factor: int) -> bool:
    """Whether a step is 1, factor, factor², …"""
    power = 1
    while power < step:
        power *= factor
    return power == step
