"""Read files and `key=value` words into plain dictionaries with underscored keys."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.config.schema import KEYS, SECTIONS
from megatron.errors import closest, in_words
from megatron.files import read_small
from megatron.strict_yaml import parse

MOST_BYTES = 200_000  # of one file; our largest has 5,000
OVERRIDE = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
SUFFIXES = ("", ".yml", ".yaml")
TEXT = (str, str | None)  # annotations of keys that hold a text
COMMENT = re.compile(r"(^|\s)#")


def is_override(word: str) -> bool:
    """Whether a command line word is `key=value` rather than a file name."""
    return OVERRIDE.fullmatch(word) is not None


def find_file(path: str | Path) -> Path:
    """The configuration file for `path`, with or without the suffix .yml.

    Raises ValueError that lists the names that were tried.
    """
    # os.path, not Path's methods: these raise for a name that is too long.
    for suffix in SUFFIXES:
        candidate = Path(f"{path}{suffix}")
        if os.path.isfile(candidate):
            return candidate
    if os.path.exists(path):
        raise ValueError(f"{path}: is not a file; name the files in it, or give it as -d {path}")
    folder = Path(path).parent
    match = closest(f"{Path(path).name}.yml", [file.name for file in folder.glob("*.y*ml")])
    hint = f"; did you mean {folder / match}?" if match else f", nor {path}.yml"
    raise ValueError(f"{path}: no such file{hint}")


def read_file(path: Path) -> dict[str, Any]:
    """One YAML file as a dictionary; raises ValueError if it cannot be read."""
    try:
        value = parse(read_small(path, MOST_BYTES).decode("utf-8"))
    except (OSError, UnicodeDecodeError) as fault:
        raise ValueError(
            f"{path}: cannot be read ({in_words(fault)});"
            f" name a YAML file in UTF-8, of at most {MOST_BYTES:,} bytes"
        ) from None
    except ValueError as fault:
        raise ValueError(f"{path}: {fault}") from None
    if not isinstance(value, dict | None):
        raise ValueError(f"{path}: must contain `key: value` lines, but contains {value!r:.80}")
    return value or {}


def read_overrides(words: Sequence[str], add_fault: Callable[[str], None]) -> dict[str, Any]:
    """`key=value` words as one dictionary; `a.b=1` turns `a` into a Nested with the entry `b`.

    add_fault is called with a message for each word that cannot be read.
    """
    settings: dict[str, Any] = {}
    for word in words:
        match = OVERRIDE.fullmatch(word)
        if match is None:
            add_fault(f"{word:.80}: is neither a file nor key=value")
            continue
        *parents, key = match[1].replace("-", "_").split(".")
        text = match[2]
        holds_text = not parents and key in KEYS
        holds_text = holds_text and SECTIONS[KEYS[key]].model_fields[key].annotation in TEXT
        is_plain = text[:1] not in "[{'\"" and text not in ("null", "~")
        try:
            # Folders are taken as they are: save="runs/a #2", save=1235, save="runs/a: b".
            is_text = is_plain and (holds_text or COMMENT.search(text))
            value = text if is_text else parse(text)
        except ValueError as fault:
            add_fault(f"{word:.80}: {fault}")
            continue
        inner = settings
        for part in parents:
            if not isinstance(inner.get(part), dict):
                inner[part] = Nested()
            inner = inner[part]
        inner[key] = value
    return settings


class Nested(dict):
    """A dictionary made from dotted words: it changes single entries of earlier sources."""


def merge(earlier: Any, later: Any) -> Any:
    """`earlier` updated by `later`: a Nested changes single entries, anything else replaces."""
    if not isinstance(later, Nested):
        return later
    merged = dict(earlier) if isinstance(earlier, dict) else {}
    for key, value in later.items():
        merged[key] = merge(merged.get(key), value)
    return merged
