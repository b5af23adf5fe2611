"""A small configuration for tests of single keys, and what is wrong with it."""

import pytest

from megatron.config import Config, load
from megatron.errors import UserError

SIZES = ["num_layers=2", "hidden_size=96", "num_attention_heads=12", "seq_length=64"]


def loaded(*words: str) -> Config:
    """A small configuration with these key=value words."""
    return load([], [*SIZES, *words])


def fault(*words: str) -> str:
    """The one line of what is wrong with a small configuration with these words."""
    with pytest.raises(UserError) as raised:
        loaded(*words)
    [line] = str(raised.value).split("\n  ")[1:]
    return line
