"""Resume a checkpoint, even if it was written with other ranks, ZeRO stage or precision.

The file stores the optimizer's averages by parameter name, and we cut them for this engine; the
weights come from model.safetensors, in float32. Files are memory-mapped, so only one parameter at a
time is in memory twice.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megatron.checkpoints.manifest import OPTIMIZER, WEIGHTS
from megatron.errors import UserError, in_words
from megatron.training.optimizer import AVERAGES, PROGRESS_OF_SCALE, MuonBesideAdam, averages_of
from megatron.training.trainer import Trainer

logger = logging.getLogger(__name__)


def resume(trainer: Trainer, path: Path, record: Mapping[str, Any]) -> None:
    """Load the weights and the optimizer's state of a folder global_stepN into an engine.

    Every rank calls this. trainer: with a model that has not been trained yet
    record: checkpoint.json
    Raises UserError if the state is damaged or doesn't fit the model.
    """
    step = record["step"]
    try:
        weights = safe_open(path / WEIGHTS, framework="pt")
        state = None
        if trainer.config.checkpoint.no_load_optim:
            logger.info("no_load_optim: continuing at step %d with a fresh optimizer", step)
        else:
            state = safe_open(path / OPTIMIZER, framework="pt")
        give(trainer, weights.get_tensor, state)
    except torch.OutOfMemoryError:
        raise
    except Exception as fault:  # torch and safetensors raise many kinds for damaged files
        raise UserError(
            f"{path}: the optimizer's state cannot be loaded ({in_words(fault):.200})"
            " - copy the checkpoint again, or continue from another one"
        ) from fault
    trainer.step = trainer.engine.global_steps = step


@torch.no_grad()
def give(trainer: Trainer, weight: Callable[[str], Tensor], state: safe_open | None = None) -> None:
    """Load float32 weights and an optimizer state into an engine. Every rank calls this.

    weight: returns the whole tensor of a name, even for parameters that ZeRO has divided
    state: as `full_state` names it; None leaves the optimizer as new
    """
    import deepspeed
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    engine, optimizer = trainer.engine, trainer.optimizer
    stage = engine.zero_optimization_stage()
    step = 0.0 if state is None else state.get_tensor("step").item()
    if step and stage:
        if stage == 3:
            parts = engine.optimizer.fp32_partitioned_groups_flat
        else:
            parts = [group["params"][0] for group in optimizer.param_groups]
        for part in parts:
            optimizer.state[part] = {key: torch.zeros_like(part) for key in AVERAGES}
        if stage < 3:
            engine.optimizer._lazy_init_hp_params_optimizer_state()

    keys = averages_of(trainer.model, trainer.config.optimizer)
    for name, parameter in engine.module.named_parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3 divides the weight
        tensors: dict[Any, Tensor] = {None: weight(name)}  # DeepSpeed's key for masters is None
        if step and state is not None:
            tensors |= {key: state.get_tensor(f"{key}.{name}") for key in keys[name]}
        for key, whole in tensors.items():
            if whole.shape != shape:
                raise UserError(
                    f"{key or WEIGHTS}: {name} has shape {list(whole.shape)}, but this model needs"
                    f" {list(shape)} - copy the checkpoint again"
                )
            if stage == 0 and key:
                optimizer.state[parameter][key] = torch.empty_like(parameter).copy_(whole)
            elif stage == 0 or (stage < 3 and not parameter.requires_grad):
                parameter.data.copy_(whole)
            elif stage < 3:
                safe_set_full_optimizer_state(parameter, whole, key)
            else:
                if not key:
                    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                        parameter.data.copy_(whole)
                if not parameter.requires_grad:
                    continue
                # DeepSpeed's own call for whole tensors cannot pad the last rank's piece.
                size = parameter.ds_tensor.numel()
                start = engine.global_rank * size
                piece = whole.flatten()[start : start + size]
                piece = nn.functional.pad(piece, (0, size - piece.numel()))
                safe_set_local_optimizer_state(parameter, piece, key)
    if stage in (1, 2):
        engine.optimizer.update_lp_params()
    if state is None:
        return
    if isinstance(optimizer, torch.optim.AdamW | MuonBesideAdam):
        for part, values in optimizer.state.items():
            if AVERAGES[0] in values:
                # Each parameter gets its own tensor, because torch counts in place.
                values["step"] = torch.tensor(step, dtype=torch.float32, device=part.device)
    elif step:  # apex
        for group in optimizer.param_groups:
            group["step"] = int(step)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None and scaler.dynamic and "loss_scale" in state.keys():  # noqa: SIM118
        continue_scale(scaler, state.get_tensor("loss_scale"))


def continue_scale(scaler: Any, saved: Tensor) -> None:
    """Let a dynamic loss scale continue from a saved one."""
    for name, number in zip(PROGRESS_OF_SCALE, saved.tolist(), strict=True):
        setattr(scaler, name, number)
    scaler.cur_scale = max(scaler.cur_scale, scaler.min_scale)
    scaler.cur_hysteresis = min(scaler.cur_hysteresis, scaler.delayed_shift)
