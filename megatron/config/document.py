"""Keys in words, for configs/README.md and tools/explain_config.py."""

import re
import typing
from typing import Any

from megatron.config.schema import Key, plain
from megatron.strict_yaml import on_one_line


def description(key: Key) -> str:
    """The meaning of a key, on one line."""
    return one_line(key.info.description)


def first_sentence(key: Key) -> str:
    """What the meaning of a key begins with, without its full stop."""
    sentence, *_ = re.split(r"[.;](?: |$)", description(key))
    return sentence


def one_line(text: str | None) -> str:
    return " ".join((text or "").split())


def choices(annotation: Any) -> list[Any]:
    """The words that a type allows; empty for numbers and texts."""
    inner = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return list(inner)
    return [word for part in inner for word in choices(part)]


def shown(value: Any) -> str:
    """A value in YAML's spelling, and `unset` for null."""
    return "unset" if value is None else on_one_line(plain(value))
