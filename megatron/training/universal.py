"""Resume a checkpoint with another engine: other ranks, another ZeRO stage or precision.

DeepSpeed's files fit the engine that wrote them. Here Adam's averages are read from them by the
names of the parameters and cut anew; the weights are those of model.safetensors, in float32.
Nothing is written. The files are mapped, so that only one parameter at a time is in memory twice.

DeepSpeed's own conversion (ds_to_universal) is not used: it has none for stage 0, it unpickles in
full, and its loading at stage 3 gives every group of parameters the weight decay of the first.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megatron.checkpoints.manifest import WEIGHTS
from megatron.config import Config
from megatron.errors import UserError
from megatron.parallel.tensor import Shares
from megatron.training.optimizer import MuonBesideAdam, named_groups
from megatron.training.trainer import Trainer, shares_of

AVERAGES = ("exp_avg", "exp_avg_sq")
"""Names of Adam's two averages, in torch and in NVIDIA's apex."""


@dataclass(frozen=True)
class Engine:
    """Facts that DeepSpeed's files of a checkpoint depend on.

    ranks: those of each part of the model; 1 at stage 0, whose files do not depend on it
    shares: the parts
    encoding_decays: pos_emb_weight_decay, which decides the order of parameters
    """

    precision: str
    stage: int
    ranks: int
    shares: Shares
    encoding_decays: bool

    @classmethod
    def of(cls, config: Config, ranks: int) -> "Engine":
        """The engine of a configuration on so many ranks."""
        stage, shares = config.parallel.zero_stage, shares_of(config)
        of_each_part = ranks // shares.ranks if stage else 1
        decays = config.optimizer.pos_emb_weight_decay
        return cls(config.precision.dtype, stage, of_each_part, shares, decays)


class AdamState(NamedTuple):
    """How many updates Adam has made, and the whole average of a (parameter, key)."""

    step: float
    average: Callable[[str, str], Tensor]


def restore(trainer: Trainer, path: Path, written_by: Engine) -> None:
    """Give an engine the weights and Adam's state of a folder global_stepN.

    Every rank calls this, inside a context where torch loads plain data alone.
    trainer: of a model that has not been trained yet
    written_by: the engine that wrote the folder
    Raises what torch does for files that are damaged or incomplete.
    """
    with safe_open(path / WEIGHTS, framework="pt") as weights:
        shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        adam = _read(path, written_by, trainer.model, shapes)
        give(trainer, weights.get_tensor, adam)


@torch.no_grad()
def give(trainer: Trainer, weight: Callable[[str], Tensor], adam: AdamState | None = None) -> None:
    """Give an engine weights in float32 and Adam's state. Every rank calls this.

    weight: the whole tensor of a name, also for parameters that ZeRO has divided
    adam: None leaves the optimizer as new
    """
    import deepspeed
    from deepspeed.utils import (
        safe_set_full_fp32_param,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_optimizer_state,
    )

    engine, tensor = trainer.engine, trainer.tensor
    stage = engine.zero_optimization_stage()
    optimizer = engine.optimizer.optimizer if stage else engine.optimizer
    if adam is not None:
        for flat in updated_tensors(engine):
            averages = {key: torch.zeros_like(flat) for key in AVERAGES}
            optimizer.state[flat] = averages
            if isinstance(optimizer, torch.optim.AdamW):
                # A tensor of its own for every parameter, as torch counts in place.
                step = torch.tensor(adam.step, dtype=torch.float32, device=flat.device)
                optimizer.state[flat]["step"] = step
        for group in optimizer.param_groups:
            if not isinstance(optimizer, torch.optim.AdamW):
                group["step"] = int(adam.step)
        if stage in (1, 2):
            engine.optimizer._lazy_init_hp_params_optimizer_state()

    for name, parameter in engine.module.named_parameters():
        given = tensor.own(name, weight(name))
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO 3 divides it
        if given.shape != shape:
            raise UserError(
                f"{WEIGHTS}: {name} has the shape {list(given.shape)}, and this model's has"
                f" {list(shape)} - copy the checkpoint again"
            )
        averages = {}
        if adam is not None:
            averages = {key: tensor.own(name, adam.average(name, key)) for key in AVERAGES}
        if stage == 3:
            # DeepSpeed's own call cannot pad the last rank's piece.
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(given)
            size = parameter.ds_tensor.numel()
            start = engine.global_rank // tensor.ranks * size
            pieces = []
            for number in (given, *averages.values()):
                piece = number.flatten()[start : start + size]
                pieces.append(nn.functional.pad(piece, (0, size - piece.numel())))
            safe_set_local_fp32_param(parameter, pieces[0])
            for key, piece in zip(averages, pieces[1:], strict=True):
                safe_set_local_optimizer_state(parameter, piece, key)
            continue
        if stage == 0:
            parameter.data.copy_(given)
        else:
            safe_set_full_fp32_param(parameter, given)
        for key, average in averages.items():
            if stage == 0:
                optimizer.state[parameter][key].copy_(average.view(parameter.shape))
            else:
                safe_set_full_optimizer_state(parameter, average, key)
    if stage in (1, 2):
        engine.optimizer.update_lp_params()


def updated_tensors(engine: Any) -> list[Tensor]:
    """What the optimizer updates: the parameters, or with ZeRO this rank's flat parts of them."""
    stage = engine.zero_optimization_stage()
    if stage == 0:
        return list(engine.module.parameters())
    if stage == 3:
        return engine.optimizer.fp32_partitioned_groups_flat
    return [group["params"][0] for group in engine.optimizer.optimizer.param_groups]


def check_averages(engine: Any) -> None:
    """Raises ValueError if the optimizer lacks an average of what it updates, or has another shape.

    torch's fused Adam would read and write outside of such a tensor.
    """
    optimizer = engine.optimizer.optimizer if engine.zero_optimization() else engine.optimizer
    by_muon: set[int] = set()
    if isinstance(optimizer, MuonBesideAdam):
        by_muon = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    # An encoding acts on the embeddings once, so those of later layers have no gradients.
    later = [one for one in engine.module.positions[1:] if one.has("on_embeddings")]
    idle = {id(parameter) for one in later for parameter in one.parameters()}
    for number, tensor in enumerate(updated_tensors(engine)):
        shapes: dict[str, torch.Size] = dict.fromkeys(AVERAGES, tensor.shape)
        if id(tensor) in by_muon:
            shapes = {"momentum_buffer": tensor.shape}
        elif isinstance(optimizer, torch.optim.AdamW | MuonBesideAdam):  # apex counts elsewhere
            shapes["step"] = torch.Size()
        state = optimizer.state.get(tensor, {})
        if id(tensor) in idle and not state:
            continue
        for key, shape in shapes.items():
            if key not in state:
                raise ValueError(f"{key} of tensor {number} is missing")
            if state[key].shape != shape:
                held = list(state[key].shape)
                raise ValueError(
                    f"{key} of tensor {number} has the shape {held}, not {list(shape)}"
                )


# --- reading the files of an engine ---------------------------------------------------------------


def _read(
    path: Path, written_by: Engine, model: nn.Module, shapes: Mapping[str, Sequence[int]]
) -> AdamState:
    """shapes: of whole parameters. Raises ValueError if a piece is missing."""
    shares = written_by.shares
    shape_of_part = {}
    for name, shape in shapes.items():
        shape_of_part[name] = shares.part(name, torch.empty(shape, device="meta"), 0).shape
    # Flat pieces of (the tensor rank's part, parameter, key), by data rank.
    pieces: dict[tuple[int, str, str], list[Tensor]] = defaultdict(list)
    for owner, rank in itertools.product(range(shares.ranks), range(written_by.ranks)):
        if written_by.stage == 0:
            # One file with the optimizer's own state, whose parameters have numbers, no names.
            optimizer = _load(path / f"mp_rank_{owner:02d}_model_states.pt")["optimizer"]
            decayed, exempt = named_groups(model, encoding_decays=written_by.encoding_decays)
            numbered = enumerate([*decayed, *exempt])
            parts = [(number, name, slice(None)) for number, (name, _) in numbered]
        else:
            prefix = "bf16_" if written_by.precision == "bf16" else ""
            of_rank = f"zero_pp_rank_{rank}_mp_rank_{owner:02d}"
            saved = _load(path / f"{prefix}{of_rank}_optim_states.pt")["optimizer_state_dict"]
            parts = []  # (group, parameter, where it is in the flat group) of this rank
            if written_by.stage == 3:
                # Each parameter is cut in equal pieces, the last ones padded.
                groups = _load(path / f"{of_rank}_model_states.pt")["param_shapes"]
                optimizer = saved["optimizer_state_dict"]
                for group, of_group in enumerate(groups):
                    start = 0
                    for name, shape in of_group.items():
                        size = -(-shape.numel() // written_by.ranks)
                        filled = min(size, max(0, shape.numel() - rank * size))
                        parts.append((group, name, slice(start, start + filled)))
                        start += size
            else:
                optimizer = saved["base_optimizer_state"]
                for group, addresses in enumerate(saved["param_slice_mappings"]):
                    for name, address in addresses.items():
                        part = slice(address.start, address.start + address.numel)
                        parts.append((group, name, part))
        for group, name, part in parts:
            for key in AVERAGES:
                values = optimizer["state"].get(group, {}).get(key)
                if values is None:
                    raise ValueError(f"{name}: {key} is missing")
                if written_by.stage == 0 and values.shape != shape_of_part[name]:
                    raise ValueError(f"{name}: {key} has the shape {list(values.shape)}")
                pieces[owner, name, key].append(values.flatten()[part])
    for name, shape in shape_of_part.items():
        for owner, key in itertools.product(range(shares.ranks), AVERAGES):
            size = sum(piece.numel() for piece in pieces[owner, name, key])
            if size != shape.numel():
                raise ValueError(f"{name}: {size} numbers of {key}")

    def average(name: str, key: str) -> Tensor:
        flat = [torch.cat(pieces[owner, name, key]) for owner in range(shares.ranks)]
        return shares.joined(name, [part.view(shape_of_part[name]) for part in flat])

    first_state = next(iter(optimizer["state"].values()))
    step = first_state.get("step") or optimizer["param_groups"][0]["step"]  # there apex counts
    return AdamState(float(step), average)


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
