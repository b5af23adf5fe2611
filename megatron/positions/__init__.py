"""Positional encodings: one small file per family, found by being here."""

import importlib
import pkgutil

from megatron.positions.base import (
    ALIASES,
    REGISTRY,
    DistanceBias,
    Mixture,
    Position,
    Shape,
    at_least,
    build,
    options_of,
    positive,
    register,
    within,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "ALIASES",
    "REGISTRY",
    "DistanceBias",
    "Mixture",
    "Position",
    "Shape",
    "at_least",
    "build",
    "options_of",
    "positive",
    "register",
    "within",
]
