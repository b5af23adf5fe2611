"""YAML that may come from anywhere: bounded before it is built, and plain values only."""

import re
from typing import Any, NamedTuple

import yaml

from megatron.errors import visible

MOST_BYTES = 200_000  # of one file; the largest shipped one has 5,000
MOST_VALUES = 5_000  # of one text, with every alias written out
DEEPEST = 50
TEXT = "tag:yaml.org,2002:str"
LONGEST_NUMBER = 100  # characters; Python itself refuses to print numbers of 4300 digits


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads 6e-4 as a number, counts what it builds, and knows no dates.

    Aliases are counted as often as they are used: nine lines can stand for a billion values.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.values = 0
        self.open: list[str | None] = []  # anchors of the values around the one that is read
        self.values_of: dict[str, int] = {}  # by anchor

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        anchor = event.anchor
        if isinstance(event, yaml.AliasEvent):
            if anchor in self.open:
                raise _refused(event, f"*{anchor} stands inside &{anchor} itself")
            self._count(event, self.values_of.get(anchor, 0))
            return super().compose_node(parent, index)
        if len(self.open) == DEEPEST:
            raise _refused(event, f"values lie deeper than {DEEPEST} levels")
        before = self.values
        self._count(event, 1)
        self.open.append(anchor)
        node = super().compose_node(parent, index)
        self.open.pop()
        if anchor is not None:
            self.values_of[anchor] = self.values - before
        return node

    def _count(self, event: yaml.Event, values: int) -> None:
        self.values += values
        if self.values > MOST_VALUES:
            raise _refused(event, f"more than {MOST_VALUES} values, aliases written out")

    def number(self, node: yaml.ScalarNode) -> Any:
        if len(node.value) > LONGEST_NUMBER:
            raise _refused(node, f"a number of {len(node.value)} characters")
        try:
            if node.tag.endswith(":int"):
                return self.construct_yaml_int(node)
            return self.construct_yaml_float(node)
        except (ValueError, IndexError, OverflowError):
            raise _refused(node, f"{node.value!r} is not a number") from None

    def boolean(self, node: yaml.ScalarNode) -> bool:
        if node.value.lower() not in self.bool_values:
            raise _refused(node, f"{node.value!r} is not true or false")
        return self.bool_values[node.value.lower()]

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Merge what `<<` names, then take each key as the text that is written.

        1 and true would be one key of a dictionary.
        """
        super().flatten_mapping(node)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                key.tag = TEXT

    def text(self, node: yaml.ScalarNode) -> str:
        text = self.construct_yaml_str(node)
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise _refused(node, "half of a surrogate pair, which is no character")
        if visible(text) != text:
            raise _refused(node, f"a control character in {ascii(text)[:60]}")
        return text


def _refused(where: yaml.Event | yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=where.start_mark)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
# A date is text: no key holds dates, and a folder may be called 2024-01-31.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    f"tag:yaml.org,2002:{kind}": yaml.SafeLoader.yaml_constructors[f"tag:yaml.org,2002:{kind}"]
    for kind in ("null", "seq", "map")
} | {None: yaml.SafeLoader.construct_undefined}
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.number)
_Loader.add_constructor("tag:yaml.org,2002:bool", _Loader.boolean)
_Loader.add_constructor(TEXT, _Loader.text)


class Twice(NamedTuple):
    """A key with two values in one mapping, and the lines that give them, from 1."""

    key: str
    first_line: int
    line: int


def parse(text: str) -> Any:
    """The value of one YAML text; yaml.YAMLError where it has none."""
    return parse_with_keys(text)[0]


def parse_with_keys(text: str) -> tuple[Any, Twice | None]:
    """The value of one YAML text, and the first key that one mapping gives two values.

    Only numbers, texts, booleans, null, lists and mappings are made. Raises yaml.YAMLError for a
    text with anything else, for one that is not YAML and for one that is too large when built.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        twice = _twice(node)  # before keys are merged
        return loader.construct_document(node), twice
    finally:
        loader.dispose()


def _twice(node: yaml.Node) -> Twice | None:
    if isinstance(node, yaml.SequenceNode):
        inner = node.value
    elif isinstance(node, yaml.MappingNode):
        found = _twice_here(node)
        if found is not None:
            return found
        inner = [value for _, value in node.value]
    else:
        return None
    for value in inner:
        found = _twice(value)
        if found is not None:
            return found
    return None


def _twice_here(node: yaml.MappingNode) -> Twice | None:
    """A key of this mapping; YAML would keep its last value in silence."""
    earlier: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in node.value:
        name = str(key.value).replace("-", "_")
        first = earlier.setdefault(name, (key, value))
        if first[1] is not value and yaml.serialize(first[1]) != yaml.serialize(value):
            return Twice(name, first[0].start_mark.line + 1, key.start_mark.line + 1)
    return None


def problem(fault: yaml.YAMLError) -> str:
    """What is wrong with a YAML text, in one line."""
    if isinstance(fault, yaml.MarkedYAMLError) and fault.problem:
        return fault.problem
    return str(fault).splitlines()[0]


def line(fault: yaml.YAMLError) -> int | None:
    """The line of a fault, from 1; None where it is not known."""
    mark = getattr(fault, "problem_mark", None)
    return None if mark is None else mark.line + 1
