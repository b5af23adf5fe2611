"""Resume a checkpoint, whatever engine wrote it: other ranks, another ZeRO stage or precision.

DeepSpeed's files fit the engine that wrote them. So the optimizer's averages are read from them by
the names of the parameters and cut for this engine; the weights are those of model.safetensors, in
float32. Files are mapped: only one parameter at a time is in memory twice.

DeepSpeed's own conversion (ds_to_universal) is not used: it has none for stage 0, it unpickles in
full, and its loading at stage 3 gives every group of parameters the weight decay of the first.
"""

import itertools
import logging
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megatron.checkpoints.manifest import WEIGHTS
from megatron.config import Config
from megatron.errors import UserError, in_words
from megatron.model import GPT
from megatron.positions import Position
from megatron.training.optimizer import AVERAGES, MOMENTUM, MuonBesideAdam, named_groups
from megatron.training.trainer import Trainer

logger = logging.getLogger(__name__)

PROGRESS_OF_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Attributes of DeepSpeed's dynamic loss scale that are no settings."""


class OptimizerState(NamedTuple):
    """State of an optimizer in a checkpoint.

    step: updates that Adam has made
    averages: by the name of a parameter, the whole ones by their keys
    scaler: the loss scale, or None
    """

    step: float
    averages: Callable[[str], dict[str, Tensor]]
    scaler: Any


def resume(trainer: Trainer, path: Path, config: Config, record: Mapping[str, Any]) -> None:
    """Give an engine the weights and the optimizer's state of a folder global_stepN.

    Every rank calls this. trainer: of a model that has not been trained yet
    config, record: of the checkpoint
    Raises UserError if the state is damaged, would run code, or is of another step.
    """
    step = record["step"]
    try:
        with safe_open(path / WEIGHTS, framework="pt") as weights:
            state = None
            if trainer.config.checkpoint.no_load_optim:
                logger.info("no_load_optim: continuing at step %d with a fresh optimizer", step)
            elif step:  # before its first update it has no averages
                names = weights.keys()
                shapes = {name: weights.get_slice(name).get_shape() for name in names}
                ranks = record.get("ranks", trainer.grid.ranks)
                state = read_state(path, step, config, ranks, trainer.model, shapes)
            give(trainer, weights.get_tensor, state)
    except torch.OutOfMemoryError:
        raise
    except Exception as fault:  # torch has many for damaged or hostile files
        raise UserError(
            f"{path}: the engine's state cannot be loaded ({in_words(fault):.200})"
            " - copy the checkpoint again, or continue from another one"
        ) from fault
    trainer.step = trainer.engine.global_steps = step


@torch.no_grad()
def give(
    trainer: Trainer, weight: Callable[[str], Tensor], state: OptimizerState | None = None
) -> None:
    """Give an engine weights in float32 and its optimizer's state. Every rank calls this.

    weight: the whole tensor of a name, also for parameters that ZeRO has divided
    state: None leaves the optimizer as new
    """
    import deepspeed
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    engine = trainer.engine
    stage = engine.zero_optimization_stage()
    optimizer = engine.optimizer.optimizer if stage else engine.optimizer
    if state is not None and stage:
        if stage == 3:
            parts = engine.optimizer.fp32_partitioned_groups_flat
        else:
            parts = [group["params"][0] for group in optimizer.param_groups]
        for part in parts:
            optimizer.state[part] = {key: torch.zeros_like(part) for key in AVERAGES}
        if stage < 3:
            engine.optimizer._lazy_init_hp_params_optimizer_state()

    for name, parameter in engine.module.named_parameters():
        whole = weight(name)
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3 divides it
        if whole.shape != shape:
            raise UserError(
                f"{WEIGHTS}: {name} has the shape {list(whole.shape)}, and this model's has"
                f" {list(shape)} - copy the checkpoint again"
            )
        averages = {} if state is None else state.averages(name)
        if stage == 0:
            parameter.data.copy_(whole)
            for key, average in averages.items():
                optimizer.state[parameter][key] = torch.empty_like(parameter).copy_(average)
        elif stage < 3:
            safe_set_full_fp32_param(parameter, whole)
            for key, average in averages.items():
                safe_set_full_optimizer_state(parameter, average, key)
        else:
            # DeepSpeed's own call cannot pad the last rank's piece.
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(whole)
            size = parameter.ds_tensor.numel()
            start = engine.global_rank * size

            def piece(whole: Tensor, start: int = start, size: int = size) -> Tensor:
                numbers = whole.flatten()[start : start + size]
                return nn.functional.pad(numbers, (0, size - numbers.numel()))

            safe_set_local_fp32_param(parameter, piece(whole))
            for key, average in averages.items():
                safe_set_local_optimizer_state(parameter, piece(average), key)
    if stage in (1, 2):
        engine.optimizer.update_lp_params()
    if state is None:
        return
    if isinstance(optimizer, torch.optim.AdamW | MuonBesideAdam):
        for part, values in optimizer.state.items():
            if AVERAGES[0] in values:
                # A tensor of its own for every parameter, as torch counts in place.
                step = torch.tensor(state.step, dtype=torch.float32, device=part.device)
                values["step"] = step
    else:  # apex
        for group in optimizer.param_groups:
            group["step"] = int(state.step)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    if scaler is not None and state.scaler is not None:
        continue_scale(scaler, state.scaler)


def continue_scale(scaler: Any, saved: Any) -> None:
    """Let a dynamic loss scale go on from where a saved one stands; a fixed one stays."""
    if not (scaler.dynamic and saved.dynamic):
        return
    for name in PROGRESS_OF_SCALE:
        setattr(scaler, name, getattr(saved, name))
    scaler.cur_scale = max(scaler.cur_scale, scaler.min_scale)
    scaler.cur_hysteresis = min(scaler.cur_hysteresis, scaler.delayed_shift)


# --- reading the files of an engine ---------------------------------------------------------------


def read_state(
    path: Path,
    step: int,
    config: Config,
    ranks: int,
    model: GPT,
    shapes: Mapping[str, Sequence[int]],
) -> OptimizerState:
    """The optimizer's state of a folder global_stepN, by the names of parameters.

    config, ranks: of its writer; shapes: of whole parameters
    Raises ValueError if a piece is missing, has another shape, or is of another step.
    """
    stage = config.parallel.zero_stage
    ranks = ranks if stage else 1  # files of stage 0 do not depend on them
    groups = named_groups(model, config.optimizer)
    keys = dict.fromkeys(shapes, AVERAGES) | dict.fromkeys(dict(groups.matrices), MOMENTUM)
    # An encoding acts on the embeddings once, so those of later layers have no gradients.
    idle = set()
    for index, position in enumerate(cast(Iterable[Position], model.positions)):
        if index and position.changes_embeddings:
            idle |= {f"positions.{index}.{name}" for name, _ in position.named_parameters()}

    # Flat pieces of (parameter, key), by rank.
    pieces: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for rank in range(ranks):
        prefix = f"zero_pp_rank_{rank}_" if stage == 3 else ""
        saved = load(path / f"{prefix}mp_rank_00_model_states.pt")
        if saved["global_steps"] != step:
            raise ValueError(f"it is that of step {saved['global_steps']}")
        parts = []  # (group, parameter, where it is in the flat group) of this rank
        if stage == 0:
            # The optimizer's own state, whose parameters have numbers, no names.
            optimizer = saved["optimizer"]
            names = [name for name, _ in itertools.chain(*groups)]
            parts = [(number, name, slice(None)) for number, name in enumerate(names)]
        elif stage == 3:
            # Each parameter is cut in equal pieces, the last ones padded.
            for group, group_shapes in enumerate(saved["param_shapes"]):
                start = 0
                for name, shape in group_shapes.items():
                    size = -(-shape.numel() // ranks)
                    filled = min(size, max(0, shape.numel() - rank * size))
                    parts.append((group, name, slice(start, start + filled)))
                    start += size
        if stage:
            prefix = "bf16_" if config.precision.dtype == "bf16" else ""
            file = path / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            saved = load(file)["optimizer_state_dict"]
            optimizer = saved["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
            for group, addresses in enumerate(saved.get("param_slice_mappings", ())):
                for name, address in addresses.items():
                    part = slice(address.start, address.start + address.numel)
                    parts.append((group, name, part))
        for group, name, part in parts:
            state = optimizer["state"].get(group, {})
            if name in idle and not state:
                state = {key: torch.zeros(shapes[name]) for key in AVERAGES}
            for key in keys[name]:
                values = state.get(key)
                if values is None:
                    raise ValueError(f"{name}: {key} is missing")
                if stage == 0 and [*values.shape] != shapes[name]:
                    raise ValueError(f"{name}: {key} has the shape {list(values.shape)}")
                pieces[name, key].append(values.flatten()[part])
    for name, shape in shapes.items():
        for key in keys[name]:
            size = sum(piece.numel() for piece in pieces[name, key])
            if size != math.prod(shape):
                raise ValueError(f"{name}: {size} numbers of {key}")

    def averages(name: str) -> dict[str, Tensor]:
        return {key: torch.cat(pieces[name, key]).view(*shapes[name]) for key in keys[name]}

    counts = [state["step"] for state in optimizer["state"].values() if "step" in state]
    counts += [group["step"] for group in optimizer["param_groups"] if "step" in group]  # apex
    return OptimizerState(float(counts[0]), averages, saved.get("loss_scaler"))


def load(file: Path) -> Any:
    """Plain data of a file of DeepSpeed's, mapped, and objects of the few classes it stores."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    def stage(kind: Any, name: str) -> Any:
        """A stage of ZeRO, which Python 3.11.0 to 3.11.3 pickle as getattr(ZeroStageEnum, name)."""
        if kind is not ZeroStageEnum or name not in ZeroStageEnum.__members__:
            raise pickle.UnpicklingError(f"Weights only load refused getattr of {kind!r}")
        return ZeroStageEnum[name]

    classes = [DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]
    with torch.serialization.safe_globals([*classes, (stage, "builtins.getattr")]):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
