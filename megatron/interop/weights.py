"""The weights of a model under Hugging Face's names and under ours, in both directions."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from megatron.errors import UserError
from megatron.interop.family import Family
from megatron.interop.forms import Form, Same
from megatron.model import Architecture


def read_weights(
    family: Family, theirs: dict[str, Tensor], wanted: Mapping[str, Tensor], model: Architecture
) -> dict[str, Tensor]:
    """The weights of our model from theirs, each of which is taken out of `theirs`.

    wanted: our names, with tensors of the shapes that they must have
    UserError, with all of them, for weights that are missing or have another shape.
    """
    found: dict[str, Tensor] = {}
    faults = []
    for ours, modules, form in _all_places(family, model):
        for kind in ("weight", "bias"):
            name = f"{ours}.{kind}"
            if name not in wanted:
                continue
            names = [f"{module}.{kind}" for module in modules]
            absent = [one for one in names if one not in theirs]
            if absent:
                faults.append(f"{', '.join(absent)} missing")
                continue
            parts = [theirs.pop(one) for one in names]
            whole_numbers = [one for one in parts if not one.is_floating_point()]
            if whole_numbers:
                faults.append(f"{', '.join(names)} of {whole_numbers[0].dtype}")
                continue
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            try:
                found[name] = form.ours(parts, model).contiguous()
            except RuntimeError:
                faults.append(f"{', '.join(names)} {shapes} do not fit together")
                continue
            if found[name].shape != wanted[name].shape:
                expected = [list(one.shape) for one in form.theirs(wanted[name], model)]
                expected_shapes = ", ".join(map(str, expected))
                faults.append(f"{', '.join(names)} {shapes}, not {expected_shapes}")
    missing = wanted.keys() - found.keys()
    if missing and not faults:
        faults.append(f"nothing holds {', '.join(sorted(missing))}")
    if faults:
        raise UserError("; ".join(faults[:8]))
    return found


def write_weights(
    family: Family, ours: Mapping[str, Tensor], model: Architecture
) -> dict[str, Tensor]:
    """Their weights, under the names of their files, from those of our model."""
    found: dict[str, Tensor] = {}
    for name, modules, form in _all_places(family, model):
        for kind in ("weight", "bias"):
            if f"{name}.{kind}" not in ours:
                continue
            parts = form.theirs(ours[f"{name}.{kind}"], model)
            for module, part in zip(modules, parts, strict=True):
                found[f"{module}.{kind}"] = part.contiguous()
    return found


def _all_places(family: Family, model: Architecture) -> Iterator[tuple[str, tuple[str, ...], Form]]:
    """`places` with their full names, and the output matrix."""
    for ours, theirs, form in family.places(model.num_layers):
        yield ours, tuple(family.trunk + name for name in theirs), form
    yield "final_linear", family.head[:1], Same()
