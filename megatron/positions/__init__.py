"""Positional encodings: one small file per family, found by being here."""

import importlib
import pkgutil

from megatron.positions.base import DistanceBias, Position, Shape, at_least, within
from megatron.positions.mixture import Mixture
from megatron.positions.registry import (
    ALIASES,
    FILES,
    REGISTRY,
    build,
    fingerprint,
    load_file,
    options_of,
    positive,
    register,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "ALIASES",
    "FILES",
    "REGISTRY",
    "DistanceBias",
    "Mixture",
    "Position",
    "Shape",
    "at_least",
    "build",
    "fingerprint",
    "load_file",
    "options_of",
    "positive",
    "register",
    "within",
]
