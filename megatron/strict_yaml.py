"""YAML without its traps: plain values, no key twice, no bomb of aliases, nothing too deep."""

import json
import math
import re
from typing import Any

import yaml

from megatron.errors import in_words

MOST_VALUES = 5_000  # of one file, with every alias written out
TAG = "tag:yaml.org,2002:"
PLAIN = ("null", "bool", "int", "float", "str", "seq")
NO_COLON = re.compile(r" *\w(?!.*:( |$))")  # a line with a key alone, for YAML


class Loader(yaml.SafeLoader):
    """Plain values alone, 6e-4 is a number, and no key of a mapping has two values."""

    def construct_scalar(self, node: yaml.ScalarNode) -> str:
        """A text in which the two escapes that JSON writes for an emoji are one character."""
        text = super().construct_scalar(node)
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        """A mapping with `_` for the `-` of its keys; its own keys win over those of `<<`."""
        direct = [pair for pair in node.value if pair[0].tag != f"{TAG}merge"]
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
            if pair in direct:
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


def written_out(node: yaml.Node, counts: dict[int, float]) -> float:
    """How many values a node stands for, with every alias written out: nine lines can be a billion.

    known: the counts so far, by the identity of a node; one that holds itself is infinite
    """
    identity = id(node)
    if identity not in counts:
        counts[identity] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in parts for part in pair]
        counts[identity] = 1 + sum(written_out(part, counts) for part in parts)
    return counts[identity]


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
            problem = f"line {_line(fault, fault.problem_mark, text)}: {problem}"
    except (yaml.YAMLError, ValueError, KeyError, IndexError, OverflowError) as fault:
        problem = in_words(fault)
    raise ValueError(f"not valid YAML ({problem})")


def _line(fault: yaml.MarkedYAMLError, mark: yaml.Mark, text: str) -> int:
    """The line of a fault. PyYAML's mark is below it for a key without `: ` or an open bracket."""
    problem = str(fault.problem)
    if fault.context == "while scanning a simple key" or "stream" in problem:
        mark = fault.context_mark or mark
    line = mark.line
    if problem.startswith(("mapping values", "expected '<document start>'")):
        above = enumerate(text.splitlines()[:line])
        line = max((number for number, words in above if NO_COLON.match(words)), default=line)
    return line + 1


def on_one_line(value: Any) -> str:
    """A plain value in YAML, on one line."""
    text = yaml.safe_dump(
        value, default_flow_style=True, width=10**6, sort_keys=False, allow_unicode=True
    )
    return text.removesuffix("...\n").strip()
