"""Every encoding by its name in the YAML key `pos_emb`, and how one is built from its options."""

import difflib
import hashlib
import inspect
import math
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import UserError
from megatron.positions.base import Position, Shape

REGISTRY: dict[str, type[Position]] = {}
"""Every encoding by its name in the YAML key `pos_emb`."""

ALIASES: dict[str, str] = {}
"""Names used by the GPT-NeoX forks, and ours for the same thing."""

FILES: dict[str, str] = {}
"""The users' own files that were loaded: path by fingerprint of the text."""


def register(name: str, *, aliases: Sequence[str] = ()) -> Callable[[type], type]:
    """Make a class known as `pos_emb: name`; `aliases` are the forks' spellings of it."""

    def add(encoding: type) -> type:
        taken = {name, *aliases} & (REGISTRY.keys() | ALIASES.keys())
        if taken:
            raise ValueError(
                f"{encoding.__name__}: the name {sorted(taken)[0]!r} is taken by another encoding; choose another"
            )
        REGISTRY[name] = encoding
        ALIASES.update(dict.fromkeys(aliases, name))
        return encoding

    return add


def load_file(path: str | Path) -> str:
    """Register the encodings of a user's own Python file by running it, as an import would: its text.

    UserError where it cannot be read or run, registers nothing, or takes a name that is taken. A text runs once.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        why = getattr(fault, "strerror", None) or "it is not text"
        raise UserError(
            f"pos_emb_file: {path} cannot be read ({why}); give the path of a Python file"
        ) from None
    digest = fingerprint(text)
    if digest in FILES:
        return text
    if Path(path).resolve() in (Path(known).resolve() for known in FILES.values()):
        raise UserError(
            f"pos_emb_file: {path} was changed after this process had loaded it; start again"
        )
    before = dict(REGISTRY), dict(ALIASES)
    try:
        _run(text, str(path), f"pos_emb_file_{digest[:12]}")
        if REGISTRY.keys() == before[0].keys():
            raise UserError(
                f'pos_emb_file: {path} registers no encoding; put @register("its_name") above the class'
            )
    except UserError:
        REGISTRY.clear()
        REGISTRY.update(before[0])
        ALIASES.clear()
        ALIASES.update(before[1])
        raise
    FILES[digest] = str(path)
    return text


def fingerprint(text: str) -> str:
    """The sha256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def _run(text: str, path: str, name: str) -> None:
    """Run a file's text as the module `name`; UserError with the line of the file where it fails."""
    module = types.ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # where dataclasses and inspect look for the names of a class
    try:
        exec(compile(text, path, "exec"), module.__dict__)
    except SyntaxError as fault:
        raise UserError(
            f"pos_emb_file: {path}:{fault.lineno} is not valid Python ({fault.msg})"
        ) from None
    except Exception as fault:
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(fault.__traceback__)
            if frame.filename == path
        ]
        where = f"{path}:{lines[-1]}" if lines else path
        raise UserError(
            f"pos_emb_file: {where} stops with {type(fault).__name__}: {fault}"
        ) from None


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """The keyword options that the encoding `name` takes."""
    parameters = inspect.signature(encoding_called(name).__init__).parameters
    return {
        key: value
        for key, value in parameters.items()
        if value.kind is inspect.Parameter.KEYWORD_ONLY
    }


def build(name: str, shape: Shape, **options: Any) -> Position:
    """The encoding `name` for a model of this shape; UserError for an unknown name, option or value."""
    encoding, known = encoding_called(name), options_of(name)
    for option in options:
        if option not in known:
            raise UserError(
                f"pos_emb_args: {name} takes no option {option!r}; {suggestion(option, known)}"
            )
    missing = [
        key
        for key, value in known.items()
        if value.default is inspect.Parameter.empty and key not in options
    ]
    if missing:
        raise UserError(
            f"pos_emb_args: {name} needs the option {missing[0]}; write pos_emb_args: {{{missing[0]}: …}}"
        )
    try:
        position = encoding(shape, **options)
    except UserError as fault:
        raise UserError(f"pos_emb_args: {name}: {fault}") from None
    single = [path for path, parameter in position.named_parameters() if parameter.dim() == 0]
    if single:  # DeepSpeed's bf16 engine crashes on it
        raise UserError(
            f"pos_emb: {name}: the parameter {single[0]} has no dimensions; give it the shape [1]"
        )
    return position


def encoding_called(name: str) -> type[Position]:
    """The class registered under `name` or under a fork's spelling of it."""
    known = ALIASES.get(name, name)
    if known not in REGISTRY:
        raise UserError(f"pos_emb: no encoding is called {name!r}; {suggestion(name, REGISTRY)}")
    return REGISTRY[known]


def positive(name: str, value: Any) -> float:
    """`value` as a positive number, or a UserError that names the option."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UserError(f"{name}: {value!r} is not a positive number")
    return float(value)


def switch(name: str, value: Any) -> bool:
    """`value` as true or false, or a UserError that names the option."""
    if not isinstance(value, bool):
        raise UserError(f"{name}: {value!r} is not true or false")
    return value


def suggestion(wrong: Any, known: Any) -> str:
    close = difflib.get_close_matches(str(wrong), list(known), n=1)
    return (
        f"did you mean {close[0]}?"
        if close
        else f"choose from {', '.join(sorted(known)) or 'none'}"
    )
