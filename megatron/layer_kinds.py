"""Kinds of layers by their names in the YAML key `layers`, and packages that add more."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar

from torch import nn

from megatron.errors import UserError, did_you_mean

ATTENTION = "attention"
LAYERS: dict[str, type["Layer"]] = {}
"""All imported kinds, by name."""


class Layer(nn.Module):
    """The module of a block that may replace attention.

    It is called with x [batch, length, hidden] and `LayerInputs`, and returns the same, or the last
    tokens of it. `model` is always the section `model` of a configuration, or the `Architecture`
    that has the same names.

    has_encoding: whether the layer has an encoding and a window; if so, it is an `Attention`
    options: YAML keys that it accepts in addition to those of every model, with their types;
        `model.layer_args` has those that are set
    """

    has_encoding: ClassVar[bool] = False
    options: ClassVar[Mapping[str, type]] = {}

    @classmethod
    def sizes(cls, model: Any) -> dict[str, Any]:
        """All its options, including unset ones; UserError if they don't fit."""
        return {}

    def operations(self, keys: float) -> float:
        """Operations of a token that reads this many keys, without those of matrices."""
        raise NotImplementedError


def register_layer(name: str) -> Callable[[type], type]:
    """Register a class as `layers: name`."""

    def add(kind: type) -> type:
        LAYERS[name] = kind
        return kind

    return add


def layer_called(name: str) -> Any:
    """The class of a kind, after importing its package if needed; UserError if there is none.

    Other packages add kinds with the entry point group `megatron.layers`.
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
    """Names of the options that layers of these kinds accept."""
    return {option for name in names for option in layer_called(name).options}


def load_installed(group: str, name: str) -> None:
    """Import what installed packages offer under a name; the import registers it."""
    for entry in entry_points(group=group, name=name):
        entry.load()
