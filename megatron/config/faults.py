"""From pydantic's findings to lines that say what to write instead."""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ValidationError

WHY = {
    "attention_dropout": "the attention backends compute no dropout on probabilities",
    "pipe_parallel_size": "pipeline stages are not offered yet",
    "model_parallel_size": "tensor parallelism is not offered yet",
    "norm": "other normalisations are not offered",
    "activation": "other activations are not offered",
    "init_method": "other initialisations are not offered",
    "optimizer.type": "other optimizers are not offered",
}
EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a text; put it in quotes",
    "dict_type": "a mapping such as {key: value}",
    "model_type": "a mapping such as {key: value}",
    "tuple_type": "a list",
    "finite_number": "a finite number",
}
BOUNDS = {
    "greater_than": ("gt", ">"),
    "greater_than_equal": ("ge", ">="),
    "less_than": ("lt", "<"),
    "less_than_equal": ("le", "<="),
}


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """The known name that looks most like the wrong one, or nothing."""
    close = difflib.get_close_matches(wrong, list(known), n=1, cutoff=0.7)
    return close[0] if close else ""


def unknown(key: str, known: Iterable[str]) -> str:
    """The line about a key that does not exist."""
    names = list(known)
    nested = [name for name in names if name.endswith(f".{key}")]
    close = nested[0] if nested else suggestion(key, names)
    return f"{key}: no such key" + (
        f"; did you mean {close}?" if close else "; configs/README.md lists all keys"
    )


def lines(section: type[BaseModel], found: ValidationError) -> list[str]:
    """One line per finding, with the key as it is written in YAML."""
    return [_line(section, error) for error in found.errors(include_url=False)]


def _line(section: type[BaseModel], error: Any) -> str:
    path = [str(part) for part in error["loc"] if not isinstance(part, int)]
    key, kind, got = ".".join(path), error["type"], error.get("input")
    if kind == "missing":
        return f"{key}: not given, and every model needs it"
    if kind == "extra_forbidden":
        parent = ".".join(path[:-1])
        return unknown(
            key, [f"{parent}.{name}" for name in _model_at(section, path[:-1]).model_fields]
        )
    why = f"; {WHY[key]}" if key in WHY else ""
    return f"{key}: must be {_expected(error)}, got {_shown(got)}{why}"


def _expected(error: Any) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "")
    if kind in BOUNDS:
        name, sign = BOUNDS[kind]
        return f"{sign} {context[name]:g}"
    if kind in ("too_short", "too_long"):
        bound = context.get("min_length", context.get("max_length"))
        return f"a list of {'at least' if kind == 'too_short' else 'at most'} {bound}"
    return EXPECTED.get(kind, str(error["msg"]))


def _shown(value: Any) -> str:
    return (
        "nothing"
        if value is None
        else str(value).lower()
        if isinstance(value, bool)
        else repr(value)
    )


def _model_at(section: type[BaseModel], path: list[str]) -> type[BaseModel]:
    """The pydantic model of a nested key such as optimizer.params."""
    for key in path:
        inner = section.model_fields[key].annotation
        assert isinstance(inner, type), path
        section = inner
    return section
