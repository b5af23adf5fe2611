"""A small configuration for tests of single keys, and its faults."""

from pathlib import Path

import pytest
import yaml

from megatron.config import Config, load
from megatron.errors import UserError

FAULTS = yaml.safe_load(Path(__file__).with_name("faults.yml").read_text(encoding="utf-8"))
SIZES = ["num_layers=2", "hidden_size=96", "num_attention_heads=12", "seq_length=64"]


def loaded(*words: str) -> Config:
    """A small configuration with these key=value words."""
    return load([], [*SIZES, *words])


def faults(*words: str, paths: tuple[Path, ...] = ()) -> list[str]:
    """The lines of what is wrong with a small configuration with these words and files."""
    with pytest.raises(UserError) as raised:
        load(paths, [*SIZES, *words])
    head, *lines = str(raised.value).split("\n  ")
    assert head.startswith("bad configuration (")
    return lines


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
