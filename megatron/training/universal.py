"""Resume a checkpoint with another engine: other ranks, another ZeRO stage or precision.

DeepSpeed's files fit the engine that wrote them. Here Adam's averages are read from them by the
names of the parameters and cut anew; the weights are those of model.safetensors, in float32.
Nothing is written. The files are mapped, so that only one parameter at a time is in memory twice.

DeepSpeed's own conversion (ds_to_universal) is not used: it has none for stage 0, it unpickles in
full, and its loading at stage 3 gives every group of parameters the weight decay of the first.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn

from megatron.checkpoints.manifest import WEIGHTS
from megatron.config import Config
from megatron.training.optimizer import named_groups
from megatron.training.trainer import parameter_size

AVERAGES = ("exp_avg", "exp_avg_sq")
"""Names of Adam's two averages, in torch and in NVIDIA's apex."""


@dataclass(frozen=True)
class Engine:
    """What DeepSpeed's files of a checkpoint depend on.

    ranks: 1 at stage 0, whose files do not depend on it
    encoding_decays: pos_emb_weight_decay, which decides the order of parameters
    """

    precision: str
    stage: int
    ranks: int
    encoding_decays: bool

    @classmethod
    def of(cls, config: Config, ranks: int) -> "Engine":
        """The engine of a configuration on so many ranks."""
        stage = config.parallel.zero_stage
        decays = config.optimizer.pos_emb_weight_decay
        return cls(config.precision.dtype, stage, ranks if stage else 1, decays)


class AdamState(NamedTuple):
    """How many updates Adam has made, and its averages by (parameter, key): flat pieces by rank."""

    step: float
    pieces: dict[tuple[str, str], list[Tensor]]

    def whole(self, name: str, key: str) -> Tensor:
        """One average of one parameter, float32, in one dimension."""
        return torch.cat(self.pieces[name, key])


@torch.no_grad()
def restore(engine: Any, config: Config, path: Path, written_by: Engine) -> None:
    """Give an engine the weights and Adam's state of a folder global_stepN.

    Every rank calls this, inside a context where torch loads plain data alone.
    engine: of a model that has not been trained yet
    config: what the engine was built from
    written_by: the engine that wrote the folder
    Raises what torch does for files that are damaged or incomplete.
    """
    adam = _read(path, written_by, engine.module)
    with safe_open(path / WEIGHTS, framework="pt") as weights:
        GIVE[config.parallel.zero_stage](engine, weights.get_tensor, adam)


@torch.no_grad()
def give_weights(engine: Any, config: Config, weight: Callable[[str], Tensor]) -> None:
    """Give an engine weights in float32 and leave its optimizer as new. Every rank calls this.

    weight: the whole tensor of a name, also for parameters that ZeRO has divided
    """
    GIVE[config.parallel.zero_stage](engine, weight, None)


# --- reading the files of an engine ---------------------------------------------------------------


def _read(path: Path, written_by: Engine, model: nn.Module) -> AdamState:
    """Raises ValueError if a piece is missing."""
    pieces: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for rank in range(written_by.ranks):
        if written_by.stage == 0:
            # One file with the optimizer's own state, whose parameters have numbers, no names.
            optimizer = _load(path / "mp_rank_00_model_states.pt")["optimizer"]
            decayed, exempt = named_groups(model, encoding_decays=written_by.encoding_decays)
            numbered = enumerate([*decayed, *exempt])
            parts = [(number, name, slice(None)) for number, (name, _) in numbered]
        else:
            prefix = "bf16_" if written_by.precision == "bf16" else ""
            of_rank = f"zero_pp_rank_{rank}_mp_rank_00"
            saved = _load(path / f"{prefix}{of_rank}_optim_states.pt")["optimizer_state_dict"]
            if written_by.stage == 3:
                shapes = _load(path / f"{of_rank}_model_states.pt")["param_shapes"]
                optimizer = saved["optimizer_state_dict"]
                parts = _pieces_of_stage_3(shapes, rank, written_by.ranks)
            else:
                optimizer = saved["base_optimizer_state"]
                parts = _pieces_of_stage_2(saved["param_slice_mappings"])
        for group, name, part in parts:
            for key in AVERAGES:
                pieces[name, key].append(optimizer["state"][group][key].flatten()[part])
    for name, parameter in model.named_parameters():
        for key in AVERAGES:
            size = sum(piece.numel() for piece in pieces[name, key])
            if size != parameter_size(parameter):
                raise ValueError(f"{name}: {size} numbers of {key}")
    # Updates are counted for each parameter in torch, for each group in apex.
    first_state = next(iter(optimizer["state"].values()))
    step = first_state["step"] if "step" in first_state else optimizer["param_groups"][0]["step"]
    return AdamState(float(step), pieces)


def _pieces_of_stage_2(mappings: list[dict[str, Any]]) -> Iterator[tuple[int, str, slice]]:
    """(group, parameter, where it is in the flat group) of one rank; also for stage 1."""
    for group, addresses in enumerate(mappings):
        for name, address in addresses.items():
            yield group, name, slice(address.start, address.start + address.numel)


def _pieces_of_stage_3(
    shapes: list[dict[str, torch.Size]], rank: int, ranks: int
) -> Iterator[tuple[int, str, slice]]:
    """The same: each parameter is cut in equal pieces, the last ones padded."""
    for group, of_group in enumerate(shapes):
        start = 0
        for name, shape in of_group.items():
            size = -(-shape.numel() // ranks)
            filled = min(size, max(0, shape.numel() - rank * size))
            yield group, name, slice(start, start + filled)
            start += size


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True, mmap=True)


# --- giving them to an engine; without Adam's state the optimizer stays as it is ------------------


def _give_whole(engine: Any, weight: Callable[[str], Tensor], adam: AdamState | None) -> None:
    """Stage 0: the optimizer's parameters are the model's."""
    for name, parameter in engine.module.named_parameters():
        parameter.data.copy_(weight(name))
        if adam is None:
            continue
        averages = {}
        for key in AVERAGES:
            average = adam.whole(name, key)
            averages[key] = average.view(parameter.shape).to(parameter.device)
        _set_state(engine.optimizer, parameter, averages, adam.step)


def _give_to_stage_2(engine: Any, weight: Callable[[str], Tensor], adam: AdamState | None) -> None:
    """Stages 1 and 2: this rank's part of each flat group of float32 numbers."""
    optimizer = engine.optimizer.optimizer
    flat_groups = [group["params"][0] for group in optimizer.param_groups]
    averages = [{key: torch.zeros_like(flat) for key in AVERAGES} for flat in flat_groups]
    for name, parameter in engine.module.named_parameters():
        mapping = parameter._hp_mapping
        if mapping is None:
            continue  # all of it is on other ranks
        source = mapping.lp_fragment_address
        target = mapping.get_hp_fragment_address()
        part = slice(source.start, source.start + source.numel)
        mapping.get_hp_fragment().copy_(weight(name).flatten()[part])
        if adam is None:
            continue
        for key in AVERAGES:
            average = averages[mapping.param_group_index][key]
            piece = adam.whole(name, key)[part]
            average.narrow(0, target.start, target.numel).copy_(piece)
    if adam is not None:
        for flat, of_group in zip(flat_groups, averages, strict=True):
            _set_state(optimizer, flat, of_group, adam.step)
    engine.optimizer.update_lp_params()


def _give_to_stage_3(engine: Any, weight: Callable[[str], Tensor], adam: AdamState | None) -> None:
    """Stage 3: this rank's piece of every parameter."""
    import deepspeed
    from deepspeed.utils import safe_set_local_fp32_param, safe_set_local_optimizer_state

    zero = engine.optimizer
    if adam is not None:
        for flat in zero.fp32_partitioned_groups_flat:
            averages = {key: torch.zeros_like(flat) for key in AVERAGES}
            _set_state(zero.optimizer, flat, averages, adam.step)
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(weight(name))
        size = parameter.ds_tensor.numel()

        def own_piece(whole: Tensor, size: int = size) -> Tensor:
            start = engine.global_rank * size
            piece = whole.flatten()[start : start + size]
            return nn.functional.pad(piece, (0, size - piece.numel()))

        safe_set_local_fp32_param(parameter, own_piece(weight(name)))
        if adam is None:
            continue
        for key in AVERAGES:
            average = adam.whole(name, key)
            safe_set_local_optimizer_state(parameter, own_piece(average), key)


def _set_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor, averages: dict[str, Tensor], step: float
) -> None:
    """Give torch's or apex's Adam its state of one parameter."""
    state: dict[str, Any] = dict(averages)
    if isinstance(optimizer, torch.optim.AdamW):
        # A tensor of its own for every parameter, as torch counts in place.
        state["step"] = torch.tensor(step, dtype=torch.float32, device=parameter.device)
    else:
        for group in optimizer.param_groups:
            group["step"] = int(step)
    optimizer.state[parameter] = state


GIVE: dict[int, Callable[[Any, Callable[[str], Tensor], AdamState | None], None]] = {
    0: _give_whole,
    1: _give_to_stage_2,
    2: _give_to_stage_2,
    3: _give_to_stage_3,
}
"""How an engine of each ZeRO stage gets its numbers."""
