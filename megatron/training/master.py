"""The optimizer's float32 values of parameters that a DeepSpeed engine holds rounded."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.parallel.grid import Grid


def parameter_size(parameter: Tensor) -> int:
    """Numbers of a parameter, also of one that ZeRO 3 has taken apart."""
    return getattr(parameter, "ds_numel", parameter.numel())


def master_values(parameters: Sequence[Tensor], grid: Grid) -> list[Tensor]:
    """The float32 value of each parameter of an engine with ZeRO, whole and in its shape.

    Every rank holds parts of them and calls this. All parts travel in one all-reduce; DeepSpeed's
    own function would take one for each parameter.
    """
    if not parameters:
        return []
    sizes = [parameter_size(parameter) for parameter in parameters]
    values = torch.zeros(sum(sizes), device=grid.device)
    for place, parameter in zip(values.split(sizes), parameters, strict=True):
        start, part = _own_part(parameter, grid.rank)
        part = part[: len(place) - start]  # ZeRO 3 pads the last part
        place[start : start + len(part)] = part
    whole = grid.sum(values)
    shaped = []
    for value, parameter in zip(whole.split(sizes), parameters, strict=True):
        # ZeRO 3 leaves an empty parameter, which remembers its shape.
        shape = getattr(parameter, "ds_shape", parameter.shape)
        shaped.append(value.view(shape))
    return shaped


def _own_part(parameter: Tensor, rank: int) -> tuple[int, Tensor]:
    """Where this rank's part of a parameter begins, and its float32 numbers, in one dimension."""
    if hasattr(parameter, "ds_id"):  # ZeRO 3: parts of one size, rank by rank
        from deepspeed.utils import safe_get_local_fp32_param

        part = safe_get_local_fp32_param(parameter).detach().flatten()
        return min(rank * len(part), parameter_size(parameter)), part
    mapping = parameter._hp_mapping  # pyright: ignore[reportAttributeAccessIssue]
    if mapping is None:  # all of it is on other ranks
        return 0, parameter.new_zeros(0, dtype=torch.float32)
    return mapping.lp_fragment_address.start, mapping.get_hp_fragment().detach().flatten()
