"""Save a training run, and delete checkpoints that are too old.

SAVE/latest                                 name of the newest folder
SAVE/global_step100/model.safetensors       weights in float32, by our names
                    config.yml              the complete configuration
                    pos_emb_file.py         the user's own encoding; never run from here
                    checkpoint.json         step, config_hash, vocab, tokenizer, corpus, commit,
                                            size and SHA-256 of every other file
                    optimizer.safetensors   the optimizer's state, for resuming; see `full_state`
"""

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron.checkpoints.saved import folder_of, remove_checkpoint, remove_unfinished, steps_in
from megatron.checkpoints.write import write_checkpoint
from megatron.config.schema import Checkpoint
from megatron.errors import UserError
from megatron.parallel.grid import shared_faults
from megatron.training.optimizer import PROGRESS_OF_SCALE, averages_of
from megatron.training.trainer import Trainer

CURE = "lower optimizer.params.lr, raise warmup, or use precision: fp32"
SHOWN = 3  # names in a message


def save(trainer: Trainer, folder: Path, facts: dict[str, Any]) -> Path:
    """Write partial_step{step}, rename it to global_step{step}, then point `latest` at it.

    Every rank calls this. facts: entries of checkpoint.json in addition to step, hash, commit and
        files
    Raises UserError on every rank if a number is not finite or a file cannot be written. Then
    nothing of this step remains, and earlier checkpoints are kept.
    """
    step, grid = trainer.step, trainer.grid
    weights = full_weights(trainer, keep=grid.first)
    optimizer = full_state(trainer, keep=grid.first)
    with shared_faults(grid):
        if grid.first:
            # Minimum and maximum show it, in an eighth of a norm's time.
            names = [
                name
                for name, tensor in {**weights, **optimizer}.items()
                if not torch.stack(torch.aminmax(tensor)).isfinite().all()
            ]
            if names:
                raise UserError(
                    f"save: not finite after step {step}: {', '.join(names[:SHOWN])} - no"
                    f" checkpoint was saved, and earlier ones were kept; {CURE}"
                )
            remove_unfinished(folder)
            write_checkpoint(folder, step, weights, trainer.config, facts, optimizer)
    return folder_of(folder, step)


def full_weights(trainer: Trainer, *, keep: bool = True) -> dict[str, Tensor]:
    """The whole model's weights in float32 on the CPU, from the optimizer's master copy if any.

    Every rank calls this, because with ZeRO each holds a part; ranks without `keep` get none.
    """
    from deepspeed.utils import safe_get_full_fp32_param

    engine = trainer.engine
    weights = {}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter) if engine.zero_optimization() else None
        weight = parameter if master is None else master
        if keep:
            weights[name] = weight.detach().float().cpu().contiguous()
    return weights


def full_state(trainer: Trainer, *, keep: bool = True) -> dict[str, Tensor]:
    """The optimizer's state under names that fit any number of ranks, ZeRO stage and precision.

    exp_avg.NAME: an average for the whole weight of that name, float32, on the CPU
    step: number of Adam's updates; before the first one there are no averages
    loss_scale: the current dynamic loss scale of fp16

    Every rank calls this; ranks without `keep` get no averages.
    """
    from deepspeed.utils import safe_get_full_optimizer_state

    engine, optimizer = trainer.engine, trainer.optimizer
    # Torch counts updates in the state, apex in the groups.
    counters = [*optimizer.state.values(), *optimizer.param_groups]
    step = max((float(counter["step"]) for counter in counters if "step" in counter), default=0.0)
    state = {"step": torch.tensor(step)}
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None and scaler.dynamic:
        scale = [getattr(scaler, name) for name in PROGRESS_OF_SCALE]
        state["loss_scale"] = torch.tensor(scale, dtype=torch.float64)
    if not step:
        return state
    if engine.zero_optimization_stage() in (1, 2):
        # DeepSpeed links the averages only once, when only the first group has any.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    keys = averages_of(trainer.model, trainer.config.optimizer)
    for name, parameter in engine.module.named_parameters():
        for key in keys[name]:
            if engine.zero_optimization():
                average = cast(Tensor, safe_get_full_optimizer_state(parameter, key))
            else:  # none if there was never a gradient
                average = optimizer.state.get(parameter, {}).get(key, torch.zeros_like(parameter))
            if keep:
                state[f"{key}.{name}"] = average.detach().cpu().contiguous()
    return state


def is_saved(step: int, settings: Checkpoint) -> bool:
    """Whether a checkpoint is due after this step."""
    if step in settings.extra_save_iters:
        return True
    interval = settings.save_interval
    if not interval or not step:
        return False
    if settings.checkpoint_scale == "linear":
        return step % interval == 0
    power = 1
    while power < step:
        power *= interval
    return power == step


def delete_older(folder: Path, step: int, settings: Checkpoint) -> None:
    """Delete all but the newest keep_last_n_checkpoints up to a step, and extra_save_iters."""
    count = settings.keep_last_n_checkpoints
    if count is None:
        return
    stay = settings.extra_save_iters
    steps = [other for other in steps_in(folder) if other <= step and other not in stay]
    for other in steps[:-count]:
        remove_checkpoint(folder_of(folder, other))
