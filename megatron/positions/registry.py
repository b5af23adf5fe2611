"""Every encoding by its name in the YAML key `pos_emb`, and how one is built from its options."""

import ast
import hashlib
import inspect
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.errors import UserError, did_you_mean, fault_in
from megatron.layer_kinds import load_installed
from megatron.positions.base import DistanceBias, Position, Shape, WrongEncoding

REGISTRY: dict[str, type[Position]] = {}
"""Every encoding by its name in the YAML key `pos_emb`."""

ALIASES: dict[str, str] = {}
"""Our name for each spelling of the GPT-NeoX forks."""

LEAST, MOST = 1e-12, 1e12  # what `positive` takes
"""Numbers of an encoding. A slope of 1e12 at distance 2^24 squared still is a float32 number."""

FILES: dict[str, str] = {}
"""The users' own files that were loaded: path by fingerprint of the code."""

LARGEST_USER_FILE = 1 << 24  # bytes

RETURNED = {
    "on_embeddings": 1,
    "on_embeddings_by_ids": 1,
    "on_queries_keys": 2,
    "on_queries_keys_by_content": 2,
    "on_scores": 1,
    "distance_bias": 0,
    "distance_weight": 0,
    "index_bias": 0,
}
"""How many of its arguments each hook returns in their shapes; 0 for a table."""

NO_CODE = re.compile(
    r"(?<=[(\[])((Expr\(value=Constant\(value=0\)\)|\w+=\[\]|ctx=Load\(\))(, |(?=[)\]])))+"
    r"|, (Expr\(value=Constant\(value=0\)\)|\w+=\[\]|ctx=Load\(\))"
)
"""In a dumped syntax tree: docstrings, and what some versions of Python write and others do not.
Each goes with one comma, so that no text in quotes loses its own."""


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

    A text runs once in a process. UserError if the file cannot be read or run, or if it registers
    nothing or a name that is taken.
    """
    path = str(path)
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        reason = getattr(fault, "strerror", None) or "it is not text"
        raise UserError(
            f"pos_emb_file: {path} cannot be read ({reason}); give the path of a Python file"
        ) from None
    digest = syntax_fingerprint(text)
    if digest in FILES:
        return text
    before = dict(REGISTRY), dict(ALIASES)
    module = types.ModuleType(f"pos_emb_file_{digest[:12]}")
    module.__file__ = path
    sys.modules[module.__name__] = module  # dataclasses look up the names of a class there
    problem = None
    try:
        exec(compile(text, path, "exec"), module.__dict__)
        registered = [REGISTRY[name] for name in REGISTRY.keys() - before[0].keys()]
        if not registered:
            problem = f'{path} registers no encoding; put @register("its_name") above the class'
        for encoding in registered:
            for hook in (*RETURNED, "log_kernel"):
                method = getattr(encoding, hook, None)
                if method is None or method.__module__ != module.__name__:
                    continue
                arguments = inspect.getfullargspec(getattr(DistanceBias, hook)).args
                try:
                    inspect.signature(method).bind(*arguments)
                except TypeError:
                    place = f"{path}:{method.__code__.co_firstlineno}"
                    problem = f"{place}: {method.__qualname__} must take ({', '.join(arguments)})"
                if hook in RETURNED:
                    setattr(encoding, hook, _checked(method, RETURNED[hook]))
    except KeyboardInterrupt:
        raise
    except SyntaxError as fault:
        problem = f"{path}:{fault.lineno} is not valid Python ({fault.msg})"
    except BaseException as fault:  # sys.exit(0) would end the command as if it had succeeded
        problem = fault_in([path], fault) or f"{path} stops with {type(fault).__name__}: {fault}"
    if problem is not None:
        for table, earlier in ((REGISTRY, before[0]), (ALIASES, before[1])):
            for name in table.keys() - earlier.keys():
                del table[name]
        raise UserError(f"pos_emb_file: {problem}")
    FILES[digest] = path
    return text


def registered_by(text: str) -> list[str]:
    """The names of the encodings in a user's own file; text: as load_file returned it."""
    module = f"pos_emb_file_{syntax_fingerprint(text)[:12]}"
    return [name for name, encoding in REGISTRY.items() if encoding.__module__ == module]


def _checked(hook: Callable, count: int) -> Callable:
    """A user's hook that refuses to return another shape than it must; count: as in RETURNED."""

    def checked(self: Position, *inputs: Any, **options: Any) -> Any:
        returned = hook(self, *inputs, **options)
        expected = [list(x.shape) for x in inputs[:count]]
        if not count:
            sizes = (getattr(n, "shape", [n])[0] for n in inputs)
            expected = [[self.shape.heads, *sizes]]
        several = returned if isinstance(returned, tuple | list) else [returned]
        shapes = [list(getattr(x, "shape", [])) for x in several]
        no_table = returned is None and not count
        if shapes != expected and not no_table and self.score_width == 1:
            raise WrongEncoding(hook, f"must return the shapes {expected}, not {shapes}")
        return returned

    return checked


def syntax_fingerprint(text: str) -> str:
    """The same of what Python makes of a text: comments, docstrings and layout do not count."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):  # whoever runs it says so
        return fingerprint(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = 0
        if isinstance(node, ast.JoinedStr):  # Python 3.12 ends f"{x:>{y}}" with an empty text
            node.values = [part for part in node.values if getattr(part, "value", 0) != ""]
    return fingerprint(NO_CODE.sub("", ast.dump(tree)))


def fingerprint(text: str) -> str:
    """The sha256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def options_of(encoding: str | type[Position]) -> dict[str, inspect.Parameter]:
    """The options of an encoding: keyword-only arguments, and numbers that it draws.

    A class that passes on `**options` has those of the next class too.
    """
    if isinstance(encoding, str):
        encoding = encoding_called(encoding)
    options = {}
    for part in encoding.__mro__:
        if "__init__" not in vars(part):
            continue
        parameters = inspect.signature(part.__init__).parameters.values()
        for parameter in parameters:
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
                options.setdefault(parameter.name, parameter)
        if all(parameter.kind is not inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            break
    for key in getattr(encoding, "draws", ()):  # of KERPLE's kernels
        drawn = inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=None)
        options.setdefault(key, drawn)
    return options


def named(option: str, item: Any) -> tuple[str, dict[str, Any]]:
    """Name and options of an encoding in a list of YAML: a name, or {name: {option: value}}.

    UserError, which names the option, for anything else.
    """
    entry = {item: {}} if isinstance(item, str) else item
    if isinstance(entry, Mapping) and len(entry) == 1:
        [(name, options)] = entry.items()
        options = options or {}
        if isinstance(name, str) and isinstance(options, Mapping):
            return name, dict(options)
    raise UserError(
        f"{option}: {item!r} is no encoding; write a name or {{name: {{option: value}}}}"
    )


def build(name: str, shape: Shape, **options: Any) -> Position:
    """The encoding `name` for a model of this shape; UserError for a bad name, option or value."""
    encoding = encoding_called(name)
    for option, parameter in options_of(name).items():
        if parameter.default is parameter.empty and option not in options:
            raise UserError(
                f"pos_emb_args: {name} needs the option {option};"
                f" write pos_emb_args: {{{option}: …}}"
            )
    try:
        encoding, options = encoding.joined(options)
        choices = options_of(encoding)
        for option, value in options.items():
            if option not in choices:
                raise UserError(f"takes no option {option!r}; {suggestion(option, choices)}")
            if isinstance(choices[option].default, bool) and not isinstance(value, bool):
                raise UserError(f"{option}: {value!r} is not true or false")
        position = encoding(shape, **options)
        position.registered_name, position.options = name, options
    except UserError as fault:
        raise UserError(f"pos_emb_args: {name}: {fault}") from None
    if "shape" not in vars(position):
        raise WrongEncoding(encoding.__init__, "must begin with super().__init__(shape)")
    for path, parameter in position.named_parameters():
        if parameter.dim() == 0:  # DeepSpeed's bf16 engine crashes on it
            raise UserError(
                f"pos_emb: {name}: the parameter {path} has no dimensions; give it the shape [1]"
            )
    return position


def encodings(name: str, shape: Shape, layers: int, **options: Any) -> list[Position]:
    """The encoding of each layer: one object for all, or one for each if it's `per_layer`."""
    build_next = partial(build, name, shape, **options)
    first = build_next()
    return [first, *(build_next() if first.per_layer else first for _ in range(1, layers))]


def encoding_called(name: str) -> type[Position]:
    """The class registered under `name` or under a fork's spelling of it.

    Installed packages bring more by the group `megatron.positions` of entry points.
    """
    registered = ALIASES.get(name, name)
    if registered not in REGISTRY:
        load_installed("megatron.positions", registered)
    if registered not in REGISTRY:
        raise UserError(f"pos_emb: no encoding is called {name!r}; {suggestion(name, REGISTRY)}")
    return REGISTRY[registered]


def build_inside(
    shape: Shape, of: Any, args: Any, *, example: str, **more: Any
) -> tuple[Position, dict[str, Any]]:
    """The encoding inside another, and its options; UserError for one that looks at content.

    of, args: its name and options; example: of a name; more: options that it gets if it has them
    """
    if not isinstance(of, str):
        raise UserError(f"of: {of!r} is not the name of an encoding; write of: {example}")
    if args is not None and not isinstance(args, Mapping):
        raise UserError(f"args: {args!r} are not options; write args: {{option: value}}")
    takes = options_of(of)
    options = {name: value for name, value in more.items() if name in takes} | dict(args or {})
    inner = build(of, shape, **options)
    if inner.looks_at_content:
        raise UserError(f"of: {of} looks at content; choose an encoding by positions, or none")
    if inner.distance_weight(1) is not None:
        raise UserError(f"of: {of} multiplies the scores by distance; choose a bias")
    return inner, options


def positive(name: str, value: Any, *, least: float = LEAST, most: float = MOST) -> float:
    """`value` as a positive number from `least` to `most`, or a UserError that names the option."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise UserError(f"{name}: {value!r} is not a positive number")
    if not least <= value <= most:
        raise UserError(f"{name}: {value} is not between {least:.12g} and {most:.12g}")
    return float(value)


def whole(name: str, value: Any, *, least: int = 1, most: int) -> int:
    """`value` as a whole number from `least` to `most`, or a UserError that names the option."""
    number = positive(name, value, least=least, most=most)
    if not number.is_integer():
        raise UserError(f"{name}: {value!r} is not a whole number")
    return int(number)


def listed(name: str, value: Any, *, example: str, most: int) -> list[Any]:
    """`value` as a list of 1 to `most` entries, or a UserError that names the option."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise UserError(f"{name}: {value!r} is not a list; write {name}: {example}")
    if not 1 <= len(value) <= most:
        raise UserError(f"{name}: {len(value)} entries are not 1 to {most}; write {example}")
    return list(value)


def chosen(name: str, value: Any, choices: Iterable[str]) -> str:
    """`value` as one of the choices, or a UserError that names the option."""
    if not isinstance(value, str) or value not in choices:
        raise UserError(f"{name}: {value!r} is not known; {suggestion(value, choices)}")
    return value


def suggestion(wrong: Any, choices: Iterable[str]) -> str:
    """`did you mean X?` if a choice is close, else all names to choose from."""
    names = sorted(choices)
    return did_you_mean(str(wrong), names) or f"choose from {', '.join(names) or 'none'}"
