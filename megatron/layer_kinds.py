"""Kinds of layers by their names in the YAML key `layers`, and packages that bring more of them."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar

from torch import nn

from megatron.errors import UserError, did_you_mean

ATTENTION = "attention"
LAYERS: dict[str, type["Layer"]] = {}
"""Every kind that was imported, by its name."""


class Layer(nn.Module):
    """What stands in a block in the place of attention.

    It is called with x [batch, length, hidden] and `LayerInputs`, and returns the same, or the last
    tokens of it. `model` is always the section `model` of a configuration, or the `Architecture`
    that has the same names.

    has_encoding: whether the layer has an encoding and a window; then it is an `Attention`
    options: keys of YAML that it takes beside those of every model, and their types;
        `model.layer_args` has those that are set
    """

    has_encoding: ClassVar[bool] = False
    options: ClassVar[Mapping[str, type]] = {}

    @classmethod
    def sizes(cls, model: Any) -> dict[str, Any]:
        """All its options, also where they are not set; UserError if they do not fit."""
        return {}

    def operations(self, keys: float) -> float:
        """Operations of a token that reads so many keys, beside those of matrices."""
        raise NotImplementedError


def register_layer(name: str) -> Callable[[type], type]:
    """Make a class known as `layers: name`."""

    def add(kind: type) -> type:
        LAYERS[name] = kind
        return kind

    return add


def layer_called(name: str) -> Any:
    """The class of a kind, whose package is imported if it is not yet; UserError if there is none.

    Others bring kinds by the group `megatron.layers` of entry points.
    """
    for package in ("megatron.model", "megatron.hybrids"):
        if name not in LAYERS:
            import_module(package)
    if name not in LAYERS:
        load_installed("megatron.layers", name)
    if name not in LAYERS:
        hint = did_you_mean(name, LAYERS) or f"choose from {', '.join(sorted(LAYERS))}"
        raise UserError(f"layers: no layer is called {name!r}; {hint}")
    return LAYERS[name]


def options_of_layers(names: Iterable[str]) -> set[str]:
    """Names of the options that layers of these kinds take."""
    return {option for name in names for option in layer_called(name).options}


def load_installed(group: str, name: str) -> None:
    """Import what installed packages offer under a name, which then registers itself."""
    for entry in entry_points(group=group, name=name):
        entry.load()
