"""Checked options of layers."""

from collections.abc import Mapping
from typing import Any

from megatron.errors import UserError

WIDEST = 2**20  # features, or heads
WORDS = {int: f"a whole number from 1 to {WIDEST}", bool: "true or false", str: "a text"}


def chosen_options(model: Any, options: Mapping[str, type]) -> dict[str, Any]:
    """The options in `layer_args`, None if unset; UserError for a wrong type."""
    values = {name: model.layer_args.get(name) for name in options}
    for name, value in values.items():
        kind = options[name]
        fits = value is None or isinstance(value, kind)
        if not fits or (value is not None and kind is int and not 0 < value <= WIDEST):
            raise UserError(f"{name}: {value!r} is not {WORDS[kind]}")
    return values
