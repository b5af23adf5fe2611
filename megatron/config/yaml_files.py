"""From files and `key=value` words to plain dictionaries with underscored keys."""

import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron.config.messages import shortened
from megatron.config.schema import KEYS, SECTIONS
from megatron.errors import closest, in_words
from megatron.files import read_small

MOST_BYTES = 200_000  # of one file; the largest shipped one has 5,000
MOST_VALUES = 5_000  # of one file, with every alias written out
OVERRIDE = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
SUFFIXES = ("", ".yml", ".yaml")
TEXT = (str, str | None)  # annotations of keys that hold a text
TAG = "tag:yaml.org,2002:"
PLAIN = ("null", "bool", "int", "float", "str", "seq")


class Loader(yaml.SafeLoader):
    """Plain values alone, 6e-4 is a number, and no key of a mapping has two values."""

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        """A mapping with `_` for the `-` of its keys; its own keys win over those of `<<`."""
        own = [pair for pair in node.value if pair[0].tag != f"{TAG}merge"]
        self.flatten_mapping(node)
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for pair in node.value:
            key_node, value_node = pair
            key = str(self.construct_object(key_node, deep=True)).replace("-", "_")
            value = self.construct_object(value_node, deep=True)
            line = key_node.start_mark.line + 1
            if key in lines and values[key] != value:
                problem = (
                    f"{key} is given twice, in lines {lines[key]} and {line}; keep one of them"
                )
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            values[key] = value
            if pair in own:
                lines.setdefault(key, line)
        return values


Loader.yaml_constructors = {
    f"{TAG}{kind}": yaml.SafeLoader.yaml_constructors[f"{TAG}{kind}"] for kind in PLAIN
} | {
    None: yaml.SafeLoader.construct_undefined,
    f"{TAG}timestamp": yaml.SafeLoader.construct_yaml_str,
    f"{TAG}map": Loader.mapping,
}
Loader.add_implicit_resolver(
    f"{TAG}float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def written_out(node: yaml.Node, known: dict[int, float]) -> float:
    """How many values a node stands for, with every alias written out: nine lines can be a billion.

    known: the counts so far, by the identity of a node; one that holds itself is infinite
    """
    identity = id(node)
    if identity not in known:
        known[identity] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        known[identity] = 1 + sum(written_out(part, known) for part in parts)
    return known[identity]


def parse(text: str) -> Any:
    """The value of one YAML text: numbers, texts, booleans, null, lists and mappings.

    Raises ValueError, with the line, if there is anything else in it or if it is not YAML.
    """
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if written_out(node, {}) > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} values, aliases written out")
        value = loader.construct_document(node)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is a fault
        return value
    except RecursionError:
        problem = "values lie too deep"
    except yaml.MarkedYAMLError as fault:
        problem = str(fault.problem)
        if fault.problem_mark is not None:
            problem = f"line {fault.problem_mark.line + 1}: {problem}"
    except (yaml.YAMLError, ValueError, KeyError, IndexError, OverflowError) as fault:
        problem = in_words(fault)
    raise ValueError(f"not valid YAML ({problem})")


def is_override(word: str) -> bool:
    """Whether a word of the command line is `key=value` rather than the name of a file."""
    return OVERRIDE.fullmatch(word) is not None


def find_file(path: str | Path) -> Path:
    """The configuration file that `path` means, with or without its .yml.

    Raises ValueError with the names that were tried.
    """
    # os.path, not Path's methods: these raise for a name that is too long.
    for suffix in SUFFIXES:
        candidate = Path(f"{path}{suffix}")
        if os.path.isfile(candidate):
            return candidate
    if os.path.exists(path):
        raise ValueError(f"{path}: is no file; name the files of a folder, or give it as -d {path}")
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
        raise ValueError(f"{path}: holds no `key: value` lines, but {shortened(repr(value))}")
    return value or {}


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
        *parents, key = match[1].replace("-", "_").split(".")
        try:
            value = parse(match[2])
        except ValueError as fault:
            add_fault(f"{shortened(word)}: {fault}")
            continue
        inner = given
        for part in parents:
            if not isinstance(inner.get(part), dict):
                inner[part] = Nested()
            inner = inner[part]
        info = None
        if inner is given and key in KEYS:
            info = SECTIONS[KEYS[key]].model_fields[key]
        if info is not None and info.annotation in TEXT and isinstance(value, int | float):
            value = match[2]  # save=1235 names a folder
        inner[key] = value
    return given


class Nested(dict):
    """A dictionary made of dotted words: it changes single entries of earlier sources."""


def merge(earlier: Any, later: Any) -> Any:
    """`earlier` as `later` changes it: a Nested changes single entries, all else replaces."""
    if not isinstance(later, Nested):
        return later
    merged = dict(earlier) if isinstance(earlier, dict) else {}
    for key, value in later.items():
        merged[key] = merge(merged.get(key), value)
    return merged
