"""From files and `key=value` words to plain dictionaries with underscored keys."""

import errno
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.config.faults import shortened
from megatron.config.safe_yaml import (
    DEEPEST,
    MOST_BYTES,
    line,
    parse,
    parse_with_keys,
    problem,
)
from megatron.config.schema import KEYS, SECTIONS
from megatron.errors import closest
from megatron.files import read_small

OVERRIDE = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
SUFFIXES = ("", ".yml", ".yaml")
TEXT = (str, str | None)  # annotations of keys that hold a text


def is_override(word: str) -> bool:
    """Whether a word of the command line is `key=value` rather than the name of a file."""
    return OVERRIDE.fullmatch(word) is not None


def find_file(path: str | Path) -> Path:
    """The configuration file that `path` means, with or without its .yml.

    Raises ValueError with the names that were tried.
    """
    # os.path, not Path's methods: these raise for a name that is too long.
    tried = [Path(f"{path}{suffix}") for suffix in SUFFIXES]
    for candidate in tried:
        if os.path.isfile(candidate):
            return candidate
    plain, with_suffix = tried[:2]
    if os.path.isdir(plain):
        raise ValueError(f"{path}: is a folder; name the files in it, or give it as -d {path}")
    if os.path.exists(plain):
        raise ValueError(f"{path}: is a pipe or a device; give a file on a disk")
    match = closest(with_suffix.name, _neighbours(plain))
    if match is None:
        raise ValueError(f"{path}: no such file, nor {with_suffix}")
    raise ValueError(f"{path}: no such file; did you mean {plain.parent / match}?")


def _neighbours(path: Path) -> list[str]:
    """YAML files in the folder of a path."""
    try:
        names = sorted(os.listdir(path.parent))
    except (OSError, ValueError):
        return []
    yaml_names = [name for name in names if name.endswith((".yml", ".yaml"))]
    return [name for name in yaml_names if os.path.isfile(path.parent / name)]


def read_file(path: Path) -> dict[str, Any]:
    """One YAML file as a dictionary; ValueError with the line where it cannot be read."""
    try:
        value, twice = parse_with_keys(read_text(path))
    except yaml.YAMLError as fault:
        number = line(fault)
        where = str(path) if number is None else f"{path}:{number}"
        raise ValueError(f"{where}: not valid YAML: {problem(fault)}") from None
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {_kind(value)} where `key: value` lines are expected")
    if twice is not None:
        raise ValueError(
            f"{path}:{twice.line}: {twice.key} is given twice, in lines {twice.first_line} and"
            f" {twice.line}; keep one of them"
        )
    return underscored(value)


def read_text(path: Path) -> str:
    """A configuration file's text; ValueError where it is not a file of text, or a huge one."""
    try:
        content = read_small(path, MOST_BYTES)
    except OSError as fault:
        if fault.errno == errno.EFBIG:
            raise ValueError(
                f"{path}: has more than {MOST_BYTES:,} bytes;"
                " is it the configuration that you mean?"
            ) from None
        reason = fault.strerror
        raise ValueError(f"{path}: cannot be read ({reason}); name another file") from None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise ValueError(
            f"{path}: cannot be read: byte {fault.start} is not text in UTF-8;"
            " name a YAML file, or save it as UTF-8"
        ) from None


def read_overrides(words: Sequence[str], add_fault: Callable[[str], None]) -> dict[str, Any]:
    """`key=value` words as one dictionary; `a.b=1` makes `a` a Nested with the entry `b`.

    add_fault takes a message for each word that cannot be read.
    """
    given: dict[str, Any] = {}
    for word in words:
        match = OVERRIDE.fullmatch(word)
        if match is None:
            add_fault(f"{shortened(word)}: is neither a file nor key=value")
            continue
        path, text = match[1].replace("-", "_").split("."), match[2]
        if len(path) > DEEPEST:
            add_fault(f"{shortened(match[1])}: has {len(path)} parts; no key has that many")
            continue
        try:
            value = underscored(parse(text))
        except yaml.YAMLError as fault:
            add_fault(f"{shortened(word)}: not valid YAML: {problem(fault)}")
            continue
        is_scalar = not isinstance(value, (str, list, dict, type(None)))
        if len(path) == 1 and is_scalar and _holds_text(path[0]):
            value = text  # save=1235 names a folder
        _place(given, path, value)
    return given


class Nested(dict):
    """A dictionary made of dotted words: it changes single entries of earlier sources."""


def _place(given: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        inner = given.get(key)
        if not isinstance(inner, dict):
            inner = given[key] = Nested()
        given = inner
    given[path[-1]] = value


def merge(earlier: Any, later: Any) -> Any:
    """What `later` makes of `earlier`: a Nested changes single entries, all else replaces."""
    if not isinstance(later, Nested):
        return later
    merged = dict(earlier) if isinstance(earlier, dict) else {}
    for key, value in later.items():
        merged[key] = merge(merged.get(key), value)
    return merged


def underscored(value: Any) -> Any:
    """Keys with `-` become keys with `_`, at every depth."""
    if isinstance(value, dict):
        return {str(key).replace("-", "_"): underscored(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [underscored(inner) for inner in value]
    return value


def _holds_text(key: str) -> bool:
    return key in KEYS and SECTIONS[KEYS[key]].model_fields[key].annotation in TEXT


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "a text"
    return f"the value {value!r}"
