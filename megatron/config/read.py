"""From files and `key=value` words to plain dictionaries with underscored keys."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.config.schema import KEYS, SECTIONS
from megatron.errors import closest

OVERRIDE = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
SUFFIXES = ("", ".yml", ".yaml")
TEXT = (str, str | None)  # annotations of keys that hold a text


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads 6e-4 as a number, which YAML 1.1 takes for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def is_override(word: str) -> bool:
    """Whether a word of the command line is `key=value` rather than the name of a file."""
    return OVERRIDE.fullmatch(word) is not None


def find_file(path: str | Path) -> Path:
    """The configuration file that `path` means, with or without its .yml.

    Raises ValueError with the names that were tried.
    """
    tried = [Path(f"{path}{suffix}") for suffix in SUFFIXES]
    for candidate in tried:
        if candidate.is_file():
            return candidate
    plain, with_suffix = tried[:2]
    if plain.is_dir():
        raise ValueError(f"{path}: is a folder; name the files in it, or give it as -d {path}")
    neighbours = [file.name for file in sorted(plain.parent.glob("*.y*ml"))]
    match = closest(with_suffix.name, neighbours)
    if match is None:
        raise ValueError(f"{path}: no such file, nor {with_suffix}")
    raise ValueError(f"{path}: no such file; did you mean {plain.parent / match}?")


def read_file(path: Path) -> dict[str, Any]:
    """One YAML file as a dictionary; ValueError with the line where it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ValueError(f"{path}: cannot be read: {fault}") from None
    try:
        node = yaml.compose(text, Loader=_Loader)
        value = {} if node is None else parse(text)
    except yaml.YAMLError as fault:
        mark = getattr(fault, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ValueError(f"{where}: not valid YAML: {_problem(fault)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds {_kind(value)} where `key: value` lines are expected")
    if isinstance(node, yaml.MappingNode):
        _refuse_duplicates(path, node)
    return underscored(value)


def parse(text: str) -> Any:
    """The value of one YAML text."""
    # Our loader is a SafeLoader: it makes numbers, texts, lists and mappings, never objects.
    return yaml.load(text, Loader=_Loader)


def _refuse_duplicates(path: Path, node: yaml.MappingNode) -> None:
    """ValueError if one mapping gives a key two values; YAML would keep the last in silence."""
    earlier: dict[str, tuple[int, str]] = {}
    for key, value in node.value:
        if isinstance(value, yaml.MappingNode):
            _refuse_duplicates(path, value)
        name = str(key.value).replace("-", "_")
        line = key.start_mark.line + 1
        content = yaml.serialize(value)
        if name in earlier and earlier[name][1] != content:
            first_line = earlier[name][0]
            raise ValueError(
                f"{path}:{line}: {name} is given twice, in lines {first_line} and {line};"
                " keep one of them"
            )
        earlier[name] = (line, content)


def read_overrides(words: Sequence[str], add_fault: Callable[[str], None]) -> dict[str, Any]:
    """`key=value` words as one dictionary; `a.b=1` makes `a` a Nested with the entry `b`.

    add_fault takes a message for each word that cannot be read.
    """
    given: dict[str, Any] = {}
    for word in words:
        match = OVERRIDE.fullmatch(word)
        if match is None:
            add_fault(f"{word}: is neither a file nor key=value")
            continue
        path, text = match[1].replace("-", "_").split("."), match[2]
        try:
            value = underscored(parse(text))
        except yaml.YAMLError as fault:
            add_fault(f"{word}: not valid YAML: {_problem(fault)}")
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


def _problem(fault: yaml.YAMLError) -> str:
    return str(getattr(fault, "problem", None) or fault)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    if isinstance(value, str):
        return "a text"
    return f"the value {value!r}"
