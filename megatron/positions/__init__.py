"""Positional encodings: one small file per family; every file in this folder is imported here."""

import importlib
import pkgutil

from megatron.positions.base import DistanceBias, Position, Shape
from megatron.positions.mep import Mixture
from megatron.positions.precision import at_least_float32, within, without_autocast
from megatron.positions.registry import (
    ALIASES,
    FILES,
    LARGEST_USER_FILE,
    REGISTRY,
    build,
    encodings,
    fingerprint,
    load_file,
    options_of,
    positive,
    register,
    syntax_fingerprint,
)

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "ALIASES",
    "FILES",
    "LARGEST_USER_FILE",
    "REGISTRY",
    "DistanceBias",
    "Mixture",
    "Position",
    "Shape",
    "at_least_float32",
    "build",
    "encodings",
    "fingerprint",
    "load_file",
    "options_of",
    "positive",
    "register",
    "syntax_fingerprint",
    "within",
    "without_autocast",
]
