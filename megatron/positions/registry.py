"""Every encoding by its name in the YAML key `pos_emb`, and how one is built from its options."""

import hashlib
import inspect
import math
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import UserError, did_you_mean
from megatron.positions.base import Position, Shape

REGISTRY: dict[str, type[Position]] = {}
"""Every encoding by its name in the YAML key `pos_emb`."""

ALIASES: dict[str, str] = {}
"""Our name for each spelling of the GPT-NeoX forks."""

LEAST, MOST = 1e-12, 1e12  # what `positive` takes
"""Numbers of an encoding. A slope of 1e12 at distance 2^24 squared still is a float32 number."""

FILES: dict[str, str] = {}
"""The users' own files that were loaded: path by fingerprint of the text."""


def register(name: str, *, aliases: Sequence[str] = ()) -> Callable[[type], type]:
    """Make a class known as `pos_emb: name`; `aliases` are the forks' spellings of it."""

    def add(encoding: type) -> type:
        taken = {name, *aliases} & (REGISTRY.keys() | ALIASES.keys())
        if taken:
            raise ValueError(
                f"{encoding.__name__}: the name {sorted(taken)[0]!r} is taken by another encoding;"
                " choose another"
            )
        REGISTRY[name] = encoding
        for alias in aliases:
            ALIASES[alias] = name
        return encoding

    return add


def load_file(path: str | Path) -> str:
    """Run a user's own Python file, which registers its encodings, and return its text.

    A text runs once in a process. UserError if the file cannot be read or run, if it registers
    nothing or a name that is taken, or if it has changed since it was loaded. sys.exit in it is
    such a fault; os._exit cannot be caught.
    """
    path = str(path)
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        reason = getattr(fault, "strerror", None) or "it is not text"
        raise UserError(
            f"pos_emb_file: {path} cannot be read ({reason}); give the path of a Python file"
        ) from None
    digest = fingerprint(text)
    if digest in FILES:
        return text
    loaded = [Path(known).resolve() for known in FILES.values()]
    if Path(path).resolve() in loaded:
        raise UserError(
            f"pos_emb_file: {path} was changed after this process had loaded it; start again"
        )
    encodings, aliases = set(REGISTRY), set(ALIASES)
    module = types.ModuleType(f"pos_emb_file_{digest[:12]}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look up the names of a class there
    problem = ""
    try:
        exec(compile(text, path, "exec"), module.__dict__)
        if REGISTRY.keys() == encodings:
            problem = f'{path} registers no encoding; put @register("its_name") above the class'
    except SyntaxError as fault:
        problem = f"{path}:{fault.lineno} is not valid Python ({fault.msg})"
    except KeyboardInterrupt:
        raise
    except BaseException as fault:  # sys.exit(0) would end the command as if it had succeeded
        frames = traceback.extract_tb(fault.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == path]
        where = f"{path}:{lines[-1]}" if lines else path
        problem = f"{where} stops with {type(fault).__name__}: {fault}"
    if problem:
        for name in REGISTRY.keys() - encodings:
            del REGISTRY[name]
        for alias in ALIASES.keys() - aliases:
            del ALIASES[alias]
        raise UserError(f"pos_emb_file: {problem}")
    FILES[digest] = path
    return text


def fingerprint(text: str) -> str:
    """The sha256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def options_of(name: str) -> dict[str, inspect.Parameter]:
    """The options of the encoding `name`: keyword-only arguments, and numbers that it draws."""
    encoding = encoding_called(name)
    options = {
        key: parameter
        for key, parameter in inspect.signature(encoding.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    for key in encoding.draws:
        if key not in options:
            drawn = inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None)
            options[key] = drawn
    return options


def named(given: Any) -> tuple[str, dict[str, Any]] | None:
    """Name and options of an encoding inside a list in YAML: a name, or {name: {option: value}}.

    None for anything else.
    """
    if isinstance(given, str):
        return given, {}
    if not isinstance(given, Mapping) or len(given) != 1:
        return None
    [(name, options)] = given.items()
    if not isinstance(name, str) or not isinstance(options or {}, Mapping):
        return None
    return name, dict(options or {})


def build(name: str, shape: Shape, **options: Any) -> Position:
    """The encoding `name` for a model of this shape; UserError for a bad name, option or value."""
    encoding = encoding_called(name)
    known = options_of(name)
    for option in options:
        if option not in known:
            raise UserError(
                f"pos_emb_args: {name} takes no option {option!r}; {suggestion(option, known)}"
            )
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise UserError(
                f"pos_emb_args: {name} needs the option {option};"
                f" write pos_emb_args: {{{option}: …}}"
            )
    try:
        position = encoding(shape, **options)
    except UserError as fault:
        raise UserError(f"pos_emb_args: {name}: {fault}") from None
    for path, parameter in position.named_parameters():
        if parameter.dim() == 0:  # DeepSpeed's bf16 engine crashes on it
            raise UserError(
                f"pos_emb: {name}: the parameter {path} has no dimensions; give it the shape [1]"
            )
    return position


def encoding_called(name: str) -> type[Position]:
    """The class registered under `name` or under a fork's spelling of it."""
    registered = ALIASES.get(name, name)
    if registered not in REGISTRY:
        raise UserError(f"pos_emb: no encoding is called {name!r}; {suggestion(name, REGISTRY)}")
    return REGISTRY[registered]


def inner_options(of: Any, args: Any, *, example: str) -> dict[str, Any]:
    """The options of an encoding inside another: `args`, or a UserError for another kind of value.

    of: its name; example: one that the message gives
    """
    if not isinstance(of, str):
        raise UserError(f"of: {of!r} is not the name of an encoding; write of: {example}")
    if args is not None and not isinstance(args, Mapping):
        raise UserError(f"args: {args!r} are not options; write args: {{option: value}}")
    return dict(args or {})


def positive(name: str, value: Any, *, least: float = LEAST, most: float = MOST) -> float:
    """`value` as a positive number from `least` to `most`, or a UserError that names the option."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise UserError(f"{name}: {value!r} is not a positive number")
    if not least <= value <= most:
        raise UserError(f"{name}: {value} is not between {_short(least)} and {_short(most)}")
    return float(value)


def _short(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def whole(name: str, value: Any, *, most: int) -> int:
    """`value` as a whole number from 1 to `most`, or a UserError that names the option."""
    number = positive(name, value, least=1, most=most)
    if not number.is_integer():
        raise UserError(f"{name}: {value!r} is not a whole number")
    return int(number)


def switch(name: str, value: Any) -> bool:
    """`value` as true or false, or a UserError that names the option."""
    if not isinstance(value, bool):
        raise UserError(f"{name}: {value!r} is not true or false")
    return value


def suggestion(wrong: Any, known: Iterable[str]) -> str:
    """`did you mean X?` if a known name is close, else all names to choose from."""
    names = sorted(known)
    return did_you_mean(str(wrong), names) or f"choose from {', '.join(names) or 'none'}"
