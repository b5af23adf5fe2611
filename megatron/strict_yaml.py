"""YAML without its traps: plain values, no key twice."""

import re
from typing import Any

import yaml

from megatron.errors import in_words

TAG = "tag:yaml.org,2002:"
PLAIN = ("null", "bool", "int", "float", "str", "seq")
NO_COLON = re.compile(r" *\w(?!.*:( |$))")  # a line with a key alone, for YAML


class Loader(yaml.SafeLoader):
    """Only plain values; 6e-4 is a number, and no key of a mapping has two values."""

    def mapping(self, node: yaml.MappingNode) -> dict[str, Any]:
        """A mapping with `_` for the `-` of its keys; its own keys win over those of `<<`."""
        entries: dict[str, tuple[Any, int]] = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value).replace("-", "_"), key_node.start_mark.line + 1
            value, first_line = entries.setdefault(key, (value_node.value, line))
            if value != value_node.value:
                problem = f"{key} appears twice, in lines {first_line} and {line}; remove one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
        values = self.construct_mapping(node, deep=True)
        return {str(key).replace("-", "_"): value for key, value in values.items()}


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


def parse(text: str) -> Any:
    """The value of one YAML text: numbers, texts, booleans, null, lists and mappings.

    Raises ValueError, with the line, if there is anything else in it or if it is not YAML.
    """
    try:
        return yaml.load(text, Loader)
    except RecursionError:
        problem = "values are nested too deeply"
    except yaml.MarkedYAMLError as fault:
        problem = str(fault.problem)
        if fault.problem_mark is not None:
            problem = f"line {_line(fault, fault.problem_mark, text)}: {problem}"
    except (yaml.YAMLError, ValueError) as fault:
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
